"""What a decoding cycle spends its time on, beside the floor that the machine sets.

The floor of a forward is the larger of two times: its weights read once at the machine's measured
read bandwidth, and its multiplications at the measured rate of a large matrix product.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.types import Trace
from blockpilot.generate import Pair

N_TOKENS = 48
PARTS = ("target forward", "drafter forward", "LM heads", "sampling", "rest", "cycle")


@dataclass(frozen=True)
class Section:
    """One part of the bench: a table for the reader, figures for the JSON."""

    name: str
    table: Table
    figures: dict[str, Any]


class Stopwatch:
    """Seconds spent inside wrapped calls; waits for the device around them on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._device = device

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, with its time added to `part`."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            begin = self._now()
            result = call(*args, **kwargs)
            self.spent[part] += self._now() - begin
            return result

        return wrapper


@contextmanager
def watched(pair: Pair) -> Iterator[Stopwatch]:
    """Time the target's forwards, the LM head and the sampler while the block runs."""
    watch, target = Stopwatch(pair.target.device), pair.target
    head = target.model.get_output_embeddings()
    plain_head, plain_forward, plain_call = head.forward, target.forward, KeyedSampler.__call__
    in_target, in_draft = (watch.timed(part, plain_head) for part in ("target head", "draft head"))
    timed_forward, inside = watch.timed("forward", plain_forward), False

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        inside = True
        try:
            return timed_forward(*args, **kwargs)
        finally:
            inside = False

    head.forward = lambda *args: (in_target if inside else in_draft)(*args)
    target.forward = forward  # type: ignore[method-assign]
    KeyedSampler.__call__ = watch.timed("sampling", plain_call)  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        head.forward = plain_head
        del target.forward
        KeyedSampler.__call__ = plain_call  # type: ignore[method-assign]


def measure(pair: Pair, method: Method, ids: list[int]) -> tuple[Trace, dict[str, float]]:
    """One decode; milliseconds per cycle by part, the prefill left out."""
    cfg = pair.cfg.decoding
    sampler = KeyedSampler(temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p)
    with watched(pair) as watch:
        at_prefill: dict[str, float] = {}

        def emit(tokens: list[int]) -> None:
            if not at_prefill:  # the first call comes at the end of the prefill
                at_prefill.update({"forward": 0.0, **watch.spent})

        trace = decode(pair.target, method, ids, sampler, answer_length(pair, N_TOKENS), emit=emit)
        spent = {k: v - at_prefill.get(k, 0.0) for k, v in watch.spent.items()}
    parts = {
        "target forward": spent["forward"] - spent["target head"],
        "drafter forward": trace.draft_s - spent.get("draft head", 0.0),
        "LM heads": spent["target head"] + spent.get("draft head", 0.0),
        "sampling": spent["sampling"],
        "cycle": trace.decode_s,
    }
    parts["rest"] = trace.decode_s - sum(parts[part] for part in PARTS[:4])
    return trace, {k: 1000 * v / len(trace.committed) for k, v in parts.items()}


def answer_length(pair: Pair, most: int) -> int:
    """New tokens per answer: as many as a part asks for, unless decoding.max_new_tokens is less."""
    return min(most, pair.cfg.decoding.max_new_tokens)


def summary(values: list[float]) -> str:
    """Median and the middle half."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.1f} ({low:.1f}-{high:.1f})"


@dataclass(frozen=True)
class Machine:
    """Measured limits: bytes read and multiply-adds (counted twice) done per second."""

    bytes_s: float
    flops_s: float


def machine_limits(device: torch.device, dtype: torch.dtype) -> Machine:
    """Best of several runs over 512 MiB, and of a square matrix product in `dtype`."""
    n = 2**27
    text = torch.ones(n, device=device)  # float32: 4 bytes each
    read = min(seconds(device, lambda: text.sum()) for _ in range(5))
    size = 2048 if device.type == "cpu" else 8192
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    product = min(seconds(device, lambda: matrix @ matrix) for _ in range(5))
    return Machine(4 * n / read, 2 * size**3 / product)


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Wall time of some work, the device's queue included."""
    watch = Stopwatch(device)
    watch.timed("work", work)()
    return watch.spent["work"]


def floor_ms(pair: Pair, machine: Machine, block_size: int) -> float:
    """Milliseconds that a cycle must take: target, drafter and both LM heads."""
    head = pair.target.model.get_output_embeddings().weight
    inside = sum(w.numel() for w in pair.target.layers.parameters())
    forwards = [(inside + head.numel(), block_size)]
    network = getattr(pair.method.drafter, "network", None)
    if block_size > 1 and network is not None:
        drafter = sum(w.numel() for w in network.parameters())
        forwards.append((drafter + head.numel(), block_size))
    total = 0.0
    for weights, tokens in forwards:
        read = weights * head.element_size() / machine.bytes_s
        total += max(read, 2 * weights * tokens / machine.flops_s)
    return 1000 * total


def bench_cycle(pair: Pair, methods: dict[str, Method], prompts: list[list[int]]) -> Section:
    """Parts of a cycle per method: medians over prompts with the middle half."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
    taus: dict[str, list[float]] = {name: [] for name in methods}
    for number, ids in enumerate([prompts[0], *prompts]):  # the first time warms up
        for name in list(methods)[:: 1 if number % 2 else -1]:
            trace, parts = measure(pair, methods[name], ids)
            if number and trace.committed:
                tau = sum(trace.committed) / len(trace.committed)
                rows[name].append({**parts, "ms per token": parts["cycle"] / tau})
                taus[name].append(tau)
    title = f"ms per cycle, median (middle half) of {len(rows['plain'])} prompts"
    table = Table("part", *methods, title=title)
    figures: dict[str, Any] = {}
    for part in (*PARTS, "ms per token"):
        values = {name: [row[part] for row in rows[name]] for name in methods}
        table.add_row(part, *(summary(values[name]) for name in methods))
        figures[part] = {name: statistics.median(values[name]) for name in methods}
    table.add_row("tau", *(summary(taus[name]) for name in methods))
    shares = {name: [row["rest"] / row["cycle"] for row in rows[name]] for name in methods}
    table.add_row("rest / cycle", *(f"{statistics.median(shares[n]):.1%}" for n in methods))
    machine = machine_limits(pair.target.device, pair.target.dtype)
    sizes = {"plain": 1, "drafter": pair.method.drafter.trained_block_size or 1}
    floors = {name: floor_ms(pair, machine, sizes[name]) for name in methods}
    table.add_row("floor", *(f"{floors[name]:.1f}" for name in methods))
    over = {name: figures["cycle"][name] / floors[name] for name in methods}
    table.add_row("cycle / floor", *(f"{over[name]:.2f}" for name in methods))
    table.caption = (
        f"floor: weights once at {machine.bytes_s / 1e9:.1f} GB/s, or the products at "
        f"{machine.flops_s / 1e9:.0f} GFLOP/s, whichever takes longer; both measured now"
    )
    figures |= {"floor": floors, "cycle / floor": over, "machine": asdict(machine)}
    figures["tau"] = {name: statistics.median(taus[name]) for name in methods}
    return Section("cycle", table, figures)
