"""Stage `report`: tables and figures from records alone; no model is loaded.

    python -m blockpilot.report runs=[outputs/sweep/<run id>,outputs/evaluate/<run id>]

Reads folders of sweeps, evaluations and cost curves. report.html is one self-contained page in
<paths.outputs>/report/<run id>/; the numbers behind it are in tables/*.csv.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.console import Console

from blockpilot.app.config import ReportConfig
from blockpilot.app.job import stage
from blockpilot.app.status import read_status
from blockpilot.app.terminal import text_table
from blockpilot.base.errors import UserError
from blockpilot.base.files import read_csv
from blockpilot.base.paths import names_of
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
from blockpilot.evaluate.verdicts import of_evaluation, of_sweep, of_timed
from blockpilot.records.store import read_records
from blockpilot.report.figures import figures
from blockpilot.report.pages import Drawn, Section, write_report
from blockpilot.report.paper import paper_table
from blockpilot.report.published import MEANS_OVER
from blockpilot.sweep.tables import ABOUT_DECODED, ALL_SETS, cells, sweep_table

log = logging.getLogger("blockpilot.report")  # __name__ is __main__ under python -m

EVALUATION, TIMED = "evaluation.csv", "timed.csv"


def run(cfg: ReportConfig) -> Path:
    """Read the runs and write the report; its folder."""
    if not cfg.runs:
        raise UserError("runs=[]: give folders, as runs=[outputs/sweep/<run id>]")
    runs = named_runs([Path(run) for run in cfg.runs])
    parts = [part for run in runs for part in sections_of(run)]
    sections = [*compared_predictors(runs), *parts]
    folder = Path(cfg.paths.outputs) / "report" / cfg.run_id
    write_report(folder, f"blockpilot: {cfg.run_id}", sections)
    for section in sections:
        if section.table is not None:
            Console().print(text_table(section.table, section.title))
    for section in sections:
        for verdict in section.verdicts:
            told = f"{section.title}: {verdict}"
            Console().print(told, markup=False, highlight=False, soft_wrap=True)
    log.info("report in %s", folder / "report.html")
    return folder


@dataclass(frozen=True)
class Run:
    """A folder of results, what it holds, and a name that no other run of its kind has."""

    folder: Path
    kind: str  # sweep | evaluate | cost
    name: str

    @property
    def file(self) -> str:
        """Name of the files of its section."""
        return f"{self.kind}-{self.name.replace('/', '--')}"


def named_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in order. Raises UserError where one holds nothing to report or is given twice."""
    kinds = [kind_of(folder) for folder in folders]
    names: dict[Path, str] = {}
    for kind in dict.fromkeys(kinds):
        mine = [folder for folder, each in zip(folders, kinds, strict=True) if each == kind]
        names |= zip(mine, names_of(mine, "runs"), strict=True)
    return [Run(folder, kind, names[folder]) for folder, kind in zip(folders, kinds, strict=True)]


def kind_of(folder: Path) -> str:
    """Which stage's results a folder holds. Raises UserError when it holds none to report."""
    if list(folder.glob("rank*")):
        return "sweep"
    for kind, file in (("evaluate", EVALUATION), ("cost", "cost.json")):
        if (folder / file).exists():
            return kind
    raise UserError(f"runs: {folder} holds no records, {EVALUATION} or cost.json")


def sections_of(run: Run) -> Iterator[Section]:
    """Sections of one folder."""
    if run.kind == "sweep":
        yield from sweep_sections(run)
    elif run.kind == "evaluate":
        yield from evaluation_sections(run)
    else:
        yield cost_section(run)


def read_lines(run: Run, file: str) -> pd.DataFrame:
    """A table that the stage `evaluate` wrote.

    Raises UserError for one that is damaged or of an older version.
    """
    needed = EVALUATED if file == EVALUATION else (*COMPARED, "policy", "best_fixed")
    words = ("set", "prompt_set", "method", "unit", "block_mode", "policy", "best_fixed")
    return read_csv(run.folder / file, needed=needed, numbers=set(needed) - set(words))


