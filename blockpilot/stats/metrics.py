"""Numbers from record rows: tau, TPOT, speedup, equality with plain decoding, intervals.

Words and formulas are those of the project's design:
    tau      tokens committed per cycle; micro: pooled over prompts; macro: mean over prompts of
             the prompt's own tau. A prompt pools its turns, repeats and seeds.
    TPOT     decode_s / (n_new_tokens - 1), seconds per token after the first; of a method: the
             mean over prompts
    speedup  TPOT of plain decoding / TPOT of the method, over the same prompts: rows are paired by
             prompt, seed, turn and repeat within one session
Rows without a cycle (stopped on the prefill's token, budget 0) have no tau and are counted apart.
Intervals are 95% percentile bootstrap intervals over prompts, paired where two methods meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from blockpilot.base.errors import UserError
from blockpilot.records.schema import METHOD_FIELDS, PLAIN, SHARED_FIELDS
from blockpilot.stats.labels import Floats
from blockpilot.stats.tau import prompt_tau, with_cycles

Interval = tuple[float, float]

RESAMPLES = 2000
LEVEL = 0.95
_PAIR = ["prompt_id", "seed", "turn", "repeat"]
_METHOD = ["method", "block_size", "block_mode"]  # what a line of a table stands for
_NO_INTERVAL = (float("nan"), float("nan"))


def micro_tau(records: pd.DataFrame) -> float:
    """Tokens per cycle, pooled over prompts; NaN without a cycle."""
    rows = with_cycles(records)
    cycles = int(rows["n_cycles"].sum())
    return int(rows["n_committed"].sum()) / cycles if cycles else float("nan")


def macro_tau(records: pd.DataFrame) -> float:
    """Mean of the per-prompt tau (what the papers print); NaN without a cycle."""
    return float(prompt_tau(records).mean())


def require_comparable(records: pd.DataFrame) -> None:
    """Raise UserError, naming the field, where rows of differing settings would be pooled.

    All rows must share their settings (the seed may differ: tau is averaged over seeds), a method
    must mean one thing, and no row may stand there twice.
    """
    for field in SHARED_FIELDS:
        if field != "seed":
            _require_one(records, field, "the records")
    for name, rows in records.groupby(_METHOD):
        for field in METHOD_FIELDS:
            _require_one(rows, field, f"method {name[0]}, size {name[1]}, mode {name[2]}")
    for field in ("prompt_hash", "prompt_set"):
        counts = records.groupby("prompt_id")[field].nunique()
        for prompt_id in counts.index[counts > 1]:
            _require_one(records[records["prompt_id"] == prompt_id], field, f"prompt {prompt_id}")
    twice = records[records.duplicated(_PAIR + _METHOD)]
    if len(twice):
        row = twice.iloc[0]
        raise UserError(
            f"prompt {row['prompt_id']} has two rows of method {row['method']}, size "
            f"{row['block_size']}: keep the rows of one run_id"
        )


def pair_with(rows: pd.DataFrame, records: pd.DataFrame, base: str = PLAIN) -> pd.DataFrame:
    """`rows` of one method, each joined to the row of method `base`, whose columns end in `_base`.

    Both must be ok; rows without a partner are left out. Raises UserError naming the field when
    partners come from different sessions or differ in a setting.
    """
    ok = records[records["status"] == "ok"]
    partners = ok[ok["method"] == base]
    pairs = rows[rows["status"] == "ok"].merge(partners, on=_PAIR, suffixes=("", "_base"))
    told = "plain decoding" if base == PLAIN else base
    for field in ("session_id", *SHARED_FIELDS, "prompt_hash"):
        if field in _PAIR:
            continue
        ours, theirs = pairs[field], pairs[f"{field}_base"]
        differ = ~((ours == theirs).fillna(False) | (ours.isna() & theirs.isna()))
        if differ.any():
            row = pairs[differ].iloc[0]
            raise UserError(
                f"prompt {row['prompt_id']}: method {row['method']} and {told} differ in "
                f"{field} ({row[field]} and {row[field + '_base']}), so they cannot be compared: "
                "run both in one session with the same settings"
            )
    return pairs


def with_partners(records: pd.DataFrame, bases: Sequence[str]) -> pd.DataFrame:
    """Rows whose prompt, seed, turn and repeat every method of `bases` has; those not ok stay."""
    answers = pd.MultiIndex.from_frame(records[_PAIR])
    ok = records["status"] == "ok"
    kept = pd.Series(data=True, index=records.index)
    for base in bases:
        kept &= answers.isin(answers[ok & (records["method"] == base)])
    return records[kept | ~ok]


def share_equal(pairs: pd.DataFrame) -> float:
    """Share of outputs that equal the partner's, token for token; NaN without pairs."""
    if pairs.empty:
        return float("nan")
    return float((pairs["output_sha256"] == pairs["output_sha256_base"]).mean())


