"""Tables of a sweep, as frames for files and notebooks and as rich tables for the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from rich import box
from rich.table import Table
from rich.text import Text

from blockpilot.base.errors import UserError
from blockpilot.records.schema import PLAIN
from blockpilot.stats import comparison, intervals, tau

ALL_SETS = "all"
PROVENANCE = ("machine", "commit", "dtype", "target", "decoding")
_LINE = ["method", "block_size", "block_mode"]
_SHOWN_CHARACTERS = 100
ABOUT_DECODED = (
    "n: prompts. tau: tokens per cycle. 95%: bootstrap intervals over prompts. TPOT: decoding time "
    "per token after the first, mean over prompts. speedup: plain decoding's TPOT over the "
    "method's, same prompts and session; end to end: the same of times per token with the prefill "
    "inside. equal plain: share of outputs that are plain decoding's, token for token."
)
_ABOUT_REPLAYED = (
    "n: prompts. tau: tokens per cycle. 95%: bootstrap intervals over prompts. Replayed: the "
    "cycles are those of decoding the one stored answer of each prompt; nothing was timed."
)
_ABOUT_PREDICTED = (
    "predicted TPOT: time per token after the first by the curve given as cost=, mean over "
    "prompts; predicted speedup: plain decoding's over the method's, same prompts."
)


def sweep_table(records: pd.DataFrame, *, by_set: bool = False) -> pd.DataFrame:
    """One line per method, size and block mode; with `by_set` per prompt set, pooled ones last.

    Columns: [set,] method, block_size, block_mode, policy, prompts (decoded ones), micro_tau,
    macro_tau and its interval macro_tau_low/high, equal_to_plain (share of decoded outputs), paired
    (prompts that equality and times rest on: those of plain decoding too), and times per token in
    ms, means over these prompts: tpot_ms beside plain_tpot_ms, plain decoding's over the same
    prompts, and their ratio, speedup with speedup_low/high; so end_to_end_ms with the prefill
    inside and predicted_tpot_ms of replayed rows with a cost curve. Without any plain rows there
    are no ratios, and times are over all prompts of a method. `attrs["caption"]` says what the
    reader must know: missing plain rows, skipped and failed prompts, rows without a cycle.

    Raises UserError when there are no records or their settings must not be pooled.
    """
    _require_records(records)
    lines = []
    has_plain = bool(_plain(records).any())
    for name, chosen in _sets(records, by_set):
        for key in _methods(chosen):
            head = {"set": name} if by_set else {}
            line = _line(chosen, key, has_plain=has_plain)
            lines.append(head | dict(zip(_LINE, key, strict=True)) | line)
    table = pd.DataFrame(lines)
    replayed = records["mode"].eq("replay").all()
    table.attrs["caption"] = [
        _ABOUT_REPLAYED if replayed else ABOUT_DECODED,
        *([_ABOUT_PREDICTED] if table["predicted_tpot_ms"].notna().any() else []),
        *_warnings(records, table),
    ]
    return table


def provenance_of(records: pd.DataFrame) -> dict[str, str]:
    """What rows were made with and on, under the names `PROVENANCE`; several are joined."""
    machines = (
        records["gpu"].fillna(records["cpu"]) + ", " + records["threads"].map("threads {}".format)
    )
    versions = [json.loads(each) for each in records["versions"].unique()]
    commits = [
        f"{each['git_commit'] or 'unknown'}{' with local changes' if each['git_dirty'] else ''}"
        for each in versions
    ]
    decoding = records["temperature"].map("T = {:g}".format) + records["max_new_tokens"].map(
        ", at most {} new tokens".format
    )
    values = (
        machines,
        pd.Series(commits),
        records["dtype"],
        records["target"] + ", " + records["weights"] + " weights",
        decoding,
    )
    return {
        name: "; ".join(sorted(each.unique()))
        for name, each in zip(PROVENANCE, values, strict=True)
    }


def names_of(lines: pd.DataFrame) -> list[str]:
    """What to call each line of `sweep_table`: its method, and more where that is not enough."""
    keys = lines[_LINE].drop_duplicates()
    alone = keys["method"].value_counts() == 1
    return [
        str(method) if alone[method] else f"{method}, B = {size}, {mode}"
        for method, size, mode in lines[_LINE].itertuples(index=False, name=None)
    ]


def figures_of(table: pd.DataFrame) -> dict[str, float]:
    """The numbers of `sweep_table` by name, as `macro_tau/dflash8`; what is empty is left out."""
    if table.empty:
        return {}
    numbers = table.drop(columns=[*_LINE, "policy"]).set_axis(names_of(table), axis=0)
    return {
        f"{column}/{name}": float(value)
        for column, values in numbers.items()
        for name, value in values.dropna().items()
    }


def terminal_table(table: pd.DataFrame, title: str | None = None) -> Table:
    """A frame of `sweep_table` for the terminal, its caption below.

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
    """What `terminal_table` shows of a frame, as a frame of text for a report."""
    return pd.DataFrame(
        {
            column.header.replace("-\n", "").replace("\n", " "): [
                column.cell(line) for _, line in table.iterrows()
            ]
            for column in _columns_of(table)
        }
    )


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
    """Those of a frame, less what is empty throughout, as times of a replay, and less baselines
    that are the same in all lines of a set: there they stand in the baseline's own line."""
    sets = table["set"] if "set" in table else pd.Series(ALL_SETS, table.index)

    def is_informative(column: _Column) -> bool:
        values = table[column.source]
        if column.source in _BASELINES:
            return bool(values.round(9).groupby(sets).nunique().gt(1).any())
        return column.source not in _OPTIONAL or bool(values.notna().any())

    return [each for each in _COLUMNS if each.source in table and is_informative(each)]


