"""Measured seconds of cycles, interleaved over kinds, sizes and contexts."""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from blockpilot.base.errors import UserError
from blockpilot.costs.curve import KINDS, PARTS, CostPoint
from blockpilot.decoding.loop import Method, check_prompt, decode
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.target import Target
from blockpilot.decoding.types import Trace

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cell:
    """Verified positions of a cycle of one kind (`curve.KINDS`)."""

    size: int
    kind: str


@contextmanager
def silent_drafters() -> Iterator[None]:
    """No warning of a low tau meanwhile: on noise every drafter has one."""
    logger = logging.getLogger("blockpilot.drafters")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def measured(
    target: Target,
    methods: Mapping[Cell, Method],
    contexts: Sequence[int],
    *,
    repeats: int,
    budget: int,
    sampler: KeyedSampler,
    seed: int,
) -> list[CostPoint]:
    """Points of all methods and contexts, in shuffled rounds so that a slow moment hits them alike.

    The text is noise; the target's stop tokens must not end it. The first round warms up. A cycle's
    cost is the decode loop's time over its cycles, `budget` - 1 at most, without the drafter's
    reading of the prompt: an answer has many more cycles than the few that are timed. Raises
    UserError for a context that the target cannot hold.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts = {}
    widest = max(method.policy.widest for method in methods.values())
    for context in contexts:
        prompts[context] = torch.randint(
            target.embed_rows, (context,), generator=generator
        ).tolist()
        if problem := check_prompt(target, prompts[context], budget, widest):
            raise UserError(f"contexts={list(contexts)}: {problem}")
    cells = [(cell, context) for cell in methods for context in contexts]
    spent: defaultdict[tuple[Cell, int], list[dict[str, float]]] = defaultdict(list)
    order = random.Random(seed)
    for round_ in range(repeats + 1):
        order.shuffle(cells)
        for cell, context in cells:
            trace = decode(target, methods[cell], prompts[context], sampler, budget)
            if round_:
                spent[cell, context].append(per_cycle(trace))
        log.info("round %d of %d", round_, repeats)
    kinds = list(KINDS)
    ordered = sorted(spent, key=lambda key: (kinds.index(key[0].kind), key[0].size, key[1]))
    return [point(cell, context, spent[cell, context]) for cell, context in ordered]


def per_cycle(trace: Trace) -> dict[str, float]:
    """Seconds per cycle, in all and by part, and `start_s` per answer."""
    parts = {name: getattr(trace, name) for name in ("decode_s", *PARTS)}
    for name in ("decode_s", "draft_s"):
        parts[name] -= trace.start_s
    parts = {name: seconds / len(trace.committed) for name, seconds in parts.items()}
    return parts | {"start_s": trace.start_s}


def point(cell: Cell, context: int, repeats: list[dict[str, float]]) -> CostPoint:
    """Medians and quartiles of some repeats."""
    low, middle, high = np.quantile([each["decode_s"] for each in repeats], [0.25, 0.5, 0.75])
    parts = {
        part: float(np.median([each[part] for each in repeats])) for part in (*PARTS, "start_s")
    }
    times = float(middle), float(low), float(high)
    return CostPoint(cell.size, context, len(repeats), *times, **parts, kind=cell.kind)
