"""The main table in the papers' form: a line per method, `speedup / tau` per prompt set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from blockpilot.report.published import MEAN, published
from blockpilot.sweep.tables import ALL_SETS, names_of


def paper_table(lines: pd.DataFrame, target: str, temperature: float) -> pd.DataFrame:
    """Cells `speedup / macro tau` of the lines of `sweep_table(by_set=True)`, and their means.

    The mean is over prompt sets, as in the papers. A replayed speedup is predicted and stands in
    brackets; `-` where there is none. A method that a paper names gets a line of its numbers below.
    """
    sets = [name for name in dict.fromkeys(lines["set"]) if name != ALL_SETS]
    named = lines.assign(name=names_of(lines))
    rows = []
    for line_name in named["name"].unique():
        own = named[named["name"].eq(line_name) & named["set"].ne(ALL_SETS)].set_index("set")
        method = own["method"].iloc[0]
        row = {"method": line_name}
        row |= {name: _cell(own.loc[name]) if name in own.index else "-" for name in sets}
        row[MEAN] = _cell(own[["speedup", "predicted_speedup", "macro_tau"]].mean())
        rows.append(row)
        cells = {s: published(target, temperature, str(method), s) for s in (*sets, MEAN)}
        if any(cells.values()):
            citation = {s: f"{c.speedup:.2f} / {c.tau:.2f}" if c else "" for s, c in cells.items()}
            rows.append({"method": f"{method}, published", **citation})
    return pd.DataFrame(rows)


def _cell(line: Mapping[str, Any] | pd.Series) -> str:
    measured, predicted = line["speedup"], line["predicted_speedup"]
    ratio = "-" if math.isnan(predicted) else f"({predicted:.2f})"
    return f"{ratio if math.isnan(measured) else f'{measured:.2f}'} / {line['macro_tau']:.2f}"
