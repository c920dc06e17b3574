"""What stages show: log lines, progress bars, tables, and what a run will take."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Literal

import pandas as pd
from rich import box
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from blockpilot.base.launch import world


@functools.cache
def console() -> Console:
    """Return the terminal that log lines and progress bars share: stderr, so stdout is results."""
    return Console(stderr=True)


def setup_logging() -> None:
    """Send log lines to the terminal: this package's from INFO on, others and other ranks' less."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    root.addHandler(RichHandler(console=console(), show_path=False, log_time_format="[%X]"))
    root.setLevel(logging.WARNING)
    mine = logging.INFO if world().rank == 0 else logging.WARNING
    logging.getLogger("blockpilot").setLevel(mine)


def progress_bar() -> Progress:
    """A bar over prompts, shown by the first rank."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    return Progress(*columns, console=console(), disable=world().rank != 0)


def text_table(frame: pd.DataFrame, title: str) -> Table:
    """A frame of text for the terminal; numbers stand right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in frame:  # folded where it is too narrow: no digit is cut off
        side: Literal["left", "right"] = "left" if column == "method" else "right"
        table.add_column(str(column), justify=side, overflow="fold")
    for row in frame.astype(str).itertuples(index=False):
        table.add_row(*map(Text, row))
    return table


def show_estimate(estimate: Mapping[str, float | str]) -> None:
    """Print what a run will take: counts and upper bounds by name (`plan=true`)."""
    table = Table("what the run will take", "", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, value in estimate.items():
        table.add_row(name, value if isinstance(value, str) else f"{value:,}")
    Console().print(table)
