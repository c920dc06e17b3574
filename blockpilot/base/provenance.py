"""Who made a result: code version, libraries and hardware, as plain JSON values."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockpilot import __version__

_LIBRARIES = ("torch", "transformers", "datasets", "accelerate", "numpy", "safetensors", "gguf")


def digest(network: nn.Module) -> str:
    """Twelve hex digits that change with the weights, every number of them."""
    state = sorted(network.state_dict().items())
    with ThreadPoolExecutor() as pool:  # hashing leaves the interpreter's lock alone
        tensors = list(pool.map(_tensor_digest, (tensor for _, tensor in state)))
    lines = [f"{key} {tensor}" for (key, _), tensor in zip(state, tensors, strict=True)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def _tensor_digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()}"


def facts(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Facts about the code and the machine that a result depends on.

    `git_commit` and `git_dirty` are None outside a checkout.
    """
    commit, dirty = _git_state(Path(__file__).resolve().parents[2])
    return {
        "version": __version__,
        "git_commit": commit,
        "git_dirty": dirty,
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in _LIBRARIES},
        **machine(device),
    }


def machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Facts about the machine alone.

    `gpu` is the name of `device`, None on a CPU; `gpus` are all that this process sees; `threads`
    are torch's intra-op threads.
    """
    device = torch.device(device)
    return {
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
    }


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _git_state(root: Path) -> tuple[str | None, bool | None]:
    """Commit of the checkout at `root` and whether tracked files differ from it."""
    top = _git(root, "rev-parse", "--show-toplevel")
    # An installed package may lie inside somebody else's repository: that commit says nothing.
    if top is None or Path(top).resolve() != root:
        return None, None
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return commit, None if changes is None else bool(changes)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    """Marketing name of the CPU; the architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
