"""Tables of a sweep, as frames for files and notebooks and as rich tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from blockpilot.errors import UserError
from blockpilot.records import tau
from blockpilot.records.schema import PLAIN
from blockpilot.reporting import metrics

ALL_SETS = "all"
_LINE = ["method", "block_size", "block_mode"]
_SHOWN_CHARACTERS = 100
_DECODED = (
    "n: prompts. 95%: bootstrap intervals over prompts. TPOT: median over prompts. speedup: ratio "
    "of mean TPOTs, plain over method, same prompts and session; end to end counts the prefill. "
    "equal plain: share of outputs that are plain decoding's, token for token."
)
_REPLAYED = (
    "n: prompts. 95%: bootstrap intervals over prompts. Replayed: the cycles are those of decoding "
    "the one stored answer of each prompt; nothing was timed. predicted speedup: cycle costs of "
    "the curve given as cost=, plain over method."
)


def sweep_table(records: pd.DataFrame, *, by_set: bool = False) -> pd.DataFrame:
    """One line per method, size and block mode; with `by_set` per prompt set, pooled ones last.

    Columns: [set,] method, block_size, block_mode, prompts (decoded ones), micro_tau, macro_tau
    and its interval macro_tau_low/high, tpot_ms (median over prompts), speedup with
    speedup_low/high and end_to_end_speedup (NaN without plain rows), predicted_speedup (of
    replayed rows with a cost curve), equal_to_plain (share of decoded outputs), paired (prompts
    that speedup and equality rest on). `attrs["caption"]` says what the reader must know: missing
    plain rows, skipped and failed prompts, rows without a cycle.

    Raises UserError when there are no records or their settings must not be pooled.
    """
    _require_records(records)
    lines = []
    for name, chosen in _sets(records, by_set):
        for key in _methods(chosen):
            head = {"set": name} if by_set else {}
            lines.append(head | dict(zip(_LINE, key, strict=True)) | _line(chosen, key))
    table = pd.DataFrame(lines)
    replayed = records["mode"].eq("replay").all()
    table.attrs["caption"] = [
        _REPLAYED if replayed else _DECODED,
        *_warnings(records, table),
    ]
    return table


def set_table(records: pd.DataFrame) -> pd.DataFrame:
    """One line per prompt set, drafter and block mode: the best fixed size, in hindsight.

    Columns: set, drafter, block_mode, prompts (with every size), block_size (highest macro tau,
    ties to the smaller), macro_tau with its interval, speedup and equal_to_plain at that size, and
    hindsight_tau, the mean of each prompt's best tau over the sizes. Raises like `sweep_table`.
    """
    _require_records(records)
    lines = []
    for name, chosen in _sets(records, by_set=True):
        drafted = chosen[chosen["method"] != PLAIN]
        for (drafter, mode), rows in drafted.groupby(["drafter", "block_mode"]):
            taus = tau.tau_by_size(rows)
            if taus.empty:
                continue
            size = int(tau.best_size(taus.mean().to_frame().T).iloc[0])
            at_best = taus[size].to_numpy(dtype=np.float64)
            low, high = metrics.bootstrap(metrics.mean, at_best)
            pairs = metrics.pair_with(rows[rows["block_size"] == size], chosen)
            ratio, (ratio_low, ratio_high) = metrics.speedup(pairs)
            lines.append(
                {
                    "set": name,
                    "drafter": drafter,
                    "block_mode": mode,
                    "prompts": len(taus),
                    "block_size": size,
                    "macro_tau": float(at_best.mean()),
                    "macro_tau_low": low,
                    "macro_tau_high": high,
                    "speedup": ratio,
                    "speedup_low": ratio_low,
                    "speedup_high": ratio_high,
                    "equal_to_plain": metrics.share_equal(pairs),
                    "hindsight_tau": float(taus.max(axis=1).mean()),
                }
            )
    table = pd.DataFrame(lines)
    table.attrs["caption"] = [
        "n: prompts. B is the size with the highest macro tau on these very prompts, and tau "
        "hindsight takes each prompt's best size afterwards: both are upper bounds, not what a "
        "policy would get.",
        *_warnings(records, table),
    ]
    return table


def render(table: pd.DataFrame, title: str | None = None) -> Table:
    """A frame of `sweep_table` or `set_table` for the terminal, its caption below.

    Fits in 80 characters for the usual names: a mode that never varies moves to the caption.
    """
    caption = list(table.attrs.get("caption", []))
    columns = _columns_of(table)
    modes = table["block_mode"].unique()
    if len(modes) == 1:
        columns = [column for column in columns if column.source != "block_mode"]
        caption.append(f"Block mode: {modes[0]}.")
    shown = Table(
        title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False
    )
    shown.caption = Text("\n".join(caption), justify="left")
    for column in columns:
        shown.add_column(column.header, justify="left" if column.is_text else "right")
    for _, line in table.iterrows():
        shown.add_row(*(Text(column.cell(line)) for column in columns))
    return shown


def cells(table: pd.DataFrame) -> pd.DataFrame:
    """What `render` shows of a frame, as a frame of text for a report."""
    return pd.DataFrame(
        {
            column.header.replace("-\n", "").replace("\n", " "): [
                column.cell(line) for _, line in table.iterrows()
            ]
            for column in _columns_of(table)
        }
    )


def show_plan(plan: Mapping[str, float | str]) -> None:
    """Print what a run will take."""
    table = Table("what the run will take", "", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, value in plan.items():
        table.add_row(name, value if isinstance(value, str) else f"{value:,}")
    Console().print(table)


@dataclass(frozen=True)
class _Column:
    source: str
    header: str
    show: Callable[[Any], str] = str
    is_text: bool = False

    def cell(self, line: pd.Series) -> str:
        if pd.isna(line[self.source]):
            return "-"
        text = self.show(line[self.source])
        low, high = line.get(f"{self.source}_low"), line.get(f"{self.source}_high")
        if low is None or pd.isna(low):
            return text
        return f"{text} {self.show(low)}-{self.show(high)}"


def _decimals(n: int, unit: str = "") -> Callable[[float], str]:
    return lambda value: f"{value:.{n}f}{unit}"


def _columns_of(table: pd.DataFrame) -> list[_Column]:
    """Those of a frame, less what is empty throughout: times of a replay, predictions of a decoded
    sweep."""
    return [
        column
        for column in _COLUMNS
        if column.source in table.columns
        and (column.source not in _OPTIONAL or table[column.source].notna().any())
    ]


_OPTIONAL = ("tpot_ms", "speedup", "end_to_end_speedup", "predicted_speedup", "equal_to_plain")
_COLUMNS = (
    _Column("set", "set", is_text=True),
    _Column("method", "method", is_text=True),
    _Column("drafter", "drafter", is_text=True),
    _Column("block_size", "B"),
    _Column("block_mode", "mode", is_text=True),
    _Column("prompts", "n"),
    _Column("micro_tau", "tau\nmicro", _decimals(2)),
    _Column("macro_tau", "tau\nmacro 95%", _decimals(2)),
    _Column("hindsight_tau", "tau in\nhindsight", _decimals(2)),
    _Column("tpot_ms", "TPOT\nms", _decimals(1)),
    _Column("speedup", "speedup\n95%", _decimals(2)),
    _Column("end_to_end_speedup", "end to\nend", _decimals(2)),
    _Column("over_fixed", "over best\nfixed 95%", _decimals(2)),
    _Column("detectable", "detect-\nable", _decimals(2)),
    _Column("drafting", "drafting\n95%", lambda share: f"{100 * share:.0f}%"),
    _Column("deciding", "decid-\ning", lambda share: f"{100 * share:.1f}%"),
    _Column("verified", "verified\nper cycle", _decimals(1)),
    _Column("predicted_speedup", "predicted\nspeedup", _decimals(2)),
    _Column("equal_to_plain", "equal\nplain", lambda share: f"{100 * share:.0f}%"),
)


def _line(chosen: pd.DataFrame, key: tuple[Any, ...]) -> dict[str, Any]:
    rows = chosen[(chosen[_LINE] == list(key)).all(axis=1)]
    decoded = rows[rows["status"] == "ok"]
    taus = tau.prompt_tau(rows).to_numpy(dtype=np.float64)
    low, high = metrics.bootstrap(metrics.mean, taus)
    line = {
        "prompts": decoded["prompt_id"].nunique(),
        "micro_tau": metrics.micro_tau(rows),
        "macro_tau": metrics.macro_tau(rows),
        "macro_tau_low": low,
        "macro_tau_high": high,
        "tpot_ms": 1e3 * float(metrics.prompt_tpot(rows).median()),
    }
    pairs = metrics.pair_with(decoded, chosen)
    ratio, (ratio_low, ratio_high) = metrics.speedup(pairs)
    if key[0] == PLAIN:  # against itself: an interval would pretend to be a measurement
        ratio_low = ratio_high = float("nan")
    return line | {
        "speedup": ratio,
        "speedup_low": ratio_low,
        "speedup_high": ratio_high,
        "end_to_end_speedup": metrics.end_to_end_speedup(pairs),
        "predicted_speedup": metrics.predicted_speedup(pairs),
        # Replayed rows share one answer, so their equality says nothing.
        "equal_to_plain": metrics.share_equal(pairs[pairs["mode"] == "decode"]),
        "paired": pairs["prompt_id"].nunique(),
    }


def _require_records(records: pd.DataFrame) -> None:
    if records.empty:
        raise UserError("no records to make a table of")
    metrics.require_comparable(records)


def _sets(records: pd.DataFrame, by_set: bool) -> Iterator[tuple[str, pd.DataFrame]]:
    if by_set:
        for name, rows in records.groupby("prompt_set"):
            yield str(name), rows
    yield ALL_SETS, records


def _methods(records: pd.DataFrame) -> list[tuple[Any, ...]]:
    """Lines of the table: plain decoding first, then by mode, policy and drafter, and size."""
    order = ["block_mode", "drafter", "policy", "block_size", "method"]
    lines = records.assign(drafts=records["method"] != PLAIN).sort_values(["drafts", *order])
    return list(lines[_LINE].drop_duplicates().itertuples(index=False, name=None))


def _warnings(records: pd.DataFrame, table: pd.DataFrame) -> Iterator[str]:
    if not ((records["method"] == PLAIN) & (records["status"] == "ok")).any():
        yield "No plain decoding among the records: no speedup and no comparison of outputs."
    elif "paired" in table and (table["paired"] < table["prompts"]).any():
        yield "Some prompts lack plain decoding: speedup and equality rest on the others."
    for status, column in (("skipped", "skip_reason"), ("failed", "error")):
        rows = records[records["status"] == status]
        if len(rows):
            reason = str(rows[column].iloc[0]).splitlines()[0][:_SHOWN_CHARACTERS]
            yield f"{_count(rows)} {status}, first {rows['prompt_id'].iloc[0]}: {reason}"
    idle = tau.with_cycles(records)
    idle = idle[idle["n_cycles"] == 0]
    if len(idle):
        yield f"{_count(idle)} ended before the first cycle: no tau, counted in no tau."


def _count(rows: pd.DataFrame) -> str:
    n = rows["prompt_id"].nunique()
    return f"{n} prompt" if n == 1 else f"{n} prompts"
