"""Where a run computes, and in which dtype."""

from __future__ import annotations

import functools
import platform
import re

import torch

from blockpilot.base.errors import UserError
from blockpilot.base.launch import world

DTYPES = ("float32", "bfloat16", "float16", "float64")


def pick_device(name: str) -> torch.device:
    """Return the device called `name` and make it the current one.

    Args:
        name: auto (the GPU of this rank where there is one, else the CPU), cpu, cuda (the GPU of
            this rank) or cuda:<index>.

    Raises:
        UserError: there is no such device.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not gpus):
        return torch.device("cpu")
    found = re.fullmatch(r"auto|cuda(?::(\d+))?", name)
    index = -1 if found is None else int(found[1] or world().local_rank)
    if not 0 <= index < gpus:
        allowed = ", ".join(["auto", "cpu", *(f"cuda:{number}" for number in range(gpus))])
        where = f" (GPU {index})" if index >= 0 and ":" not in name else ""
        raise UserError(f"device={name}{where}: not on this machine; there are {allowed}")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def pick_dtype(name: str, default: str, device: torch.device) -> torch.dtype:
    """Return the dtype called `name`; `auto` means the model's own, `default`.

    On a CPU that only emulates products of 16-bit numbers, a hundred times slower than of 32-bit
    ones, `auto` is float32 instead of a 16-bit dtype.

    Raises:
        UserError: there is no such dtype, or it is not one for weights.
    """
    chosen = default if name == "auto" else name
    if chosen not in DTYPES:
        raise UserError(f"dtype={chosen}: must be auto, {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, chosen)
    if name == "auto" and dtype.itemsize == 2 and not has_16_bit_products(device):
        return torch.float32
    return dtype


@functools.cache
def has_16_bit_products(device: torch.device) -> bool:
    """Whether a device multiplies 16-bit matrices by instructions of its own."""
    if device.type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
