"""What a cycle costs on one machine: a measured curve over block sizes and context lengths.

`python -m blockpilot.cost` writes it; replays, labels and policies read it. For a dense model the
cost depends on shapes only, so a curve measured with random weights is the real one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from blockpilot.base.errors import UserError
from blockpilot.base.json_values import fitted
from blockpilot.base.provenance import machine
from blockpilot.costs import batch
from blockpilot.costs.batch import BatchPoint
from blockpilot.decoding.protocols import Drafter, TargetModel
from blockpilot.decoding.types import Trace

KINDS = {
    "chain": "a block that is drafted and verified",
    "tree": "a tree from a drafted block of the trained size",
    "copy": "a chain that no drafter made, as a copy from the text",
}
PARTS = ("draft_s", "verify_s", "policy_s", "other_s")
_AFTER_DRAFT = ("verify_s", "policy_s", "other_s")


@dataclass(frozen=True)
class CostPoint:
    """Seconds per cycle at one block size and context length; medians over repeats.

    `cycle_s` is the decode loop's whole cycle, with its quartiles; the parts are medians of their
    own and need not add up to it. The drafter's reading of the prompt, once per answer, is in no
    cycle but in `start_s`.
    """

    block_size: int
    context: int
    repeats: int
    cycle_s: float
    cycle_s_q25: float
    cycle_s_q75: float
    draft_s: float
    verify_s: float
    policy_s: float
    other_s: float
    kind: str = "chain"  # of its `block_size` positions, the anchor counted: see KINDS
    start_s: float = 0.0


@dataclass(frozen=True)
class CostCurve:
    """Measured points with the settings and the machine that they hold for."""

    settings: dict[str, Any]  # must equal those of a run that reads the curve
    machine: dict[str, Any]
    points: list[CostPoint]
    predictor_s: list[float] | None = None  # quartiles per prompt, where a predictor was timed
    batched: list[BatchPoint] = field(default_factory=list)  # none in older files

    @property
    def batches(self) -> list[int]:
        """Batch sizes that were measured, increasing."""
        return sorted({point.batch for point in self.batched})

    def seconds(self, block_size: int, context: int) -> float:
        """Seconds of a cycle that drafts and verifies a chain of `block_size` slots.

        Linear between measured sizes and contexts; outside the measured contexts the nearest one
        counts. Raises UserError for a size outside the measured ones; so do the other methods.
        """
        return self._between("cycle_s", block_size, context)

    def cut_seconds(self, drafted: int, verified: int, context: int) -> float:
        """Seconds of a cycle that drafts a block and verifies its first `verified` slots."""
        draft = self._between("draft_s", drafted, context)
        return draft + sum(self._between(part, verified, context) for part in _AFTER_DRAFT)

    def tree_seconds(self, positions: int, context: int) -> float:
        """Seconds of a cycle that verifies a tree of `positions` nodes, the anchor counted."""
        return self._between("cycle_s", positions, context, "tree")

    def copy_seconds(self, positions: int, context: int) -> float:
        """Seconds of a cycle that verifies a copy, `positions` with the anchor, and drafts nothing.

        Of one position it is plain decoding.
        """
        if positions == 1:
            return self.seconds(1, context)
        return self._between("cycle_s", positions, context, "copy")

    def _between(self, part: str, size: int, context: int, kind: str = "chain") -> float:
        points = [point for point in self.points if point.kind == kind]
        sizes = sorted({point.block_size for point in points})
        if kind == "copy" and sizes and size < sizes[0]:  # no copy is as short as plain decoding
            points += [p for p in self.points if p.kind == "chain" and p.block_size == 1]
            sizes = sorted({point.block_size for point in points})
        if not sizes or not sizes[0] <= size <= sizes[-1]:
            what, held = "block size" if kind == "chain" else kind, "nothing"
            if sizes:
                held = f"{sizes[0]}..{sizes[-1]}"
            raise UserError(f"no cost for {what} {size}: the curve holds {held}")
        at = []
        for each in sizes:
            mine = sorted((p for p in points if p.block_size == each), key=lambda p: p.context)
            costs = [getattr(point, part) for point in mine]
            at.append(np.interp(context, [point.context for point in mine], costs))
        return float(np.interp(size, sizes, at))

    def predicted(self, trace: Trace, n_prompt_tokens: int, *, trees: bool) -> dict[str, float]:
        """Record column of a replayed trace: the seconds that its decoding would have taken."""
        seconds, position = 0.0, n_prompt_tokens
        if any(trace.drafted):
            seconds += self._start_seconds(position)
        cycles = zip(trace.drafted, trace.verified, trace.committed, strict=True)
        for drafted, verified, committed in cycles:
            if verified > 1 and not drafted:
                seconds += self.copy_seconds(verified, position)
            elif trees and drafted:
                seconds += self.tree_seconds(verified, position)
            elif verified > 1 and drafted + 1 != verified:
                seconds += self.cut_seconds(drafted + 1, verified, position)
            else:
                seconds += self.seconds(verified, position)
            position += committed
        return {"predicted_decode_s": seconds}

    def _start_seconds(self, context: int) -> float:
        """Seconds in which the drafter reads a prompt: it does so alike at every size."""
        contexts = sorted({point.context for point in self.points})
        measured = [
            [p.start_s for p in self.points if p.context == each and p.block_size > 1]
            for each in contexts
        ]
        return float(np.interp(context, contexts, [np.median(each or [0.0]) for each in measured]))

    def uncertainty(self) -> float:
        """Standard error of the least certain median cycle, as a share of it, from its quartiles.

        As if repeats were normal; NaN with a single one.
        """
        shares = []
        for point in self.points:
            spread = point.cycle_s_q75 - point.cycle_s_q25
            shares.append(_error_per_spread(point.repeats) * spread / point.cycle_s)
        return float(np.max(shares))

    def digest(self) -> str:
        """Twelve hex digits that change with the curve."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def to_json(self) -> str:
        """Text of a curve's file."""
        held = asdict(self)
        if not self.batched:  # without them the digest is that of an older file
            del held["batched"]
        return json.dumps(held, indent=1) + "\n"


