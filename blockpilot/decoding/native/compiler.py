"""Compiles the kernels for this machine, once, and loads them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch  # before the kernels: both then share its OpenMP library and threads  # noqa: F401

from blockpilot.base.errors import UserError
from blockpilot.base.json_values import first_line
from blockpilot.base.paths import cache_dir

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fopenmp",
    "-shared",
    "-fPIC",
)


def compiler() -> str | None:
    """The C++ compiler: what the variable CXX says, else the first that is found."""
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [named] if named else ["g++", "clang++"])), None)


@functools.cache
def kernels() -> ctypes.CDLL:
    """The compiled kernels, from the cache folder where this machine compiled them before.

    Raises UserError without a compiler, and when it fails.
    """
    found = compiler()
    if found is None:
        raise UserError(
            "engine=native: no C++ compiler is found; install g++, name one in CXX or choose "
            "engine=eager"
        )
    version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    source = _SOURCE.read_text(encoding="utf-8")
    made_of = "\0".join((source, *_FLAGS, version, _processor()))
    digest = hashlib.sha256(made_of.encode()).hexdigest()[:12]
    library = cache_dir() / f"kernels-{digest}.so"
    if not library.is_file():
        _compile(found, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise UserError(f"engine=native: cannot load {library} ({first_line(error)})") from error


def _compile(found: str, library: Path) -> None:
    begin = time.monotonic()
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=".compiling-") as scratch:
            made = Path(scratch) / library.name
            command = [found, *_FLAGS, str(_SOURCE), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["it says nothing"])[0]
                raise UserError(f"engine=native: {found} cannot compile the kernels ({reason})")
            made.replace(library)  # at once: another process may be loading it
    except OSError as error:
        raise UserError(f"engine=native: cannot write {library} ({first_line(error)})") from error
    log.info("compiled the kernels for this CPU, once, in %.0f s", time.monotonic() - begin)


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return platform.machine() + "".join(sorted(told))
