"""A cycle of each kind, engine by engine: time beside its floor, operations, waits, allocations."""

from __future__ import annotations

import copy
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from bench_floor import Machine, Work, drafter_work, target_work
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.protocols import Policy
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.target import Target
from blockpilot.decoding.types import Draft, Trace, Verdict, View
from blockpilot.drafters.none import NoDrafter
from blockpilot.generate import Pair
from blockpilot.policies.fixed import FixedPolicy
from blockpilot.policies.tree import TreePolicy
from blockpilot.stats.intervals import bootstrap

N_TOKENS, ROUNDS = 32, 2
_ALLOCATING = ("aten::empty", "aten::empty_strided", "aten::resize_")
TREES = (8, 16)  # positions, the anchor counted


@dataclass(frozen=True)
class Section:
    """One part of the bench: tables for the reader, figures for the JSON."""

    name: str
    tables: list[Table]
    figures: dict[str, Any]


class Copied(NoDrafter):
    """Proposes the same tokens in every cycle at no cost, as a copy from the text would."""

    name = "copied"

    def __init__(self, n_slots: int) -> None:
        self.trained_block_size = n_slots

    def draft(self, view: View, n_slots: int) -> Draft:
        """The anchor, again and again."""
        return Draft(view.anchor.repeat(n_slots - 1))

    def observe(self, verdict: Verdict) -> None:
        """Nothing is learnt."""


def kinds(pair: Pair, target: Target) -> dict[str, Method]:
    """Cycles that tables compare, bound to the pair behind one engine."""
    drafter = copy.copy(pair.method.drafter)
    block = drafter.trained_block_size or 1

    def fixed(size: int) -> Policy:
        return FixedPolicy(block_size=size, block_mode="draft")

    made = {"plain": Method(NoDrafter(), fixed(1))}
    if block > 1:
        made[f"block {block}"] = Method(drafter, fixed(block))
        made[f"copied {block}"] = Method(Copied(block), fixed(block))
    if drafter.has_marginals:
        for positions in TREES:
            policy = TreePolicy(nodes=positions - 1, cost=None, fit=None, online=False)
            made[f"tree {positions}"] = Method(drafter, policy)
    return {name: method.bind(target) for name, method in made.items()}


def works(target: Target, method: Method, context: int) -> list[Work]:
    """Forwards of one cycle."""
    positions = method.policy.block_size or 1
    drafted = method.policy.block_of.drafted if method.policy.tree else positions  # type: ignore[attr-defined]
    draft = drafter_work(target, method.drafter, drafted, context) if positions > 1 else []
    return [target_work(target, positions, context), *draft]


def answer_length(pair: Pair, most: int) -> int:
    """New tokens per answer: as many as a part asks for, unless decoding.max_new_tokens is less."""
    return min(most, pair.cfg.decoding.max_new_tokens)


