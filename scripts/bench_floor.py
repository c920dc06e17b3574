"""What the machine allows: how fast it reads and multiplies, and so the least that a cycle takes.

The floor of a forward is the longer of two times: reading its weights, keys and values once at the
highest of several kernels' bandwidths, and its multiplications at the highest of several products'.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockpilot.decoding.target import Target

_REPEATS = 5


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Wall time of some work, the device's queue included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


@dataclass(frozen=True)
class Work:
    """What a forward reads and multiplies."""

    bytes: float
    operations: float  # a multiplication and an addition are two


@dataclass(frozen=True)
class Limits:
    """Measured limits of a machine, the best of its kernels at a time."""

    bytes_s: float
    operations_s: float

    def floor_s(self, forwards: list[Work]) -> float:
        """The least seconds that these forwards take, one after the other."""
        return sum(
            max(each.bytes / self.bytes_s, each.operations / self.operations_s) for each in forwards
        )


class Machine:
    """Measures the limits, several times in the course of a bench: a machine has its moods."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        n = 2**27
        text = torch.ones(n, device=device)  # float32: 4 bytes each
        self._bytes = 4 * n
        self._reads: list[Callable[[], Tensor]] = [
            text.sum,
            text.max,
            lambda: torch.dot(text, text),
        ]
        sizes = (1024, 2048) if device.type == "cpu" else (4096, 8192)
        matrices = {size: torch.ones(size, size, dtype=dtype, device=device) for size in sizes}
        self._products = {size: (lambda m=m: m @ m) for size, m in matrices.items()}
        self.measured: list[Limits] = []

    def measure(self) -> None:
        """Measure once more."""
        read = min(seconds(self.device, work) for work in self._reads for _ in range(_REPEATS))
        rate = max(
            2 * size**3 / seconds(self.device, work)
            for size, work in self._products.items()
            for _ in range(_REPEATS)
        )
        self.measured.append(Limits(self._bytes / read, rate))

    @property
    def limits(self) -> Limits:
        """The highest of all measurements: a floor is what was ever possible."""
        return Limits(
            max(each.bytes_s for each in self.measured),
            max(each.operations_s for each in self.measured),
        )

    def described(self) -> str:
        """Limits with the spread of the measurements."""
        parts = []
        for name, unit in (("bytes_s", "GB/s"), ("operations_s", "GFLOP/s")):
            values = [getattr(each, name) / 1e9 for each in self.measured]
            parts.append(f"{max(values):.0f} {unit} ({min(values):.0f}-{max(values):.0f})")
        return " and ".join(parts)


def target_work(target: Target, rows: int, context: int) -> Work:
    """One forward of the target over `rows` positions behind `context` cached ones."""
    config: Any = target.config
    head = target.model.get_output_embeddings().weight
    inside = sum(weight.numel() for weight in target.layers.parameters())
    heads = config.num_attention_heads
    d = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    layers = len(target.layers)
    cached = 2 * layers * kv_heads * d * (context + rows)
    attention = 4 * layers * heads * d * rows * (context + rows)
    weights = inside + head.numel()
    return Work((weights + cached) * head.element_size(), 2 * weights * rows + attention)


def drafter_work(target: Target, drafter: Any, rows: int, context: int) -> list[Work]:
    """One draft of `rows` slots: the network, and the target's LM head once more."""
    network = getattr(drafter, "network", None)
    if network is None or rows < 2:
        return []
    head = target.model.get_output_embeddings().weight
    inside = sum(weight.numel() for weight in network.layers.parameters())
    shape = network.config.layers
    cached = 2 * len(network.layers) * shape.num_key_value_heads * shape.head_dim * (context + rows)
    size = head.element_size()
    return [
        Work((inside + cached) * size, 2 * inside * rows),
        Work(head.numel() * size, 2 * head.numel() * (rows - 1)),
    ]