_OPTIONAL = (
    "tpot_ms",
    "speedup",
    "end_to_end_speedup",
    "predicted_tpot_ms",
    "predicted_speedup",
    "equal_to_plain",
)
_BASELINES = ("plain_tpot_ms", "plain_predicted_tpot_ms", "fixed_tpot_ms")
_COLUMNS = (
    _Column("set", "set", is_text=True),
    _Column("method", "method", is_text=True),
    _Column("block_size", "B"),
    _Column("block_mode", "mode", is_text=True),
    _Column("prompts", "n"),
    _Column("micro_tau", "tau\nmicro", _decimals(2)),
    _Column("macro_tau", "tau\nmacro 95%", _decimals(2)),
    _Column("tpot_ms", "TPOT\nms", _decimals(1)),
    _Column("speedup", "speedup\n95%", _decimals(2)),
    _Column("plain_tpot_ms", "plain\nTPOT ms", _decimals(1)),
    _Column("end_to_end_speedup", "speedup\nend to end", _decimals(2)),
    _Column("over_fixed", "over best\nfixed 95%", _decimals(2)),
    _Column("fixed_tpot_ms", "best fixed\nTPOT ms", _decimals(1)),
    _Column("detectable", "detect-\nable", _decimals(2)),
    _Column("drafting", "drafting", lambda share: f"{100 * share:.0f}%"),
    _Column("deciding", "decid-\ning", lambda share: f"{100 * share:.1f}%"),
    _Column("verified", "verified\nper cycle", _decimals(1)),
    _Column("predicted_tpot_ms", "predicted\nTPOT ms", _decimals(1)),
    _Column("predicted_speedup", "predicted\nspeedup 95%", _decimals(2)),
    _Column("plain_predicted_tpot_ms", "plain\nTPOT ms", _decimals(1)),
    _Column("equal_to_plain", "equal\nplain", lambda share: f"{100 * share:.0f}%"),
)


def _line(chosen: pd.DataFrame, key: tuple[Any, ...], *, has_plain: bool) -> dict[str, Any]:
    rows = chosen[(chosen[_LINE] == list(key)).all(axis=1)]
    taus = tau.prompt_tau(rows).to_numpy(dtype=np.float64)
    low, high = intervals.bootstrap(intervals.mean, taus)
    base, base_rows = (PLAIN, chosen) if has_plain else (key[0], rows)
    pairs = comparison.pair_with(rows, base_rows, base)
    line = {
        "policy": rows["policy"].iloc[0].split("@")[0],
        "prompts": rows.loc[rows["status"] == "ok", "prompt_id"].nunique(),
        "micro_tau": tau.micro_tau(rows),
        "macro_tau": tau.macro_tau(rows),
        "macro_tau_low": low,
        "macro_tau_high": high,
    }
    for time, ratio, times in (
        ("tpot_ms", "speedup", comparison.token_times(pairs)),
        ("end_to_end_ms", "end_to_end_speedup", comparison.token_times(pairs, with_prefill=True)),
        (
            "predicted_tpot_ms",
            "predicted_speedup",
            comparison.token_times(pairs, "predicted_decode_s"),
        ),
    ):
        line[time] = 1e3 * times.method_s
        line[f"plain_{time}"] = 1e3 * times.base_s if has_plain else float("nan")
        line[ratio] = times.ratio if has_plain else float("nan")
        if ratio != "end_to_end_speedup":
            # Of plain decoding against itself an interval would pretend to be a measurement.
            measured = has_plain and key[0] != PLAIN
            line[f"{ratio}_low"], line[f"{ratio}_high"] = (
                times.interval() if measured else intervals.NO_INTERVAL
            )
    return line | {
        # Replayed rows share one answer, so their equality says nothing.
        "equal_to_plain": comparison.share_equal(pairs[pairs["mode"] == "decode"])
        if has_plain
        else float("nan"),
        "paired": pairs["prompt_id"].nunique() if has_plain else 0,
    }


def _plain(records: pd.DataFrame) -> pd.Series:
    return (records["method"] == PLAIN) & (records["status"] == "ok")


def _require_records(records: pd.DataFrame) -> None:
    if records.empty:
        raise UserError("no records to make a table of")
    comparison.require_comparable(records)


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
    if not _plain(records).any():
        yield "No plain decoding among the records: no speedup and no comparison of outputs."
    elif (table["paired"] < table["prompts"]).any():
        yield "Some prompts lack plain decoding: TPOT, speedup and equality rest on the others."
    sets = table["set"] if "set" in table else pd.Series(ALL_SETS, table.index)
    if table["paired"].groupby(sets).nunique().gt(1).any():
        yield "Lines rest on different prompts: plain TPOT is plain decoding's over the line's own."
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
