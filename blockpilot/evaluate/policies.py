"""Gains of policies that decide every cycle, from the rows that replays hold beside the sizes'."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

import pandas as pd

from blockpilot.records.run_folder import RunFolder
from blockpilot.stats.arrays import Floats
from blockpilot.stats.tau import example_names, with_cycles

log = logging.getLogger(__name__)

_NUMBER = re.compile(r"\d+$")
_ANSWER = ["example", "seed"]


def policy_gains(
    runs: Sequence[RunFolder], base: Mapping[str, float], size: int, *, curve: str | None
) -> pd.DataFrame | None:
    """Gain of every policy in the runs, examples x methods; NaN where a method has no row.

    `base` maps examples (`example_names`) to the gain of the fixed block size `size`: tau, or
    tokens per second by the cost curve of the digest `curve`. A policy's is that, times the ratio
    of what both gain on the same answers, averaged over their seeds: tokens per cycle, or per
    predicted second. None where the runs hold no policy, or no times predicted by that curve
    though they are needed.
    """
    rows = with_cycles(pd.concat([run.records() for run in runs], ignore_index=True))
    rows = rows[rows["n_cycles"] > 0]
    rows = rows.assign(example=example_names(rows), gain=rows["tau"])
    own = rows["policy"] != "fixed"
    if not own.any():
        return None
    if curve is not None:
        others = [run for run in runs if run.predicted_by not in (None, curve)]
        if others:
            log.warning(
                "no line for policies: times of %s are of another cost curve", others[0].path
            )
            return None
        if rows.loc[own, "predicted_decode_s"].isna().any():
            log.warning("no line for policies: sweep with cost=<curve> for their predicted times")
            return None
        rows["gain"] = rows["n_committed"] / rows["predicted_decode_s"]
    fixed = rows[~own & (rows["block_size"] == size)].drop_duplicates(_ANSWER)
    both = rows[own].merge(fixed[[*_ANSWER, "gain"]], on=_ANSWER, suffixes=("", "_fixed"))
    means = both.groupby(["example", "method"])[["gain", "gain_fixed"]].mean()
    ratios = (means["gain"] / means["gain_fixed"]).unstack()
    return ratios.mul(pd.Series(base), axis=0)


def with_tuned(
    gains: pd.DataFrame, learnt: Sequence[str], test: Sequence[str]
) -> dict[str, Floats]:
    """Gains [P] of the examples `test` by method; those that lack an example are left out.

    Of methods that differ only in the number at the end of their names, the one that gained most
    on the examples `learnt`, the smallest of equals, is named as tuned.
    """
    measured = gains.reindex(list(test)).dropna(axis=1)
    ordered = sorted(map(str, measured.columns), key=_number)
    before = gains.reindex(list(learnt))[ordered].dropna(axis=1)
    named: dict[str, str] = {str(name): str(name) for name in measured.columns}
    families = before.T.groupby(lambda name: _NUMBER.sub("", name))
    for family, members in families:
        if len(members) > 1:
            best = str(members.mean(axis=1).idxmax())
            named[best] = f"{best}, tuned among {family}*"
    return {named[str(name)]: measured[name].to_numpy() for name in measured.columns}


def _number(method: str) -> int:
    number = _NUMBER.search(method)
    return int(number.group()) if number else 0