@lru_cache
def _error_per_spread(n: int) -> float:
    """Standard deviation of the median of n normal numbers over their mean interquartile range."""
    if n < 2:
        return math.nan
    draws = np.random.default_rng(0).standard_normal((20_000, n))
    low, middle, high = np.quantile(draws, [0.25, 0.5, 0.75], axis=1)
    return float(middle.std() / (high - low).mean())


def cost_settings(target: TargetModel, drafter: Drafter) -> dict[str, Any]:
    """What a cycle's cost depends on, as far as a bound pair and its machine say.

    A replay measures no time and may ask what another machine would have taken: for it the pair
    alone counts.
    """
    pair = {"target": target.name, "drafter": drafter.name, "drafter_shape": drafter.shape}
    if not target.timed:
        return pair
    here = machine(target.device)
    return {
        **pair,
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": target.config._attn_implementation,
        "engine": target.engine,
        "device": target.device.type,
        "hardware": here["gpu"] or here["cpu"],
        "threads": here["threads"] if target.device.type == "cpu" else None,
    }


def _problem(point: CostPoint | BatchPoint) -> str | None:
    """The first value of a point that cannot be, with what is allowed; None for a good one."""
    for name, value in asdict(point).items():
        if name == "engine":
            continue
        if name == "part":
            good, allowed = value in batch.PARTS, " or ".join(batch.PARTS)
        elif name in ("block_size", "context", "repeats", "batch", "positions"):
            good, allowed = value >= 1, "an integer >= 1"
        elif name == "kind":
            good, allowed = value in KINDS, " or ".join(KINDS)
        elif name in ("cycle_s", "seconds"):
            good, allowed = value > 0, "seconds > 0"
        else:
            good, allowed = value >= 0, "seconds >= 0"
        if not good:
            return f"{name}={value}: allowed is {allowed}"
    return None


def load_cost(path: str | Path, settings: Mapping[str, Any]) -> CostCurve:
    """The curve in a file, for a run with these settings.

    Raises UserError when the file is no curve, a count or a time in it cannot be, or it was
    measured with other settings, naming the first that differs.
    """
    try:
        curve = fitted(CostCurve, json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(
            f"cost={path}: no cost curve ({error}); measure one with python -m blockpilot.cost"
        ) from error
    if not curve.points:
        raise UserError(f"cost={path}: holds no point")
    points: list[CostPoint | BatchPoint] = [*curve.points, *curve.batched]
    for number, point in enumerate(points):
        if problem := _problem(point):
            raise UserError(f"cost={path}: point {number} has {problem}")
    for key, value in settings.items():
        if curve.settings.get(key) != value:
            raise UserError(
                f"cost={path}: measured with {key}={curve.settings.get(key)}, this run has {value}"
            )
    return curve