def sweep_sections(run: Run) -> Iterator[Section]:
    """The table of a sweep and its figures, and the same in the papers' form."""
    records = read_records(run.folder)
    if records.empty:
        raise UserError(f"runs: {run.folder} holds no rows")
    lines = sweep_table(records, by_set=True)
    first = records.iloc[0]
    temperature = float(first["temperature"])
    decoded = first["mode"] == "decode"
    commits = {json.loads(each)["git_commit"] for each in records["versions"].unique()}
    hardware = first["gpu"] if isinstance(first["gpu"], str) else first["cpu"]
    title = f"{'Decoded' if decoded else 'Replayed'} sweep {run.name}"
    yield Section(
        name=run.file,
        title=title,
        source=str(run.folder),
        command=command_of(run),
        notes=[
            f"{first['target']}, T = {temperature:g}, {first['dtype']}, at most "
            f"{first['max_new_tokens']} new tokens, {first['weights']} weights, {hardware}, commit "
            f"{', '.join(sorted(map(str, commits)))}.",
            *lines.attrs["caption"],
        ],
        verdicts=of_sweep(lines),
        table=cells(lines),
        data=lines,
        drawn=[Drawn(*each) for each in figures(records)],
    )
    pretrained = first["weights"] == "pretrained"
    table = paper_table(lines, str(first["target"]) if pretrained else "", temperature)
    cited = table["method"].str.endswith(", published").any()
    yield Section(
        name=f"paper-{run.file}",
        title=f"{title}, as papers print it",
        source=str(run.folder),
        command=command_of(run),
        notes=[
            f"Cells: {'speedup' if decoded else '(predicted speedup)'} / macro tau of the table "
            "above; mean: over the prompt sets.",
            *([MEANS_OVER] if cited else []),
        ],
        table=table,
    )


def evaluation_sections(run: Run) -> Iterator[Section]:
    """Predictors against the best fixed size: by tau or predicted speed, then by measured time."""
    lines = read_lines(run, EVALUATION)
    yield Section(
        name=run.file,
        title=f"Evaluation {run.name}, {lines['unit'].iloc[0]} on unseen prompts",
        source=str(run.folder),
        command=command_of(run),
        notes=[
            f"The policy split's best fixed size is {lines['fixed_size'].iloc[0]}. {ABOUT_GAINS}",
            *shared_facts(lines),
        ],
        verdicts=of_evaluation(lines),
        table=evaluation_cells(lines),
        data=lines,
    )
    if (run.folder / TIMED).exists():
        timed = read_lines(run, TIMED)
        yield Section(
            name=f"timed-{run.file}",
            title=f"Evaluation {run.name}, measured times",
            source=str(run.folder),
            command=command_of(run),
            notes=[ABOUT_DECODED, ABOUT_TIMES],
            verdicts=of_timed(timed),
            table=cells(narrow(timed)),
            data=timed,
        )


def compared_predictors(runs: Sequence[Run]) -> Iterator[Section]:
    """The ablation: a line per predictor of all evaluations, over all prompts, where it has two."""
    read = {run: read_lines(run, EVALUATION) for run in runs if run.kind == "evaluate"}
    lines = [
        frame.assign(evaluation=run.name) for run, frame in read.items() if "features" in frame
    ]
    found = pd.concat(lines, ignore_index=True) if lines else pd.DataFrame()
    if not found.empty:
        found = found[found["features"].notna() & found["prompt_set"].eq(ALL_SETS)]
    if len(found) < 2:
        return
    yield Section(
        name="predictors",
        title="Predictors compared, all prompts",
        source=", ".join(str(run.folder) for run in read),
        command="python -m blockpilot.evaluate",
        notes=[
            "baseline: the best fixed size among a predictor's own. Evaluations are told below.",
            *shared_facts(found),
        ],
        table=evaluation_cells(found.drop(columns=["prompt_set", "recovered"], errors="ignore")),
        data=found,
    )


def cost_section(run: Run) -> Section:
    """Milliseconds of a cycle over block size and context."""
    curve = load_cost(run.folder / "cost.json", {})
    points = pd.DataFrame([vars(point) for point in curve.points])
    shapes = points["tree"].map({False: "chain", True: "tree"})
    costs = points.assign(verified=shapes).pivot_table(
        index=["verified", "block_size"], columns="context", values="cycle_s"
    )
    costs *= 1e3
    costs.columns = [f"context {context}" for context in costs.columns]
    told = ", ".join(f"{name} {value}" for name, value in curve.settings.items() if value)
    return Section(
        name=run.file,
        title=f"Cost of a cycle in ms, {run.name}",
        source=str(run.folder),
        command=command_of(run),
        notes=[
            "Milliseconds of one draft and one verification, medians; block_size: positions that "
            "are verified, of a chain or a tree; context: tokens before them.",
            f"Measured with {told}.",
        ],
        table=costs.round(1).reset_index(),
        data=points,
    )


def command_of(run: Run) -> str:
    """The command that made a run, from its status.json; its stage alone where that is missing."""
    status = read_status(run.folder / "status.json")
    # Of a broken run no job ended well.
    overrides = [] if status is None else status.made_by or status.overrides
    return shlex.join(["python", "-m", f"blockpilot.{run.kind}", *overrides])


@stage("report", ReportConfig)
def main(cfg: ReportConfig) -> None:
    """Entry point."""
    run(cfg)


if __name__ == "__main__":
    main()
