"""Tau from record rows: tokens committed per cycle.

A prompt pools its turns, repeats and seeds. micro: pooled over prompts too; macro: mean over
prompts of the prompt's own tau. Rows without a cycle (stopped on the prefill's token, budget 0)
have no tau and are counted apart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pandas as pd

from blockpilot.records.schema import PLAIN


def with_cycles(records: pd.DataFrame) -> pd.DataFrame:
    """Rows with status ok, plus n_committed, n_cycles and tau (NaN without a cycle)."""
    rows = records[records["status"] == "ok"].copy()
    rows["n_committed"] = [int(np.sum(counts)) for counts in rows["committed"]]
    rows["n_cycles"] = [len(counts) for counts in rows["committed"]]
    rows["tau"] = rows["n_committed"] / rows["n_cycles"].where(rows["n_cycles"] > 0)
    return rows


def prompt_tau(records: pd.DataFrame) -> pd.Series:
    """tau of each prompt, index prompt_id; prompts without a cycle are left out.

    For rows of one method and size.
    """
    sums = with_cycles(records).groupby("prompt_id")[["n_committed", "n_cycles"]].sum()
    sums = sums[sums["n_cycles"] > 0]
    return sums["n_committed"] / sums["n_cycles"]


def micro_tau(records: pd.DataFrame) -> float:
    """Tokens per cycle, pooled over prompts; NaN without a cycle."""
    rows = with_cycles(records)
    cycles = int(rows["n_cycles"].sum())
    return int(rows["n_committed"].sum()) / cycles if cycles else float("nan")


def macro_tau(records: pd.DataFrame) -> float:
    """Mean of the per-prompt tau (what the papers print); NaN without a cycle."""
    return float(prompt_tau(records).mean())


def tau_by_size(records: pd.DataFrame) -> pd.DataFrame:
    """Prompts x block sizes -> tau, for the drafted rows of one method family and block mode.

    Prompts that lack a size are left out, so that the columns stay paired.
    """
    drafted = records[records["method"] != PLAIN]
    sizes = {size: prompt_tau(rows) for size, rows in drafted.groupby("block_size")}
    return pd.DataFrame(sizes).dropna()


def best_size(taus: pd.DataFrame) -> pd.Series:
    """Block size with the highest tau for each row of `tau_by_size`; ties go to the smaller."""
    return taus[sorted(taus.columns)].idxmax(axis=1)


def example_names(records: pd.DataFrame) -> pd.Series:
    """What a row is an answer to: its prompt, with `#turn` behind it for later turns.

    A later turn follows the answers before it. Where those were sampled, each seed's is another
    context, and `@seed` is added.
    """
    later = records["turn"] > 0
    turns = ("#" + records["turn"].astype(str)).where(later, "")
    seeds = ("@" + records["seed"].astype(str)).where(later & (records["temperature"] > 0), "")
    return records["prompt_id"] + turns + seeds


def turn_of(example: str) -> int:
    """The turn in a name of `example_names`."""
    turn = re.search(r"#(\d+)(@\d+)?$", example)
    return int(turn[1]) if turn else 0


def example_taus(records: pd.DataFrame, sizes: Sequence[int]) -> pd.DataFrame:
    """Examples (`example_names`) x block sizes -> tau, the mean over seeds.

    Plain decoding is size 1. For rows of one drafter and block mode. Answers that lack a size or
    had no cycle are left out, so that sizes are averaged over the same seeds.
    """
    return _answer_taus(records, sizes).groupby("example").mean()


def half_taus(records: pd.DataFrame, sizes: Sequence[int]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """`example_taus` over the first and the second half of each answer.

    A cycle belongs to the half in which it starts; an answer of which a half has no cycle at some
    size is left out of both.
    """
    parts = []
    for second in (False, True):
        rows = records[records["status"] == "ok"].copy()
        rows["committed"] = rows["committed"].map(lambda counts, s=second: _half(counts, s))
        parts.append(_answer_taus(rows, sizes))
    both = parts[0].index.intersection(parts[1].index)
    first, second_ = (part.loc[both].groupby("example").mean() for part in parts)
    return first, second_


def _answer_taus(records: pd.DataFrame, sizes: Sequence[int]) -> pd.DataFrame:
    """(example, seed) x sizes -> tau of the answers that have all of them."""
    rows = with_cycles(records)
    rows = rows.assign(example=example_names(rows))
    table = rows.groupby(["example", "seed", "block_size"])["tau"].mean().unstack()
    return table.reindex(columns=list(sizes)).dropna()


def _half(committed: np.ndarray, second: bool) -> np.ndarray:
    counts = np.asarray(committed)
    starts = np.cumsum(counts) - counts
    return counts[(starts >= counts.sum() / 2) == second]
