"""Figures of a sweep or an evaluation, drawn from its records and its table alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from blockpilot.decoding.types import source_of
from blockpilot.records.schema import PLAIN
from blockpilot.stats.intervals import bootstrap, mean
from blockpilot.stats.luck import luck
from blockpilot.stats.oracles import best_fixed, cross_fitted, oracle
from blockpilot.stats.tau import best_size, half_taus, tau_by_size, with_cycles
from blockpilot.sweep.tables import ALL_SETS, names_of

_MARKS = (("o", "black"), ("s", "white"), ("^", "0.6"), ("D", "white"), ("v", "black"))
_SPREAD = 0.25  # of a method's sets, where methods are 1 apart
_SINGLE = 3  # prompts drawn one by one
_PARTS = ("draft_s", "verify_s", "policy_s", "other_s")


def figures(records: pd.DataFrame, lines: pd.DataFrame) -> Iterator[tuple[str, str, Figure]]:
    """(file name, what it shows, figure) of all that the records can show.

    `lines` are those of `sweep_table(records, by_set=True)`.
    """
    # The sizes of the sweep's own drafter; other methods may bring others of the same size.
    sized = records["drafter"] + records["block_size"].astype(str)
    fixed = records[records["method"].eq(PLAIN) | records["method"].eq(sized)]
    drawn: list[tuple[str, Callable[[Axes, pd.DataFrame], str | None], pd.DataFrame]] = [
        ("speedup_by_method", speedup_by_method, lines),
        ("tau_over_size", tau_over_size, fixed),
        ("best_sizes", best_sizes, fixed),
        ("accepted_by_slot", accepted_by_slot, fixed),
        ("oracle_and_luck", oracle_and_luck, fixed),
        ("cost_over_size", cost_over_size, fixed),
        ("time_of_a_cycle", time_of_a_cycle, records),
        ("choices", choices_of_an_answer, records),
    ]
    for name, draw, rows in drawn:
        figure = Figure(figsize=(6.4, 4.4), dpi=144, layout="constrained")
        caption = draw(figure.subplots(), rows)
        if caption is not None:
            yield name, caption, figure


def speedup_by_method(axes: Axes, lines: pd.DataFrame) -> str | None:
    """Speedup over plain decoding of every method on every prompt set, with its interval.

    Methods by their speedup over all prompts, the fastest on top; measured, and predicted where
    nothing was timed. Sets differ by marker and shade, so the figure can be printed without colour.
    """
    column = "speedup" if lines["speedup"].notna().any() else "predicted_speedup"
    named = lines.assign(name=names_of(lines))
    named = named[named["method"].ne(PLAIN) & named[column].notna()]
    if named.empty:
        return None
    pooled = named[named["set"] == ALL_SETS].sort_values(column, kind="stable")
    height = {name: float(y) for y, name in enumerate(pooled["name"])}
    sets = [name for name in dict.fromkeys(named["set"]) if name != ALL_SETS]
    offsets = np.linspace(_SPREAD, -_SPREAD, len(sets)) if len(sets) > 1 else np.zeros(1)
    axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
    for name, offset, (marker, shade) in zip(sets, offsets, itertools.cycle(_MARKS), strict=False):
        rows = named[named["set"] == name]
        middle = rows[column].to_numpy(dtype=np.float64)
        ends = rows[[f"{column}_low", f"{column}_high"]].to_numpy(dtype=np.float64)
        beyond = np.abs(ends - middle[:, None])  # of the interval; NaN draws no bar
        axes.errorbar(
            middle,
            rows["name"].map(height).to_numpy() + offset,
            xerr=beyond.T,
            fmt=marker,
            label=str(name),
            color="black",
            markerfacecolor=shade,
            markersize=6,
            elinewidth=1,
            capsize=3,
        )
    axes.set_yticks(list(height.values()), list(height))
    axes.set(xlabel="times as fast as plain decoding")
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.figure.legend(loc="outside upper center", ncols=len(sets), fontsize="small")
    how = "Measured" if column == "speedup" else "Predicted, nothing having been timed:"
    return (
        f"{how} speedup over plain decoding (dashed) with 95% intervals over prompts; methods in "
        "the order of their speedup over all prompts. The axis does not begin at 0."
    )


def drawn_ladder(lines: pd.DataFrame) -> tuple[str, Figure]:
    """(what it shows, figure) of lines of `evaluate.ladder`: speedups over all prompts."""
    figure = Figure(figsize=(6.4, 4.4), dpi=144, layout="constrained")
    axes = figure.subplots()
    pooled = lines[lines["set"].eq(ALL_SETS) & lines["method"].ne(PLAIN)].iloc[::-1]
    middle = pooled["speedup"].to_numpy(dtype=np.float64)
    ends = pooled[["speedup_low", "speedup_high"]].to_numpy(dtype=np.float64)
    shades = ["white" if each.endswith("hindsight") else "0.6" for each in pooled["method"]]
    axes.barh(
        np.arange(len(pooled)),
        middle,
        xerr=np.abs(ends - middle[:, None]).T,
        color=shades,
        edgecolor="black",
        capsize=3,
    )
    axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_yticks(np.arange(len(pooled)), pooled["method"])
    axes.set(xlabel="times as fast as plain decoding, predicted")
    return (
        "What each part adds over all prompts, by replay, with 95% intervals; white: in hindsight.",
        figure,
    )


def choices_of_an_answer(axes: Axes, records: pd.DataFrame) -> str | None:
    """What a policy that picks a source per cycle verified along one answer, and what held."""
    # The first answer in which it both copied and drafted, of the last such method.
    mixed = [
        {"draft", "copy"} <= set(map(source_of, drafted, verified))
        for drafted, verified in zip(records["drafted"], records["verified"], strict=True)
    ]
    rows = records[np.array(mixed, dtype=bool) & records["status"].eq("ok")]
    if rows.empty:
        return None
    row = rows[rows["method"] == rows["method"].iloc[-1]].iloc[0]
    sources = np.array(list(map(source_of, row["drafted"], row["verified"])))
    ends = np.cumsum(row["committed"])
    starts = ends - row["committed"]
    for source, shade in (("plain", "black"), ("copy", "0.75"), ("draft", "white")):
        mine = sources == source
        axes.bar(
            starts[mine],
            np.asarray(row["verified"])[mine],
            width=np.asarray(row["committed"])[mine],
            align="edge",
            color=shade,
            edgecolor="black",
            linewidth=0.6,
            label=source,
        )
    axes.set(xlabel="token of the answer", ylabel="positions verified in the cycle")
    axes.figure.legend(loc="outside upper center", ncols=3, fontsize="small")
    return (
        f"The cycles of {row['method']} along the answer to {row['prompt_id']}: a bar is as wide "
        "as the tokens that it committed and as high as what it verified."
    )


def tau_over_size(axes: Axes, records: pd.DataFrame) -> str | None:
    """Mean tau at each size per prompt set with its interval, and a few single prompts."""
    for name, rows in records.groupby("prompt_set"):
        taus = tau_by_size(rows)
        if taus.empty:
            continue
        values = taus.to_numpy(dtype=np.float64)
        (line,) = axes.plot(taus.columns, values.mean(axis=0), marker="o", label=str(name))
        bands = [bootstrap(mean, column) for column in values.T]
        low, high = zip(*bands, strict=True)
        axes.fill_between(taus.columns, low, high, color=line.get_color(), alpha=0.2)
        for single in values[:_SINGLE]:
            axes.plot(taus.columns, single, color=line.get_color(), alpha=0.35, linewidth=0.8)
    if not axes.lines:
        return None
    axes.set(xlabel="block size", ylabel="tau (tokens per cycle)")
    axes.legend(fontsize="small")
    return f"Mean tau with 95% bands; thin lines are the first {_SINGLE} prompts of each set."


def best_sizes(axes: Axes, records: pd.DataFrame) -> str | None:
    """How many prompts are best served by each size."""
    taus = tau_by_size(records)
    if taus.shape[1] < 2:
        return None
    counts = best_size(taus).value_counts().reindex(taus.columns, fill_value=0)
    axes.bar(range(len(counts)), counts)
    axes.set_xticks(range(len(counts)), [str(size) for size in counts.index])
    axes.set(xlabel="best block size (ties: the smaller)", ylabel="prompts")
    ties = (taus.eq(taus.max(axis=1), axis=0).sum(axis=1) > 1).mean()
    return f"Best size of each of {len(taus)} prompts; {ties:.0%} of them have a tie."


def accepted_by_slot(axes: Axes, records: pd.DataFrame) -> str | None:
    """Share of the cycles at the trained size that accept slot j."""
    drafted = records[(records["method"] != PLAIN) & (records["status"] == "ok")]
    trained = drafted[drafted["block_size"] == drafted["trained_block_size"]]
    for name, rows in trained.groupby("prompt_set"):
        committed = np.concatenate([np.asarray(counts) for counts in rows["committed"]])
        if not len(committed):
            continue
        slots = np.arange(1, int(rows["block_size"].iloc[0]))
        axes.plot(slots, [(committed > slot).mean() for slot in slots], marker="o", label=str(name))
    if not axes.lines:
        return None
    axes.set(xlabel="slot", ylabel="share of cycles that accept it", ylim=(0, 1))
    axes.legend(fontsize="small")
    return "Accepted slots at the trained block size; cycles cut by the budget count as they ended."


def oracle_and_luck(axes: Axes, records: pd.DataFrame) -> str | None:
    """Best fixed size, oracle, the oracle of luck alone, and the cross-fitted oracle."""
    taus = tau_by_size(records)
    if taus.shape[1] < 2 or len(taus) < 2:
        return None
    gains = taus.to_numpy(dtype=np.float64)
    halves = [
        part.reindex(taus.index).to_numpy(dtype=np.float64)
        for part in half_taus(records, [int(size) for size in taus.columns.to_numpy()])
    ]
    halved = np.isfinite(halves[0] + halves[1]).all(axis=1)
    if not halved.any():
        return None
    luck_gains = luck(gains, *halves)
    halves = [half[halved] for half in halves]
    fixed = best_fixed(gains)
    bars = {
        "best fixed": gains[:, fixed].mean(),
        "oracle": oracle(gains),
        "luck alone": luck_gains.mean(),
        "best fixed,\non halves": np.mean([half[:, fixed].mean() for half in halves]),
        "cross-fitted\noracle": cross_fitted(*halves).mean(),
    }
    axes.bar(list(bars), list(bars.values()))
    axes.set(ylabel="tau", ylim=(0.9 * min(bars.values()), 1.03 * max(bars.values())))
    axes.tick_params(axis="x", labelsize="small")
    return (
        f"The oracle of {len(taus)} prompts beside that of prompts which all prefer the same sizes "
        "and differ by the noise that the halves of each answer show, and beside one that chooses "
        "on one half of an answer and is scored on the other. The axis does not begin at 0."
    )


def cost_over_size(axes: Axes, records: pd.DataFrame) -> str | None:
    """Measured milliseconds of a cycle at each size."""
    rows = with_cycles(records)
    rows = rows[rows["decode_s"].notna() & (rows["n_cycles"] > 0)]
    if rows["block_size"].nunique() < 2:
        return None
    per_cycle = 1e3 * rows["decode_s"].astype(float) / rows["n_cycles"]
    sizes, quartiles = [], []
    for size, values in per_cycle.groupby(rows["block_size"]):
        sizes.append(size)
        quartiles.append(np.quantile(values, [0.25, 0.5, 0.75]))
    low, middle, high = np.array(quartiles).T
    axes.errorbar(sizes, middle, yerr=[middle - low, high - middle], marker="o", capsize=3)
    axes.set(xlabel="block size (1: plain decoding)", ylabel="ms per cycle", ylim=(0, None))
    return "Median over prompts of a cycle's time, with the middle half."


def time_of_a_cycle(axes: Axes, records: pd.DataFrame) -> str | None:
    """Parts of a cycle's time for every method."""
    rows = with_cycles(records)
    rows = rows[rows["decode_s"].notna() & (rows["n_cycles"] > 0)]
    if rows.empty:
        return None
    order = list(dict.fromkeys(rows.sort_values(["policy", "block_size"])["method"]))
    sums = rows.groupby("method")[[*_PARTS, "n_cycles"]].sum().loc[order]
    bottom: NDArray[np.float64] = np.zeros(len(sums))
    for part in _PARTS:
        height = (1e3 * sums[part] / sums["n_cycles"]).to_numpy(dtype=np.float64)
        axes.bar(sums.index, height, bottom=bottom, label=part.removesuffix("_s"))
        bottom = bottom + height
    axes.set(ylabel="ms per cycle")
    axes.tick_params(axis="x", labelrotation=45, labelsize="small")
    axes.legend(fontsize="small")
    return "What a cycle's time is made of; verify holds the target's forward and the sampling."
