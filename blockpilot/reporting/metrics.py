"""Numbers from record rows: tau, TPOT, speedup, equality with plain decoding, intervals.

Words and formulas are those of the project's design:
    tau      tokens committed per cycle; micro: pooled over prompts; macro: mean over prompts of
             the prompt's own tau. A prompt pools its turns, repeats and seeds.
    TPOT     decode_s / (n_new_tokens - 1), seconds per token after the first
    speedup  mean over prompts of plain decoding's TPOT / mean over the same prompts of the
             method's: rows are paired by prompt, seed, turn and repeat within one session
Rows without a cycle (stopped on the prefill's token, budget 0) have no tau and are counted apart.
Intervals are 95% percentile bootstrap intervals over prompts, paired where two methods meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from blockpilot.errors import UserError
from blockpilot.labels import Floats
from blockpilot.records.schema import METHOD_FIELDS, PLAIN, SHARED_FIELDS
from blockpilot.records.tau import prompt_tau, with_cycles

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


def prompt_tpot(records: pd.DataFrame) -> pd.Series:
    """TPOT of each prompt in seconds, index prompt_id; prompts with one token are left out."""
    rows = records[(records["status"] == "ok") & records["decode_s"].notna()]
    rows = rows.assign(n_timed=rows["n_new_tokens"].astype(int) - 1)
    sums = rows[rows["n_timed"] > 0].groupby("prompt_id")[["decode_s", "n_timed"]].sum()
    return sums["decode_s"] / sums["n_timed"]


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


def share_equal(pairs: pd.DataFrame) -> float:
    """Share of outputs that equal the partner's, token for token; NaN without pairs."""
    if pairs.empty:
        return float("nan")
    return float((pairs["output_sha256"] == pairs["output_sha256_base"]).mean())


def speedup(pairs: pd.DataFrame, *, seed: int = 0) -> tuple[float, Interval]:
    """Ratio of mean TPOTs, the partner's over the method's, with its interval."""
    theirs, ours = paired_times(pairs, "decode_s")
    return float(_ratio(theirs, ours)), bootstrap(_ratio, theirs, ours, seed=seed)


def end_to_end_speedup(pairs: pd.DataFrame) -> float:
    """The same ratio with the prefill inside: (prefill_s + decode_s) / n_new_tokens."""
    return float(_ratio(*paired_times(pairs, "decode_s", with_prefill=True)))


def predicted_speedup(pairs: pd.DataFrame) -> float:
    """The ratio of TPOTs that a cost curve predicts for replayed rows; NaN without predictions."""
    return float(_ratio(*paired_times(pairs, "predicted_decode_s")))


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
    if theirs.shape[-1] == 0:
        return np.asarray(np.nan)
    return np.asarray(theirs.mean(axis=-1) / ours.mean(axis=-1))


def paired_times(
    pairs: pd.DataFrame, column: str, *, with_prefill: bool = False
) -> tuple[Floats, Floats]:
    """Seconds per token of each prompt, [P] of the partner and [P] of the method."""
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
    theirs = (sums["seconds_base"] / sums["tokens_base"]).to_numpy(dtype=np.float64)
    ours = (sums["seconds"] / sums["tokens"]).to_numpy(dtype=np.float64)
    return theirs, ours


def _require_one(rows: pd.DataFrame, field: str, where: str) -> None:
    values: Sequence[object] = list(rows[field].drop_duplicates())
    if len(values) > 1:
        shown = ", ".join(sorted(map(str, values)))
        raise UserError(f"{where}: {field} differs ({shown}); keep the rows of one {field}")
