"""Gains of policies that decide every cycle, from the rows that replays hold beside the sizes'."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from blockpilot.labels import Floats
from blockpilot.records.store import read_records
from blockpilot.records.tau import with_cycles

log = logging.getLogger(__name__)


_NUMBER = re.compile(r"\d+$")
_ANSWER = ["prompt_id", "turn", "seed", "repeat"]


def policy_gains(runs: Sequence[Path], base: Mapping[str, float], size: int) -> pd.DataFrame | None:
    """Gain of every policy in the runs, examples x methods; NaN where a method has no row.

    `base` maps examples (prompt ids, with `#turn` behind them for later turns) to the gain in
    tokens per second of the fixed block size `size`; a policy's is that, times the ratio of both
    methods' predicted times for the same answer. With an empty `base` the gain is tau. Averaged
    over seeds. None where the runs hold no policy, or no predicted times though they are needed.
    """
    rows = with_cycles(pd.concat([read_records(run) for run in runs], ignore_index=True))
    rows = rows[rows["n_cycles"] > 0]
    own = rows[rows["policy"] != "fixed"]
    if own.empty:
        return None
    own = own.assign(gain=own["tau"])
    if base:
        if own["predicted_decode_s"].isna().any():
            log.warning("no line for policies: sweep with cost=<curve> for their predicted times")
            return None
        fixed = rows[(rows["policy"] == "fixed") & (rows["block_size"] == size)]
        times = fixed.groupby(_ANSWER, as_index=False)["predicted_decode_s"].first()
        own = own.merge(times, on=_ANSWER, suffixes=("", "_fixed"))
        own["gain"] = own["predicted_decode_s_fixed"] / own["predicted_decode_s"]
    turns = own["turn"].map(lambda turn: f"#{turn}" if turn else "")
    own = own.assign(example=own["prompt_id"] + turns)
    gains = own.pivot_table(index="example", columns="method", values="gain", aggfunc="mean")
    return gains.mul(pd.Series(base), axis=0) if base else gains


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
    found = _NUMBER.search(method)
    return int(found.group()) if found else 0
