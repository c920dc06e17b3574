"""A coarse cost curve in seconds, for policies that decide by costs where none was measured.

All kinds of cycles take turns in one answer to noise, so one prompt is read for all of them. The
curve is kept for the next time beside the prepared weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from blockpilot.base.files import make_folder, replace_file
from blockpilot.base.paths import cache_dir
from blockpilot.base.provenance import facts
from blockpilot.costs.curve import CostCurve, CostPoint, cost_settings, load_cost
from blockpilot.costs.measure import Cell, silent_drafters
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.protocols import Drafter, TargetModel
from blockpilot.decoding.target import Target
from blockpilot.decoding.types import Block, Draft, Verdict, View
from blockpilot.policies.tree import best_first, tree_draft

log = logging.getLogger(__name__)

_RANKS = 16  # candidates of a slot
_CONTEXT = 128  # tokens of the prompt
_ROUNDS = 2  # over all cells, in one answer
_LEAST, _MOST = 3, 12  # timed cycles of a cell
_SECONDS = 2.0  # after which no further answer begins, once each cell has its least


class RotatingPolicy:
    """Takes a cycle of each cell in turn."""

    name = "rotating"
    fingerprint: str | None = None
    speculates = True
    block_mode = "draft"
    reads_clock = True
    tree = True

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.cells = cells
        self.taken: list[Cell] = []  # of all cycles
        self.block_size: int | None = max(cell.size for cell in cells)

    def bind(self, target: TargetModel, drafter: Drafter) -> None:
        trained = drafter.trained_block_size or 1
        self.widest = max(self.block_size or 1, trained)
        self._trained = trained

    def start(self, view: View) -> None:
        """Goes on where the last answer ended."""

    def block(self, view: View) -> Block:
        self._cell = self.cells[len(self.taken) % len(self.cells)]
        self.taken.append(self._cell)
        if self._cell.kind == "tree":
            return Block(self._trained, self._cell.size)
        return Block(1 if self._cell.kind == "copy" else self._cell.size, self._cell.size)

    def next(self, draft: Draft, view: View) -> Draft:
        if self._cell.kind == "tree":
            best = draft.candidates(_RANKS)
            tree = best_first(best.logprobs, self._cell.size - 1)
            return tree_draft(tree, best, view.anchor.device)
        if self._cell.kind == "copy":
            return Draft(view.anchor.repeat(self._cell.size - 1))
        return draft

    def observe(self, verdict: Verdict) -> None:
        """Nothing is learnt of noise."""


def calibrated(target: TargetModel, drafter: Drafter, cells: Sequence[Cell]) -> CostCurve:
    """The curve of a bound pair on this machine over some cells: kept from before, or measured in
    some three seconds. A first cell that is a chain of 1 is plain decoding.
    """
    assert isinstance(target, Target)
    settings = cost_settings(target, drafter)
    asked = [settings, [[cell.kind, cell.size] for cell in cells]]
    name = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]
    file = cache_dir() / f"cost-{name}.json"
    if file.exists():
        return load_cost(file, settings)
    begin = time.monotonic()
    curve = CostCurve(settings, facts(target.device), _measured(target, drafter, cells))
    make_folder(file.parent)
    replace_file(file, lambda stream: stream.write(curve.to_json().encode()))
    shown = ", ".join(f"{p.kind} {p.block_size}: {1e3 * p.cycle_s:.1f}" for p in curve.points)
    log.info(
        "ms per cycle here, by %.1f s of calibration: %s; kept in %s",
        time.monotonic() - begin,
        shown,
        file,
    )
    return curve


def _measured(target: Target, drafter: Drafter, cells: Sequence[Cell]) -> list[CostPoint]:
    """Medians of the cycles of each cell; its first cycle warms up."""
    policy = RotatingPolicy(cells)
    policy.bind(target, drafter)
    room = max(2, target.max_positions - policy.widest)
    context = min(_CONTEXT, room // 2)
    budget = min(room - context, 1 + _ROUNDS * len(cells))  # a cycle commits one token or more
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(target.embed_rows, (context,), generator=generator).tolist()
    spent: defaultdict[Cell, list[float]] = defaultdict(list)
    stop_ids, target.stop_ids = target.stop_ids, frozenset()  # noise must not end an answer
    begin = time.monotonic()
    try:
        with silent_drafters():
            while not all(len(spent[cell]) > _LEAST for cell in cells) or (
                time.monotonic() - begin < _SECONDS and len(spent[cells[0]]) <= _MOST
            ):
                before = len(policy.taken)
                trace = decode(target, Method(drafter, policy), prompt, max_new_tokens=budget)
                assert trace.cycle_s is not None
                for cell, seconds in zip(policy.taken[before:], trace.cycle_s, strict=True):
                    spent[cell].append(seconds)
    finally:
        target.stop_ids = stop_ids
    points = []
    for cell, (_, *timed) in spent.items():
        low, middle, high = map(float, np.quantile(timed, [0.25, 0.5, 0.75]))
        shape, parts = (cell.size, context, len(timed)), (0.0, 0.0, 0.0, 0.0)
        points.append(CostPoint(*shape, middle, low, high, *parts, kind=cell.kind))
    return points
