"""Atomic files: a reader sees the old content or the new one, also after a kill or a full disk."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import pandas as pd

from blockpilot.base.errors import UserError
from blockpilot.base.json_values import first_line


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a temporary file beside `path`, sync it and rename it over `path`.

    Raises UserError when the system refuses (disk full, read-only, no such folder); what stood at
    `path` is then unchanged.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        try:
            with temporary.open("wb") as stream:
                write(stream)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise refused(path, error) from error


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """A frame without its index, atomically; raises like `replace_file`."""
    text = table.to_csv(index=False).encode()
    replace_file(path, lambda stream: stream.write(text))


def read_csv(path: Path, *, needed: Iterable[str], numbers: Iterable[str] = ()) -> pd.DataFrame:
    """What `write_csv` wrote.

    Raises UserError, naming the file, when it was cut off, lacks a column that is `needed`, or has
    text in one of `numbers`.
    """
    try:
        table = pd.read_csv(path)
        if not path.read_bytes().endswith(b"\n"):
            raise ValueError("its last line is cut off")
        if missing := [name for name in needed if name not in table]:
            raise ValueError(f"no column {missing[0]}")
        for name in numbers:
            if name in table and not pd.api.types.is_numeric_dtype(table[name]):
                raise ValueError(f"column {name} holds text")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: no readable table ({first_line(error)}); make it again"
        ) from error
    return table


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create `folder` with its parents; raises UserError when the system refuses."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused(folder, error) from error


def remove_leftovers(folder: Path, of: str = "") -> None:
    """Delete temporary files that a killed writer left in `folder`, or those of the file `of`."""
    for leftover in folder.glob(f".{glob.escape(of)}*.tmp"):
        leftover.unlink(missing_ok=True)


def refused(path: Path, error: OSError) -> UserError:
    """The one line that tells a failed write."""
    return UserError(
        f"cannot write {path}: {error.strerror or error}; what was stored before is intact, "
        "free space or choose a writable folder with paths.outputs and run again"
    )


@contextlib.contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold the advisory lock file `path`; it falls open when the process ends, killed or not.

    Raises BlockingIOError when another holds it and `wait` is false, UserError when the file cannot
    be made.
    """
    try:
        stream = path.open("a")
    except OSError as error:
        raise refused(path, error) from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError as error:
            raise refused(path, error) from error
        yield