def bench_cycle(
    pair: Pair, targets: dict[str, Target], prompts: list[list[int]], machine: Machine
) -> Section:
    """Milliseconds per cycle, engines and kinds interleaved there and back, at T = 0 and at T = 1.

    Medians over prompts with the 95% interval of the median.
    """
    methods = {engine: kinds(pair, target) for engine, target in targets.items()}
    runs = [
        (engine, kind, temperature)
        for engine in targets
        for kind in methods[engine]
        for temperature in (0.0, 1.0)
        if temperature == 0 or kind in ("plain", f"block {pair.method.drafter.trained_block_size}")
    ]
    spent: defaultdict[tuple[str, str, float], list[float]] = defaultdict(list)
    taus: defaultdict[tuple[str, str, float], list[float]] = defaultdict(list)
    n_tokens = answer_length(pair, N_TOKENS)
    for number, ids in enumerate([prompts[0], *prompts]):  # the first time warms up
        traces: defaultdict[tuple[str, str, float], list[Trace]] = defaultdict(list)
        for round_ in range(ROUNDS):
            for run in runs[:: -1 if round_ % 2 else 1]:
                engine, kind, temperature = run
                sampler = KeyedSampler(temperature=temperature)
                method = methods[engine][kind]
                traces[run].append(decode(targets[engine], method, ids, sampler, n_tokens))
        for run, both in traces.items() if number else ():
            cycles = sum(len(trace.committed) for trace in both)
            if cycles:
                spent[run].append(sum(1e3 * trace.decode_s for trace in both) / cycles)
                taus[run].append(len(both) * (len(both[0].tokens) - 1) / cycles)
        machine.measure()
    context = round(statistics.mean(map(len, prompts))) + n_tokens // 2
    limits, figures = machine.limits, {}
    times = Table("engine", "cycle", "ms (95%)", "floor", "x floor", "GB/s", "GFLOP/s", "tau")
    times.title = f"ms per cycle, median of {len(prompts)} prompts, context {context}"
    for run in runs:
        engine, kind, temperature = run
        work = works(targets[engine], methods[engine][kind], context)
        values = np.array(spent[run])
        ms, floor = float(np.median(values)), 1e3 * limits.floor_s(work)
        low, high = bootstrap(lambda v: np.median(v, axis=-1), values)
        label = kind if temperature == 0 else f"{kind}, T = 1"
        rates = [sum(getattr(w, name) for w in work) / ms / 1e6 for name in ("bytes", "operations")]
        tau = statistics.median(taus[run])
        times.add_row(
            engine,
            label,
            f"{ms:.1f} ({low:.1f}-{high:.1f})",
            f"{floor:.1f}",
            f"{ms / floor:.2f}",
            *(f"{rate:.0f}" for rate in rates),
            f"{tau:.2f}",
        )
        figures[f"{engine}, {label}"] = {
            "ms": ms,
            "low": low,
            "high": high,
            "floor_ms": floor,
            "over_floor": ms / floor,
            "tau": tau,
        }
        if temperature == 1:
            cold = np.array(spent[engine, kind, 0.0])
            figures[f"{engine}, {label}"]["over_T0"] = float(np.median(values / cold))
    times.caption = f"floor: weights, keys and values once, and products: {machine.described()}"
    counts = Table("engine", "cycle", "ATen operations", "outside the target", "kernels", "waits")
    counts.add_column("allocations")
    counts.title = "per cycle"
    for engine, target in targets.items():
        for kind, method in methods[engine].items():
            counted = count(target, method, prompts[0], n_tokens)
            figures[f"{engine}, {kind}"] |= counted
            counts.add_row(engine, kind, *(f"{value:.1f}" for value in counted.values()))
    counts.caption = "waits: synchronisations with a GPU; kernels: launched on it"
    return Section("cycle", [times, counts], figures)


def count(target: Target, method: Method, ids: list[int], n_tokens: int) -> dict[str, float]:
    """What one cycle makes torch do: the difference of an answer and one of a quarter's length."""
    longer, shorter = (_counted(target, method, ids, n) for n in (n_tokens, n_tokens // 4))
    cycles = longer.pop("cycles") - shorter.pop("cycles")
    if cycles < 1:
        return dict.fromkeys(longer, float("nan"))
    return {name: (longer[name] - shorter[name]) / cycles for name in longer}


def _counted(target: Target, method: Method, ids: list[int], n_tokens: int) -> dict[str, float]:
    activities = [ProfilerActivity.CPU]
    if target.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    forward = target.forward

    def marked(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function("target forward"):
            return forward(*args, **kwargs)

    target.forward = marked  # type: ignore[method-assign]
    try:
        with profile(activities=activities) as profiler:
            trace = decode(target, method, ids, KeyedSampler(), n_tokens)
    finally:
        del target.forward
    events = list(profiler.events())
    inside = sorted(
        (each.time_range.start, each.time_range.end)
        for each in events
        if each.name == "target forward"
    )
    operations = [each for each in events if each.name.startswith("aten::")]
    outside = [
        each
        for each in operations
        if not any(start <= each.time_range.start < end for start, end in inside)
    ]
    device = [each for each in events if str(each.device_type) == "DeviceType.CUDA"]
    return {
        "aten": len(operations),
        "aten_outside_target": len(outside),
        "kernels": len(device),
        "waits": sum("Synchronize" in each.name for each in events),
        "allocations": sum(each.name in _ALLOCATING for each in operations),
        "cycles": len(trace.committed),
    }
