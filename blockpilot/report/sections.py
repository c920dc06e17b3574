"""Sections of a report: the tables and figures of one folder of results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from blockpilot.base.errors import UserError
from blockpilot.base.files import read_csv
from blockpilot.costs.curve import load_cost
from blockpilot.evaluate.comparison import (
    ABOUT_GAINS,
    ABOUT_TIMES,
    COMPARED,
    EVALUATED,
    evaluation_cells,
    narrow,
    shared_facts,
)
from blockpilot.evaluate.ladder import ABOUT_LADDER, ladder_cells
from blockpilot.evaluate.verdicts import of_evaluation, of_sweep, of_timed
from blockpilot.records.run_folder import EVALUATION
from blockpilot.report.figures import drawn_ladder, figures
from blockpilot.report.pages import Drawn, Section
from blockpilot.report.paper import paper_table
from blockpilot.report.published import MEANS_OVER
from blockpilot.report.runs import Run
from blockpilot.sweep.tables import (
    ABOUT_DECODED,
    ALL_SETS,
    PROVENANCE,
    cells,
    provenance_of,
    sweep_table,
)

_TEXT = ("set", "prompt_set", "method", "unit", "block_mode", "policy", "best_fixed")


def sections_of(run: Run) -> Iterator[Section]:
    """Sections of one folder."""
    if run.kind == "sweep":
        yield from sweep_sections(run)
    elif run.kind == "evaluate":
        yield from evaluation_sections(run)
    else:
        yield cost_section(run)


def sweep_sections(run: Run) -> Iterator[Section]:
    """The table of a sweep and its figures, and the same in the papers' form."""
    records = run.folder.records()
    if records.empty:
        raise UserError(f"runs: {run.folder.path} holds no rows")
    lines = sweep_table(records, by_set=True)
    first = records.iloc[0]
    decoded = first["mode"] == "decode"
    title = f"{'Decoded' if decoded else 'Replayed'} sweep {run.name}"
    provenance = provenance_of(records)
    yield Section(
        name=run.file,
        title=title,
        source=run.source,
        command=run.command,
        provenance=provenance,
        notes=lines.attrs["caption"],
        verdicts=of_sweep(lines),
        table=cells(lines),
        data=lines,
        drawn=[Drawn(*each) for each in figures(records, lines)],
    )
    pretrained = first["weights"] == "pretrained"
    table = paper_table(
        lines, str(first["target"]) if pretrained else "", float(first["temperature"])
    )
    cited = table["method"].str.endswith(", published").any()
    yield Section(
        name=f"paper-{run.file}",
        title=f"{title}, as papers print it",
        source=run.source,
        command=run.command,
        provenance=provenance,
        notes=[
            f"Cells: {'speedup' if decoded else '(predicted speedup)'} / macro tau of the table "
            "above; mean: over the prompt sets.",
            *([MEANS_OVER] if cited else []),
        ],
        table=table,
    )


def evaluation_sections(run: Run) -> Iterator[Section]:
    """Predictors against the best fixed size: by tau or predicted speed, then by measured time; or
    what each part of pilots adds."""
    if run.folder.ladder.exists():
        yield ladder_section(run)
    if not run.folder.evaluation.exists():
        return
    lines = read_lines(run.folder.evaluation)
    yield Section(
        name=run.file,
        title=f"Evaluation {run.name}, {lines['unit'].iloc[0]} on unseen prompts",
        source=run.source,
        command=run.command,
        provenance=stored_provenance(lines),
        notes=[
            f"The policy split's best fixed size is {lines['fixed_size'].iloc[0]}. {ABOUT_GAINS}",
            *shared_facts(lines),
        ],
        verdicts=of_evaluation(lines),
        table=evaluation_cells(lines),
        data=lines,
    )
    if run.folder.timed_evaluation.exists():
        timed = read_lines(run.folder.timed_evaluation)
        yield Section(
            name=f"timed-{run.file}",
            title=f"Evaluation {run.name}, measured times",
            source=run.source,
            command=run.command,
            provenance=stored_provenance(timed),
            notes=[ABOUT_DECODED, ABOUT_TIMES],
            verdicts=of_timed(timed),
            table=cells(narrow(timed)),
            data=timed,
        )


