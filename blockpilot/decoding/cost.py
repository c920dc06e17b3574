"""What a cycle costs on one machine: a measured curve over block sizes and context lengths.

`python -m blockpilot.cost` writes it; replays, labels and policies read it. For a dense model the
cost depends on shapes only, so a curve measured with random weights is the real one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blockpilot.config import StageConfig
from blockpilot.decoding.types import Trace
from blockpilot.devices import pick_device, pick_dtype
from blockpilot.errors import UserError
from blockpilot.provenance import facts

PARTS = ("draft_s", "verify_s", "policy_s", "other_s")


@dataclass(frozen=True)
class CostPoint:
    """Seconds per cycle at one block size and context length; medians over repeats.

    `cycle_s` is the decode loop's whole cycle, with its quartiles; the parts are medians of their
    own and need not add up to it.
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


@dataclass(frozen=True)
class CostCurve:
    """Measured points with the settings and the machine that they hold for."""

    settings: dict[str, Any]  # must equal those of a run that reads the curve
    machine: dict[str, Any]
    points: list[CostPoint]

    def seconds(self, block_size: int, context: int) -> float:
        """Seconds per cycle, linear between measured block sizes and contexts.

        Outside the measured contexts the nearest one counts. Raises UserError for a block size
        outside the measured ones.
        """
        sizes = sorted({point.block_size for point in self.points})
        if not sizes[0] <= block_size <= sizes[-1]:
            raise UserError(
                f"no cost for block size {block_size}: the curve holds {sizes[0]}..{sizes[-1]}"
            )
        return float(np.interp(block_size, sizes, [self._at(size, context) for size in sizes]))

    def _at(self, block_size: int, context: int) -> float:
        points = [point for point in self.points if point.block_size == block_size]
        points.sort(key=lambda point: point.context)
        contexts, costs = [p.context for p in points], [p.cycle_s for p in points]
        return float(np.interp(context, contexts, costs))

    def predicted(self, trace: Trace, n_prompt_tokens: int) -> dict[str, float]:
        """Record column of a replayed trace: the seconds that its cycles would have taken."""
        seconds, position = 0.0, n_prompt_tokens
        for verified, committed in zip(trace.verified, trace.committed, strict=True):
            seconds += self.seconds(verified, position)
            position += committed
        return {"predicted_decode_s": seconds}

    def to_json(self) -> str:
        """Text of a curve's file."""
        return json.dumps(asdict(self), indent=1) + "\n"


def cost_settings(cfg: StageConfig, drafter: str, engine: str) -> dict[str, Any]:
    """What a cycle's cost depends on, as far as a run's configuration and machine say."""
    device = pick_device(cfg.device)
    machine = facts(device)
    return {
        "target": cfg.model.name,
        "drafter": drafter,
        "dtype": str(pick_dtype(cfg.dtype, cfg.model.dtype, device)).removeprefix("torch."),
        "attention": cfg.attention,
        "engine": engine,
        "device": device.type,
        "hardware": machine["gpu"] or machine["cpu"],
        "threads": machine["threads"] if device.type == "cpu" else None,
    }


def load_cost(path: str | Path, settings: Mapping[str, Any]) -> CostCurve:
    """The curve in a file, for a run with these settings.

    Raises UserError when the file is no curve or was measured with other settings, naming the
    first that differs.
    """
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
        points = [CostPoint(**point) for point in raw["points"]]
        curve = CostCurve(raw["settings"], raw["machine"], points)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"cost={path}: no cost curve ({error}); measure one with python -m blockpilot.cost"
        ) from error
    if not points:
        raise UserError(f"cost={path}: holds no point")
    for key, value in settings.items():
        if curve.settings.get(key) != value:
            raise UserError(
                f"cost={path}: measured with {key}={curve.settings.get(key)}, this run has {value}"
            )
    return curve
