"""Two methods on the same prompts: pairs of rows, times per token, equality of outputs.

Rows are paired by prompt, seed and turn, within one session.
    TPOT     decode_s / (n_new_tokens - 1), seconds per token after the first; of a method: the
             mean over prompts
    speedup  TPOT of plain decoding / TPOT of the method, over the same prompts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from blockpilot.base.errors import UserError
from blockpilot.records.schema import METHOD_FIELDS, PLAIN, SHARED_FIELDS
from blockpilot.stats.arrays import Floats
from blockpilot.stats.intervals import Interval, bootstrap

_PAIR = ["prompt_id", "seed", "turn"]
_METHOD = ["method", "block_size", "block_mode"]  # what a line of a table stands for


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
    base_name = "plain decoding" if base == PLAIN else base
    for field in ("session_id", *SHARED_FIELDS, "prompt_hash"):
        if field in _PAIR:
            continue
        values, base_values = pairs[field], pairs[f"{field}_base"]
        differ = ~((values == base_values).fillna(False) | (values.isna() & base_values.isna()))
        if differ.any():
            row = pairs[differ].iloc[0]
            raise UserError(
                f"prompt {row['prompt_id']}: method {row['method']} and {base_name} differ in "
                f"{field} ({row[field]} and {row[field + '_base']}), so they cannot be compared: "
                "run both in one session with the same settings"
            )
    return pairs


def with_partners(records: pd.DataFrame, bases: Sequence[str]) -> pd.DataFrame:
    """Rows whose prompt, seed and turn every method of `bases` has; those not ok stay."""
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
class TokenTimes:
    """Seconds per token of each prompt, [P] of a base method and [P] of a method; NaN of none."""

    base: Floats
    method: Floats

    @property
    def base_s(self) -> float:
        """Mean of the base over the prompts."""
        return float(self.base.mean()) if len(self.base) else float("nan")

    @property
    def method_s(self) -> float:
        """Mean of the method over the same prompts."""
        return float(self.method.mean()) if len(self.method) else float("nan")

    @property
    def ratio(self) -> float:
        """base_s / method_s: how many times as fast the method is."""
        return self.base_s / self.method_s

    def interval(self) -> Interval:
        """Of the ratio."""
        return bootstrap(_ratio_of_means, self.base, self.method)


def _ratio_of_means(base: Floats, method: Floats) -> Floats:
    return np.asarray(base.mean(axis=-1) / method.mean(axis=-1))


def token_times(
    pairs: pd.DataFrame, column: str = "decode_s", *, with_prefill: bool = False
) -> TokenTimes:
    """Times per token of pairs of `pair_with`: TPOTs, whose ratio is the speedup.

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
    return TokenTimes(
        (sums["seconds_base"] / sums["tokens_base"]).to_numpy(dtype=np.float64),
        (sums["seconds"] / sums["tokens"]).to_numpy(dtype=np.float64),
    )


def _require_one(rows: pd.DataFrame, field: str, where: str) -> None:
    values: Sequence[object] = list(rows[field].drop_duplicates())
    if len(values) > 1:
        shown = ", ".join(sorted(map(str, values)))
        raise UserError(f"{where}: {field} differs ({shown}); keep the rows of one {field}")
