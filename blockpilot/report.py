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
from pathlib import Path
from typing import Any

import hydra
import pandas as pd
from rich.console import Console
from rich.table import Table

from blockpilot.config import ReportConfig
from blockpilot.decoding.cost import load_cost
from blockpilot.errors import UserError
from blockpilot.paths import conf_dir
from blockpilot.records.files import read_csv
from blockpilot.records.store import read_records
from blockpilot.reporting.evaluation import COMPARED, COMPARED_BY, narrow
from blockpilot.reporting.figures import figures
from blockpilot.reporting.pages import Drawn, Section, write_report
from blockpilot.reporting.paper import paper_table
from blockpilot.reporting.published import MEANS_OVER
from blockpilot.reporting.tables import ALL_SETS, cells, sweep_table
from blockpilot.runtime import read_status, stage

log = logging.getLogger("blockpilot.report")  # __name__ is __main__ under python -m

_KEPT = {  # columns of an evaluation that its table shows, and how
    "prompt_set": "{}",
    "prompts": "{:.0f}",
    "method": "{}",
    "features": "{}",
    "hidden": "{:.0f}",
    "depth": "{:.0f}",
    "label": "{}",
    "parameters": "{:,.0f}",
    "gain": "{:.3f}",
    "difference": "{:+.3f}",
    "difference_low": "{:+.3f}",
    "difference_high": "{:+.3f}",
    "detectable": "{:.3f}",
    "recovered": "{:.0%}",
    "accuracy": "{:.0%}",
    "regret": "{:.3f}",
}


def run(cfg: ReportConfig) -> Path:
    """Read the runs and write the report; its folder."""
    if not cfg.runs:
        raise UserError("runs=[]: give folders, as runs=[outputs/sweep/<run id>]")
    runs = [Path(run) for run in cfg.runs]
    sections = [*compared_predictors(runs), *(part for run in runs for part in sections_of(run))]
    folder = Path(cfg.paths.outputs) / "report" / cfg.run_id
    write_report(folder, f"blockpilot: {cfg.run_id}", sections)
    for section in sections:
        if section.table is not None:
            Console().print(shown(section))
    log.info("report in %s", folder / "report.html")
    return folder


def sections_of(run: Path) -> Iterator[Section]:
    """Sections of one folder. Raises UserError when it holds nothing to report."""
    if list(run.glob("rank*")):
        yield sweep_section(run)
    elif _is_evaluation(run):
        yield from evaluation_sections(run)
    elif (run / "cost.json").exists():
        yield cost_section(run)
    else:
        raise UserError(f"runs: {run} holds no records, evaluation.csv or cost.json")


def sweep_section(run: Path) -> Section:
    """The main table of a sweep and its figures."""
    records = read_records(run)
    if records.empty:
        raise UserError(f"runs: {run} holds no rows")
    lines = sweep_table(records, by_set=True)
    first = records.iloc[0]
    temperature = float(first["temperature"])
    what = "speedup" if first["mode"] == "decode" else "(predicted speedup)"
    commits = {json.loads(each)["git_commit"] for each in records["versions"].unique()}
    hardware = first["gpu"] if isinstance(first["gpu"], str) else first["cpu"]
    pretrained = first["weights"] == "pretrained"
    table = paper_table(lines, str(first["target"]) if pretrained else "", temperature)
    cited = table["method"].str.endswith(", published").any()
    notes = [
        f"Cells: {what} / macro tau. {first['target']}, T = {temperature:g}, {first['dtype']}, at "
        f"most {first['max_new_tokens']} new tokens, {first['weights']} weights, {hardware}, "
        f"commit {', '.join(sorted(map(str, commits)))}.",
        *([MEANS_OVER] if cited else []),
        *lines.attrs["caption"],
    ]
    return Section(
        name=f"sweep-{run.name}",
        title=f"{'Decoded' if first['mode'] == 'decode' else 'Replayed'} sweep {run.name}",
        source=str(run),
        command=command_of(run),
        notes=notes,
        table=table,
        data=lines,
        drawn=[Drawn(*each) for each in figures(records)],
    )


