"""Sections of a report written as Markdown, CSV, PNG and one self-contained HTML page."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from blockpilot.base.files import make_folder, replace_file, write_csv

_STYLE = (
    "body{font-family:sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;font-size:90%}"
    "td,th{padding:.2em .7em;border-bottom:1px solid #ccc;text-align:right}"
    "td:first-child,th:first-child{text-align:left}"
    "code{font-size:90%;overflow-wrap:anywhere}"
    "figure{display:inline-block;margin:1em 1em 1em 0;max-width:42em}img{max-width:100%}"
)


@dataclass(frozen=True)
class Drawn:
    """A figure with its file name and what it shows."""

    name: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Section:
    """One part of a report: where its numbers come from, a table of text cells, figures.

    `data` are the unrounded numbers behind the table, written as CSV under the section's name.
    """

    name: str  # of its files
    title: str
    source: str  # folder that the numbers were read from
    command: str  # that made the folder
    notes: Sequence[str] = ()
    verdicts: Sequence[str] = ()  # what the table comes to; they head the report
    table: pd.DataFrame | None = None
    data: pd.DataFrame | None = None
    drawn: Sequence[Drawn] = field(default_factory=tuple)


def write_report(folder: Path, title: str, sections: Sequence[Section]) -> None:
    """Write report.md, report.html, tables/*.csv and figures/*.png, each atomically.

    Raises UserError when the system refuses a write.
    """
    make_folder(folder / "tables")
    make_folder(folder / "figures")
    verdicts = [f"{section.title}: {each}" for section in sections for each in section.verdicts]
    markdown = [f"# {title}\n", *(f"- {each}" for each in verdicts), ""]
    page = [f"<h1>{html.escape(title)}</h1>"]
    page += [f"<p><strong>{html.escape(each)}</strong></p>" for each in verdicts]
    for section in sections:
        if section.data is not None:
            write_csv(section.data, folder / "tables" / f"{section.name}.csv")
        images = [_png(each.figure) for each in section.drawn]
        for each, image in zip(section.drawn, images, strict=True):
            file = folder / "figures" / f"{section.name}-{each.name}.png"
            replace_file(file, lambda stream, image=image: stream.write(image))  # type: ignore[misc]
        markdown.append(_markdown(section))
        page.append(_html(section, images))
    text = "\n".join(markdown)
    replace_file(folder / "report.md", lambda stream: stream.write(text.encode()))
    document = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style>{''.join(page)}</html>"
    )
    replace_file(folder / "report.html", lambda stream: stream.write(document.encode()))


def _png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    # No date and no version inside: the same records give the same file.
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def _markdown(section: Section) -> str:
    parts = [f"## {section.title}", f"From `{section.source}`, made by `{section.command}`."]
    if section.table is not None:
        rows = [list(section.table.columns), ["---"] * section.table.shape[1]]
        rows += section.table.astype(str).to_numpy().tolist()
        cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in cells))
    parts += section.notes
    parts += [
        f"![{each.name}](figures/{section.name}-{each.name}.png)\n\n{each.caption}"
        for each in section.drawn
    ]
    return "\n\n".join(parts) + "\n"


def _html(section: Section, images: Sequence[bytes]) -> str:
    source, command = html.escape(section.source), html.escape(section.command)
    parts = [
        f"<h2>{html.escape(section.title)}</h2>",
        f"<p>From <code>{source}</code>, made by <code>{command}</code>.</p>",
    ]
    if section.table is not None:
        parts.append(section.table.to_html(index=False, border=0))
    parts += [f"<p>{html.escape(note)}</p>" for note in section.notes]
    for each, image in zip(section.drawn, images, strict=True):
        data = base64.b64encode(image).decode()
        parts.append(
            f'<figure><img alt="{html.escape(each.name)}" src="data:image/png;base64,{data}">'
            f"<figcaption>{html.escape(each.caption)}</figcaption></figure>"
        )
    return "\n".join(parts)
