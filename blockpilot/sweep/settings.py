"""What the rows of a sweep's folder have in common, so that no others are added to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from blockpilot.prompts.base import Prompt
from blockpilot.records.schema import METHOD_FIELDS, PLAIN, SHARED_FIELDS
from blockpilot.sweep.decoded import DecodedSweep
from blockpilot.sweep.replayed import ReplayedSweep


def shared_settings(
    sweep: DecodedSweep | ReplayedSweep, prompt: Prompt, machine: Mapping[str, Any]
) -> dict[str, Any]:
    """What all rows of a run folder share: a table of others would compare what differs.

    The seed may differ. Times are of one machine, predicted ones of one curve.
    """
    row = asdict(sweep.settings(prompt, 0, PLAIN))
    shared = {name: row[name] for name in SHARED_FIELDS if name != "seed"}
    if isinstance(sweep, ReplayedSweep):
        return shared | {"cost": None if sweep.cost is None else sweep.cost.digest()}
    if sweep.target.device.type == "cpu":
        return shared | {name: machine[name] for name in ("cpu", "threads")}
    return shared | {"gpu": machine["gpu"]}


def method_settings(sweep: DecodedSweep | ReplayedSweep, prompt: Prompt) -> dict[str, Any]:
    """What each method of a run folder means; a name may be added, not given another meaning."""
    rows = {name: asdict(sweep.settings(prompt, 0, name)) for name in sweep.methods}
    return {
        f"{name}.{field}": row[field]
        for name, row in rows.items()
        for field in METHOD_FIELDS
        if field != "method"
    }