@dataclass(frozen=True)
class Compared:
    """Seconds per token of each prompt, [P] of a partner and [P] of a method; NaN of no prompts."""

    theirs: Floats
    ours: Floats

    @property
    def base_s(self) -> float:
        """The partner's mean over the prompts."""
        return float(self.theirs.mean()) if len(self.theirs) else float("nan")

    @property
    def own_s(self) -> float:
        """The method's mean over the same prompts."""
        return float(self.ours.mean()) if len(self.ours) else float("nan")

    @property
    def ratio(self) -> float:
        """base_s / own_s: how many times as fast the method is."""
        return self.base_s / self.own_s

    def interval(self) -> Interval:
        """Of the ratio."""
        return bootstrap(_ratio, self.theirs, self.ours)


def bootstrap(
    statistic: Callable[..., Floats],
    *columns: Floats,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """95% percentile interval of `statistic` over prompts drawn with replacement.

    columns: [P] each, drawn together, so they stay paired. `statistic` takes arrays [..., P] and
    reduces the last axis. With fewer than two prompts the interval is NaN.
    """
    n_prompts = len(columns[0])
    if n_prompts < 2:
        return _NO_INTERVAL
    drawn = np.random.default_rng(seed).integers(n_prompts, size=(resamples, n_prompts))  # [R, P]
    values = statistic(*(column[drawn] for column in columns))  # [R]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def mean(values: Floats) -> Floats:
    """Mean over the last axis, for `bootstrap`."""
    return np.asarray(values.mean(axis=-1))


def share(part: Floats, whole: Floats) -> Floats:
    """Of the sums over the last axis, for `bootstrap`."""
    return np.asarray(part.sum(axis=-1) / whole.sum(axis=-1))


def _ratio(theirs: Floats, ours: Floats) -> Floats:
    return np.asarray(theirs.mean(axis=-1) / ours.mean(axis=-1))


def compared(
    pairs: pd.DataFrame, column: str = "decode_s", *, with_prefill: bool = False
) -> Compared:
    """Times per token of the pairs that `pair_with` found: TPOTs, whose ratio is the speedup.

    `predicted_decode_s` gives those that a cost curve predicts for replayed rows. With the prefill
    inside, the end-to-end times: (prefill_s + decode_s) / n_new_tokens.
    """
    timed = pairs[pairs[column].notna() & pairs[f"{column}_base"].notna()]
    first = 0 if with_prefill else 1
    parts = {}
    for suffix in ("", "_base"):
        seconds = timed[f"{column}{suffix}"]
        if with_prefill:
            seconds = seconds + timed[f"prefill_s{suffix}"]
        parts[f"seconds{suffix}"] = seconds
        parts[f"tokens{suffix}"] = timed[f"n_new_tokens{suffix}"].astype(int) - first
    sums = pd.DataFrame(parts).groupby(timed["prompt_id"]).sum()
    sums = sums[(sums["tokens"] > 0) & (sums["tokens_base"] > 0)]
    return Compared(
        (sums["seconds_base"] / sums["tokens_base"]).to_numpy(dtype=np.float64),
        (sums["seconds"] / sums["tokens"]).to_numpy(dtype=np.float64),
    )


def _require_one(rows: pd.DataFrame, field: str, where: str) -> None:
    values: Sequence[object] = list(rows[field].drop_duplicates())
    if len(values) > 1:
        shown = ", ".join(sorted(map(str, values)))
        raise UserError(f"{where}: {field} differs ({shown}); keep the rows of one {field}")