def ladder_section(run: Run) -> Section:
    """What each part of a decision per cycle adds, by replay."""
    needed = ("set", "method", "prompts", "speedup", "speedup_low", "speedup_high", "tau")
    lines = read_csv(run.folder.ladder, needed=needed, numbers=set(needed) - {"set", "method"})
    return Section(
        name=run.file,
        title=f"Evaluation {run.name}, a source and a size per cycle by replay",
        source=run.source,
        command=run.command,
        provenance=stored_provenance(lines),
        notes=[ABOUT_LADDER],
        table=ladder_cells(lines),
        data=lines,
        drawn=[Drawn("ladder", *drawn_ladder(lines))],
    )


def compared_predictors(runs: Sequence[Run]) -> Iterator[Section]:
    """The ablation: a line per predictor of all evaluations, over all prompts, where it has two."""
    tables = {
        run: read_lines(run.folder.evaluation) for run in runs if run.folder.evaluation.exists()
    }
    scored = [
        table.assign(evaluation=run.name) for run, table in tables.items() if "features" in table
    ]
    lines = pd.concat(scored, ignore_index=True) if scored else pd.DataFrame()
    if not lines.empty:
        lines = lines[lines["features"].notna() & lines["prompt_set"].eq(ALL_SETS)]
    if len(lines) < 2:
        return
    yield Section(
        name="predictors",
        title="Predictors compared, all prompts",
        source=", ".join(run.source for run in tables),
        command="python -m blockpilot.evaluate",
        provenance=stored_provenance(lines),
        notes=[
            "baseline: the best fixed size among a predictor's own. Each evaluation has a section "
            "below.",
            *shared_facts(lines),
        ],
        table=evaluation_cells(lines.drop(columns=["prompt_set", "recovered"], errors="ignore")),
        data=lines,
    )


def cost_section(run: Run) -> Section:
    """Milliseconds of a cycle over block size and context."""
    curve = load_cost(run.folder.cost_curve, {})
    points = pd.DataFrame([vars(point) for point in curve.points])
    costs = points.rename(columns={"kind": "verified"}).pivot_table(
        index=["verified", "block_size"], columns="context", values="cycle_s"
    )
    costs *= 1e3
    costs.columns = [f"context {context}" for context in costs.columns]
    machine = {
        "machine": curve.machine.get("gpu") or curve.machine.get("cpu"),
        "commit": curve.machine.get("git_commit"),
    }
    return Section(
        name=run.file,
        title=f"Cost of a cycle in ms, {run.name}",
        source=run.source,
        command=run.command,
        provenance={
            name: str(value) for name, value in (machine | curve.settings).items() if value
        },
        notes=[
            "Milliseconds of a cycle, medians; block_size: positions that are verified, of a "
            "drafted chain, of a tree from a drafted block, or of a copy from the text, which "
            "nothing drafts; context: tokens before them."
        ],
        table=costs.round(1).reset_index(),
        data=points,
    )


def read_lines(file: Path) -> pd.DataFrame:
    """A table that the stage `evaluate` wrote.

    Raises UserError for one that is damaged or of an older version.
    """
    needed = EVALUATED if file.name == EVALUATION else (*COMPARED, "policy", "best_fixed")
    return read_csv(file, needed=needed, numbers=set(needed) - set(_TEXT))


def stored_provenance(lines: pd.DataFrame) -> Mapping[str, str]:
    """What `provenance_of` gave the stage that wrote the lines; nothing in older files."""
    return {
        name: ", ".join(map(str, lines[name].dropna().unique()))
        for name in PROVENANCE
        if name in lines
    }
