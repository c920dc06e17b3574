"""Sections of a report about batches: measured forwards, and the speedups that they predict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from blockpilot.costs.batch import BatchCost
from blockpilot.costs.curve import CostCurve, load_cost
from blockpilot.records.schema import PLAIN
from blockpilot.report.pages import Section
from blockpilot.report.runs import Run
from blockpilot.sweep.tables import names_of, provenance_of, sweep_table

_KEPT = ("set", "method", "block_size", "block_mode", "prompts")
_PREDICTED = ("predicted_tpot_ms", "predicted_speedup")
_BOUNDS = ("predicted_speedup_low", "predicted_speedup_high")
_ABOUT = (
    "A prediction: decoding is one sequence at a time, and no batch was decoded. Plain decoding's "
    "time per token over the method's, both at the same batch size; means over prompts and 95% "
    "intervals over them. A replayed cycle takes one draft and one target forward of the whole "
    "batch, a plain token one target forward.",
    "It assumes that all sequences of a batch are in the same phase: they draft and verify blocks "
    "of the same size at the same moment, and none waits for another or ends before it. A tree "
    "counts as a chain of as many positions. The sampler, the policy and the drafter's reading of "
    "the prompt are left out.",
)


def with_batches(runs: Sequence[Run]) -> list[tuple[Run, CostCurve]]:
    """The cost runs that timed batches, with their curves (UserError for a damaged one)."""
    curves = [(run, load_cost(run.folder.cost_curve, {})) for run in runs if run.kind == "cost"]
    return [(run, curve) for run, curve in curves if curve.batched]


def batch_sections(run: Run, costs: Sequence[tuple[Run, CostCurve]]) -> Iterator[Section]:
    """What batches take, of a cost run; what they would gain, of a sweep predicted by one."""
    for cost, curve in costs:
        if run is cost:
            yield measured_section(run, curve)
        elif run.kind == "sweep" and run.folder.predicted_by == curve.digest():
            yield from predicted_sections(run, cost, curve)


def measured_section(run: Run, curve: CostCurve) -> Section:
    """Milliseconds of a forward over batch size, positions and context."""
    points = pd.DataFrame([vars(point) for point in curve.batched])
    times = points.pivot_table(
        index=["batch", "part", "positions"], columns="context", values="seconds", sort=False
    )
    times *= 1e3
    times.columns = [f"context {context}" for context in times.columns]
    return Section(
        name=f"batch-{run.file}",
        title=f"Cost of a forward over several sequences in ms, {run.name}",
        source=run.source,
        command=run.command,
        provenance=measured_by(curve),
        notes=[
            "Milliseconds of one forward over `batch` sequences of equal length, medians; "
            "positions: those of each sequence, of a chain or a tree that the target verifies, or "
            "slots of a block that is drafted. By the models' own code: the engine of the curve "
            "has no part in it."
        ],
        table=times.round(1).reset_index(),
        data=points,
    )


def predicted_sections(run: Run, cost: Run, curve: CostCurve) -> Iterator[Section]:
    """Predicted speedups of a replayed sweep; none without plain rows to compare with."""
    records = run.folder.records()
    lines = batch_lines(records, curve)
    if lines.empty:
        return
    yield Section(
        name=f"batch-{run.file}",
        title=f"Predicted speedup at batch sizes, replayed sweep {run.name}",
        source=f"{run.source}, {cost.source}",
        command=run.command,
        provenance=provenance_of(records) | {"forwards measured on": measured_by(curve)["machine"]},
        notes=[*_ABOUT, engines_note(curve)],
        table=speedup_cells(lines),
        data=lines,
    )


def measured_by(curve: CostCurve) -> dict[str, str]:
    """What the batch points were made with and on, as far as the file says."""
    found = {
        "machine": curve.machine.get("gpu") or curve.machine.get("cpu") or "unknown",
        "commit": curve.machine.get("git_commit"),
        **curve.settings,
        "engine": curve.batched[0].engine,
    }
    return {name: str(value) for name, value in found.items() if value}


def engines_note(curve: CostCurve) -> str:
    """Which forwards the prediction rests on, beside those of the curve."""
    own, engine = curve.batched[0].engine, curve.settings.get("engine")
    return (
        f"Rests on {own} forwards at every batch size, 1 included, while the predicted speedup of "
        f"the table above rests on decoding with engine {engine}: compare the columns of this "
        "table with each other."
    )


def batch_lines(records: pd.DataFrame, curve: CostCurve) -> pd.DataFrame:
    """Lines of `sweep_table(by_set=True)` for every batch size: predicted TPOT and speedup.

    Empty without plain rows. Raises UserError for a width that was not measured.
    """
    if not records["method"].eq(PLAIN).any():
        return pd.DataFrame()
    tables = []
    for batch in curve.batches:
        seconds = predicted_seconds(records, BatchCost(curve.batched, batch))
        lines = sweep_table(records.assign(predicted_decode_s=seconds), by_set=True)
        tables.append(lines[[*_KEPT, *_PREDICTED, *_BOUNDS]].assign(batch=batch))
    return pd.concat(tables, ignore_index=True)


def predicted_seconds(records: pd.DataFrame, cost: BatchCost) -> list[float]:
    """Seconds that each row's cycles take for a whole batch; NaN of a row that is not ok."""
    return [
        cost.decode_s(row["drafted"], row["verified"], row["committed"], row["n_prompt_tokens"])
        if row["status"] == "ok"
        else float("nan")
        for _, row in records.iterrows()
    ]


def speedup_cells(lines: pd.DataFrame) -> pd.DataFrame:
    """Text cells: a line per set and method, a column per batch size; plain is 1 by definition."""
    drafting = lines[lines["method"].ne(PLAIN)]
    named = drafting.assign(name=names_of(drafting))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for line in named.to_dict("records"):
        cells = rows.setdefault((line["set"], line["name"]), {})
        cells[f"batch {line['batch']}"] = _cell(*(line[each] for each in _SHOWN))
    return pd.DataFrame(
        [{"set": name, "method": method, **cells} for (name, method), cells in rows.items()]
    )


_SHOWN = ("predicted_speedup", *_BOUNDS)


def _cell(speedup: float, low: float, high: float) -> str:
    if np.isnan(speedup):
        return "-"
    return f"{speedup:.2f}" if np.isnan(low) else f"{speedup:.2f} {low:.2f}-{high:.2f}"
