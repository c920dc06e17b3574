"""Stage `report`: tables and figures from records alone; no model is loaded.

    python -m blockpilot.report runs=[outputs/sweep/<run id>,outputs/evaluate/<run id>]

Reads folders of sweeps, evaluations and cost curves. report.html is one self-contained page in
<paths.outputs>/report/<run id>/; the numbers behind it are in tables/*.csv.
"""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console

from blockpilot.app.config import ReportConfig
from blockpilot.app.job import stage
from blockpilot.app.terminal import text_table
from blockpilot.base.errors import UserError
from blockpilot.report.batches import batch_sections, with_batches
from blockpilot.report.pages import verdicts_of, write_report
from blockpilot.report.runs import named_runs
from blockpilot.report.sections import compared_predictors, sections_of

log = logging.getLogger("blockpilot.report")  # __name__ is __main__ under python -m


def run(cfg: ReportConfig) -> Path:
    """Read the runs and write the report; its folder."""
    if not cfg.runs:
        raise UserError("runs=[]: give folders, as runs=[outputs/sweep/<run id>]")
    runs = named_runs([Path(run) for run in cfg.runs])
    costs = with_batches(runs)
    parts = [part for run in runs for part in (*sections_of(run), *batch_sections(run, costs))]
    sections = [*compared_predictors(runs), *parts]
    folder = Path(cfg.paths.outputs) / "report" / cfg.run_id
    write_report(folder, f"blockpilot: {cfg.run_id}", sections)
    for section in sections:
        if section.table is not None:
            Console().print(text_table(section.table, section.title))
    for verdict in verdicts_of(sections):
        Console().print(verdict, markup=False, highlight=False, soft_wrap=True)
    log.info("report in %s", folder / "report.html")
    return folder


@stage("report", ReportConfig)
def main(cfg: ReportConfig) -> None:
    """Entry point."""
    run(cfg)


if __name__ == "__main__":
    main()
