"""Sections of a report written as Markdown, CSV, PNG and one self-contained HTML page."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from matplotlib.figure import Figure

from blockpilot.base.files import make_folder, replace_file, write_csv

_TEMPLATES = ("report.md", "report.html")  # beside this file, each with .j2 behind its name


@dataclass(frozen=True)
class Drawn:
    """A figure with its file name and what it shows."""

    name: str
    caption: str
    figure: Figure

    @cached_property
    def png(self) -> bytes:
        """The image; the same records give the same bytes: no date and no version inside."""
        stream = io.BytesIO()
        self.figure.savefig(stream, format="png", metadata={"Software": None})
        return stream.getvalue()

    @property
    def base64(self) -> str:
        """The image as text, for a page that needs no other file."""
        return base64.b64encode(self.png).decode()


@dataclass(frozen=True)
class Section:
    """One part of a report: where its numbers come from, a table of text cells, figures.

    `data` are the unrounded numbers behind the table, written as CSV under the section's name.
    """

    name: str  # of its files
    title: str
    source: str  # folder that the numbers were read from
    command: str  # that made the folder
    provenance: Mapping[str, str] = field(default_factory=dict)  # machine, commit, dtype, ...
    notes: Sequence[str] = ()
    verdicts: Sequence[str] = ()  # what the table comes to; they head the report
    table: pd.DataFrame | None = None
    data: pd.DataFrame | None = None
    drawn: Sequence[Drawn] = ()

    @property
    def rows(self) -> list[list[str]]:
        """The table's cells, its header first; none without a table."""
        if self.table is None:
            return []
        return [list(map(str, self.table.columns)), *self.table.astype(str).to_numpy().tolist()]


def verdicts_of(sections: Sequence[Section]) -> list[str]:
    """What the tables come to, each with its section's title."""
    return [f"{section.title}: {verdict}" for section in sections for verdict in section.verdicts]


def write_report(folder: Path, title: str, sections: Sequence[Section]) -> None:
    """Write report.md, report.html, tables/*.csv and figures/*.png, each atomically.

    Raises UserError when the system refuses a write.
    """
    make_folder(folder / "tables")
    make_folder(folder / "figures")
    for section in sections:
        if section.data is not None:
            write_csv(section.data, folder / "tables" / f"{section.name}.csv")
        for drawn in section.drawn:
            _write(folder / "figures" / f"{section.name}-{drawn.name}.png", drawn.png)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(("html.j2",), default=False),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    content = {"title": title, "verdicts": verdicts_of(sections), "sections": sections}
    for name in _TEMPLATES:
        page = environment.get_template(f"{name}.j2").render(content)
        _write(folder / name, page.encode())


def _write(path: Path, content: bytes) -> None:
    replace_file(path, lambda stream: stream.write(content))
