"""Measures forwards over several sequences at once: synthetic rows, nothing is decoded.

Letters: R sequences, n positions of each in one forward, V vocabulary.
"""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from blockpilot.costs.batch import BatchPoint
from blockpilot.decoding.cache import SlabCache
from blockpilot.decoding.protocols import Batchable
from blockpilot.decoding.target import Target
from blockpilot.decoding.timing import Clock

log = logging.getLogger(__name__)

Cell = tuple[str, int, int, int]  # part, batch, positions, context


@dataclass(frozen=True)
class BatchGrid:
    """What to measure: every combination, a number of times."""

    batches: Sequence[int]
    contexts: Sequence[int]
    verified: Sequence[int]  # positions of a target forward
    drafted: Sequence[int]  # slots of a drafted block; none without a drafter
    repeats: int

    @property
    def n_forwards(self) -> int:
        """Timed ones and those that warm up."""
        cells = len(self.batches) * len(self.contexts) * (len(self.verified) + len(self.drafted))
        return cells * (self.repeats + 1)


@torch.inference_mode()
def batch_points(
    target: Target, drafter: Batchable | None, grid: BatchGrid, *, seed: int
) -> list[BatchPoint]:
    """Points of a grid, in shuffled rounds so that a slow moment hits them alike.

    The first round warms up. `target` is an eager one, and the drafter is bound to it. A tree is
    measured as a chain of as many positions: its forward computes the same products, only its mask
    and its position ids differ. A forward ends with the best token of each position; nothing is
    compared or committed, and no features are captured.
    """
    target.capture(())
    forwards: dict[Cell, Callable[[], Tensor]] = {}
    for batch in grid.batches:
        for context in grid.contexts:
            verify = verification(target, batch, context, max(grid.verified), seed)
            for n in grid.verified:
                forwards["verify", batch, n, context] = partial(verify, n)
            if grid.drafted:
                assert drafter is not None
                draft = drafter.batched(batch, context, max(grid.drafted))
                for n in grid.drafted:
                    forwards["draft", batch, n, context] = partial(draft, n)
    cells, order, clock = list(forwards), random.Random(seed), Clock(target.device)
    spent: defaultdict[Cell, list[float]] = defaultdict(list)
    for round_ in range(grid.repeats + 1):
        order.shuffle(cells)
        for cell in cells:
            clock.start()
            forwards[cell]()
            seconds, _ = clock.finish()
            if round_:
                spent[cell].append(seconds)
        log.info("batches: round %d of %d", round_, grid.repeats)
    return [point(cell, spent[cell]) for cell in forwards]


def verification(
    target: Target, batch: int, context: int, widest: int, seed: int
) -> Callable[[int], Tensor]:
    """Forwards of n positions, up to `widest`, of each of `batch` sequences: best tokens [R, n].

    All rows have the same random prompt behind them, and new tokens of their own, so that experts
    are chosen as by different texts. What a forward appends is rolled back.
    """
    draw = torch.Generator().manual_seed(seed)
    prompt = torch.randint(target.embed_rows, (1, context), generator=draw).to(target.device)
    ids = torch.randint(target.embed_rows, (batch, widest), generator=draw).to(target.device)
    one, cache = (SlabCache(len(target.layers), context + more) for more in (0, widest))
    target.model(input_ids=prompt, cache=one, logits_to_keep=1)
    for layer, read in zip(cache.layers, one.layers, strict=True):
        layer.update(*(each.expand(batch, -1, -1, -1) for each in (read.keys, read.values)))

    def forward(n: int) -> Tensor:
        logits: Tensor = target.model(
            input_ids=ids[:, :n], cache=cache, logits_to_keep=n
        ).logits  # [R, n, V]
        cache.rollback(context)
        return logits.argmax(dim=-1)

    return forward


def point(cell: Cell, seconds: Sequence[float]) -> BatchPoint:
    """Median and quartiles of some repeats."""
    low, middle, high = (float(each) for each in np.quantile(seconds, [0.25, 0.5, 0.75]))
    part, batch, positions, context = cell
    return BatchPoint(
        part=part,
        batch=batch,
        positions=positions,
        context=context,
        repeats=len(seconds),
        seconds=middle,
        seconds_q25=low,
        seconds_q75=high,
        engine=Target.engine,
    )