def evaluation_sections(run: Path) -> Iterator[Section]:
    """Predictors against the best fixed size: by tau or predicted speed, then by measured time."""
    lines = _evaluation(run)
    kept = [name for name in _KEPT if name in lines and lines[name].notna().any()]
    table = pd.DataFrame({name: [_told(name, value) for value in lines[name]] for name in kept})
    yield Section(
        name=f"evaluate-{run.name}",
        title=f"Evaluation {run.name}: {lines['unit'].iloc[0]} on unseen prompts",
        source=str(run),
        command=command_of(run),
        notes=[
            f"difference: over the policy split's best fixed size ({lines['fixed_size'].iloc[0]}), "
            "with a paired 95% interval; the cross-fitted oracle's is on halves of answers. "
            "detectable: the smallest difference that so many prompts show in four of five trials. "
            "By luck alone: the oracle of prompts that all prefer the same sizes and differ by the "
            "noise that the halves of each answer show."
        ],
        table=table,
        data=lines,
    )
    if (run / "timed.csv").exists():
        needed = (*COMPARED_BY, *COMPARED)
        timed = read_csv(run / "timed.csv", needed=needed, numbers=COMPARED)
        yield Section(
            name=f"timed-{run.name}",
            title=f"Evaluation {run.name}: measured times",
            source=str(run),
            command=command_of(run),
            notes=[
                "over best fixed: ratio of mean TPOTs, the best fixed size's over the method's. "
                "drafting: share of the decoding time. 95% intervals over prompts."
            ],
            table=cells(narrow(timed)),
            data=timed,
        )


def _evaluation(run: Path) -> pd.DataFrame:
    return read_csv(
        run / "evaluation.csv",
        needed=("prompt_set", "method", "unit", "fixed_size"),
        numbers=[name for name, form in _KEPT.items() if form != "{}"],
    )


def compared_predictors(runs: Sequence[Path]) -> Iterator[Section]:
    """The ablation: a line per predictor of all evaluations, over all prompts, where it has two."""
    read = {run: _evaluation(run) for run in runs if _is_evaluation(run)}
    lines = [
        frame.assign(evaluation=run.name) for run, frame in read.items() if "features" in frame
    ]
    found = pd.concat(lines, ignore_index=True) if lines else pd.DataFrame()
    if not found.empty:
        found = found[found["features"].notna() & found["prompt_set"].eq(ALL_SETS)]
    if len(found) < 2:
        return
    names = [name for name in ("evaluation", "unit", "sizes", *_KEPT) if name in found]
    names = [name for name in names if name not in ("prompt_set", "recovered")]
    table = pd.DataFrame({name: [_told(name, value) for value in found[name]] for name in names})
    yield Section(
        name="predictors",
        title="Predictors compared, all prompts",
        source=", ".join(map(str, read)),
        command="python -m blockpilot.evaluate",
        notes=["Each against the best fixed size among its own; the evaluations are told below."],
        table=table,
        data=found,
    )


def _is_evaluation(run: Path) -> bool:
    return (run / "evaluation.csv").exists() and not list(run.glob("rank*"))


def cost_section(run: Path) -> Section:
    """Milliseconds of a cycle over block size and context."""
    curve = load_cost(run / "cost.json", {})
    points = pd.DataFrame([vars(point) for point in curve.points])
    shapes = points["tree"].map({False: "chain", True: "tree"})
    cells = points.assign(verified=shapes).pivot_table(
        index=["verified", "block_size"], columns="context", values="cycle_s"
    )
    cells *= 1e3
    cells.columns = [f"context {context}" for context in cells.columns]
    told = ", ".join(f"{name} {value}" for name, value in curve.settings.items() if value)
    return Section(
        name=f"cost-{run.name}",
        title=f"Cost of a cycle in ms, {run.name}",
        source=str(run),
        command=command_of(run),
        notes=[told],
        table=cells.round(1).reset_index(),
        data=points,
    )


def command_of(run: Path) -> str:
    """The command that made a run, from its status.json; its stage alone where that is missing."""
    stage_name = run.resolve().parent.name
    status = read_status(run / "status.json")
    overrides = status.get("made_by") or status.get("overrides", [])  # the latter of a broken run
    return shlex.join(["python", "-m", f"blockpilot.{stage_name}", *overrides])


def _told(name: str, value: Any) -> str:
    return "-" if pd.isna(value) else _KEPT.get(name, "{}").format(value)


def shown(section: Section) -> Table:
    """A section's table for the terminal."""
    assert section.table is not None
    table = Table(*map(str, section.table.columns), title=section.title, title_justify="left")
    for row in section.table.astype(str).itertuples(index=False):
        table.add_row(*row)
    return table


@stage(
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="report"),
    ReportConfig,
)
def main(cfg: ReportConfig) -> None:
    """Entry point."""
    run(cfg)


if __name__ == "__main__":
    main()
