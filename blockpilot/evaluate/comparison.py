"""What choosing a size per prompt buys, on prompts that no stage has seen, and what luck would.

Gains [P, m] are tau, or tokens per second, of P test prompts at m sizes; a method is the gain [P]
that it got on each. Everything is compared with one fixed size, chosen before, prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from blockpilot.base.errors import UserError
from blockpilot.records.schema import PLAIN
from blockpilot.stats.arrays import Floats, Ints
from blockpilot.stats.comparison import pair_with, token_times, with_partners
from blockpilot.stats.intervals import bootstrap, mean, share
from blockpilot.stats.labels import argmax_labels
from blockpilot.stats.luck import luck
from blockpilot.stats.oracles import cross_fitted
from blockpilot.sweep.tables import ALL_SETS, sweep_table

BEST_FIXED = "best fixed"
CROSS_FITTED = "cross-fitted oracle"
ABOUT_GAINS = (
    "baseline: the best fixed size of the policy split, on what the line is scored on: for the "
    "cross-fitted oracle halves of answers, else whole ones. difference: of the two, paired by "
    "prompt, with a 95% interval. detectable: the smallest difference that so many prompts show in "
    "four of five trials. recovered: the difference as a share of the cross-fitted oracle's. "
    "accuracy: prompts for which a best size was chosen. regret: what the best size of each prompt "
    "has more. By luck alone: the oracle of prompts that all prefer the same sizes and differ by "
    "the noise that the halves of each answer show."
)
ABOUT_TIMES = (
    "over best fixed: the best fixed size's TPOT over the method's, same prompts and session. "
    "drafting: share of the decoding time."
)

_POWER = 1.96 + 0.84  # two-sided 5%, power 80%
COMPARED = (  # of a timed table
    *("set", "method", "block_size", "block_mode", "prompts"),
    *("macro_tau", "macro_tau_low", "macro_tau_high", "tpot_ms", "plain_tpot_ms"),
    *("speedup", "speedup_low", "speedup_high"),
    *("over_fixed", "over_fixed_low", "over_fixed_high", "fixed_tpot_ms", "drafting"),
)
_FACTS = ("sizes", "features", "hidden", "depth", "label", "parameters")  # of a predictor
_SHOWN = {  # of an evaluation, and how
    "evaluation": "{}",
    "unit": "{}",
    "sizes": "{}",
    "prompt_set": "{}",
    "prompts": "{:.0f}",
    "method": "{}",
    "features": "{}",
    "hidden": "{:.0f}",
    "depth": "{:.0f}",
    "label": "{}",
    "parameters": "{:,.0f}",
    "gain": "{:.3f}",
    "baseline": "{:.3f}",
    "difference": "{:+.3f}",
    "detectable": "{:.3f}",
    "recovered": "{:.0%}",
    "accuracy": "{:.0%}",
    "regret": "{:.3f}",
}

EVALUATED = (  # columns that every evaluation has
    *("prompt_set", "prompts", "method", "unit", "fixed_size", "gain", "baseline"),
    *("difference", "difference_low", "difference_high", "detectable"),
)

Turns = Sequence[tuple[str, int]]
"""The conversation and the turn of each example."""


@dataclass(frozen=True)
class Gains:
    """Of the test examples: from whole answers and from each half of them, [P, m] each.

    An answer that a cycle covers has no halves: NaN.
    """

    whole: Floats
    first: Floats
    second: Floats


def evaluate(
    gains: Gains,
    turns: Turns,
    fixed: int,
    choices: Mapping[str, Ints],
    others: Mapping[str, Floats],
) -> pd.DataFrame:
    """One line per method: mean gain, what it adds to its baseline, how sure that is.

    `turns` [P] names the conversation and the turn of each example: seeds of a turn are averaged,
    then turns of a conversation, and intervals are over conversations. `fixed` is the index of the
    size that was best on the policy split, `choices` are the indices [P] that policies chose,
    `others` gains [P] of methods that choose no size. Columns: method, gain, baseline (what the
    fixed size gains on the same evidence), difference (gain - baseline) with
    difference_low/high (95%, bootstrap over prompts, paired), detectable (the smallest difference
    that this many prompts show in four of five trials), recovered (share of the cross-fitted
    oracle's gain; NaN where that gains nothing), accuracy (share of examples for which a best
    size was chosen) and regret.
    """
    whole, n = gains.whole, len(gains.whole)
    rows = np.arange(n)
    best = argmax_labels(whole)
    base = whole[:, fixed]

    def line(name: str, values: Floats, chosen: Ints | None = None) -> dict[str, float | str]:
        cells = _line(name, _by_prompt(values, turns), _by_prompt(base, turns))
        if chosen is not None:
            cells["accuracy"] = float((values == whole.max(axis=1)).mean())
            cells["regret"] = float(_by_prompt(whole.max(axis=1) - values, turns).mean())
        return cells

    crossed = _cross_fitted(gains, turns, fixed)
    lines = [line(BEST_FIXED, base, np.full(n, fixed))]
    for name, chosen in choices.items():
        lines.append(line(name, whole[rows, chosen], chosen))
        if crossed is not None and float(crossed["difference"]) > 0:
            lines[-1]["recovered"] = float(lines[-1]["difference"]) / float(crossed["difference"])
    lines.append(line("uniform random", whole.mean(axis=1)))
    lines += [] if crossed is None else [crossed]
    lines.append(line("oracle", whole[rows, best], best))
    lucky = luck(whole, gains.first, gains.second)
    lines.append(line("oracle, by luck alone", lucky))
    lines.append(line("oracle, less its luck", base + whole.max(axis=1) - lucky))
    lines += [line(name, values) for name, values in others.items()]
    return pd.DataFrame(lines)


def _by_prompt(values: Floats, turns: Turns) -> Floats:
    """The mean of each conversation's turns, a turn being the mean of its seeds."""
    examples = pd.Series(values, index=pd.MultiIndex.from_tuples(turns))
    means = examples.groupby(level=[0, 1], sort=False).mean()
    return np.asarray(means.groupby(level=0, sort=False).mean(), dtype=np.float64)


def _cross_fitted(gains: Gains, turns: Turns, fixed: int) -> dict[str, float | str] | None:
    """The oracle that chooses on one half of an answer and is scored on the other.

    Halves have taus of their own, so this line compares with the fixed size on halves.
    """
    halved = np.flatnonzero(np.isfinite(gains.first + gains.second).all(axis=1))
    if not len(halved):
        return None
    halves = gains.first[halved], gains.second[halved]
    halved_turns = [turns[i] for i in halved.tolist()]
    values = _by_prompt(cross_fitted(*halves), halved_turns)
    base = _by_prompt((halves[0][:, fixed] + halves[1][:, fixed]) / 2, halved_turns)
    return _line(CROSS_FITTED, values, base)


def _line(name: str, values: Floats, base: Floats) -> dict[str, float | str]:
    """A line from the gains of each prompt."""
    difference = values - base
    low, high = bootstrap(mean, difference)
    spread = float(difference.std(ddof=1)) if len(difference) > 1 else float("nan")
    return {
        "method": name,
        "gain": float(values.mean()),
        "baseline": float(base.mean()),
        "difference": float(difference.mean()),
        "difference_low": low,
        "difference_high": high,
        "detectable": _POWER * spread / np.sqrt(len(difference)),
        "recovered": float("nan"),
        "accuracy": float("nan"),
        "regret": float("nan"),
    }


def timed_table(records: pd.DataFrame, fixed: str) -> pd.DataFrame:
    """Lines of a timed sweep, per prompt set and pooled, each compared with the method `fixed`.

    Those of `sweep_table` over the answers that plain decoding and `fixed` both have, with
    over_fixed: the ratio fixed_tpot_ms / tpot_ms, where fixed_tpot_ms is the TPOT of `fixed` on the
    line's prompts, with over_fixed_low/high (95%, bootstrap over prompts, paired); best_fixed, the
    name of `fixed`; detectable, the smallest change of that ratio that this many prompts show in
    four of five trials; drafting with drafting_low/high and deciding, the shares of the decoding
    time that drafts and the policy took; verified, target positions per cycle. Raises like it, and
    where one name stands for two methods.
    """
    meanings = records.groupby("method")[["block_size", "block_mode"]].nunique().max(axis=1)
    for name in meanings.index[meanings > 1]:
        raise UserError(f"method {name} has rows of two sizes or modes; keep those of one")
    bases = [base for base in (PLAIN, fixed) if base in set(records["method"])]
    shared = with_partners(records, bases)
    table = sweep_table(shared, by_set=True)
    if dropped := records["prompt_id"].nunique() - shared["prompt_id"].nunique():
        reason = f"Left out, for lack of {' or '.join(bases)}: {dropped} of the prompts."
        table.attrs["caption"].append(reason)
    added = [_against(shared, line, fixed) for line in table.to_dict("records")]
    columns = {str(name): values for name, values in pd.DataFrame(added).items()}
    return table.assign(best_fixed=fixed, **columns)


def _against(records: pd.DataFrame, line: Mapping[Any, Any], fixed: str) -> dict[str, float]:
    """What `timed_table` adds to a line."""
    chosen = records[records["prompt_set"].eq(line["set"]) | (line["set"] == ALL_SETS)]
    rows = chosen[(chosen["method"] == line["method"]) & (chosen["status"] == "ok")]
    spent = rows.groupby("prompt_id")[["draft_s", "policy_s", "decode_s"]].sum()
    draft, policy, whole = spent.to_numpy(dtype=np.float64).T
    low, high = bootstrap(share, draft, whole)
    times = token_times(pair_with(rows, chosen, fixed))
    added = {
        "fixed_tpot_ms": 1e3 * times.base_s,
        "drafting": float(share(draft, whole)),
        "drafting_low": low,
        "drafting_high": high,
        "deciding": float(share(policy, whole)),
        "verified": rows["verified"].map(sum).sum() / max(int(rows["verified"].map(len).sum()), 1),
    }
    if line["method"] == fixed:
        return added
    low, high = times.interval()
    ratios = times.base / times.method
    spread = float(ratios.std(ddof=1)) if len(ratios) > 1 else float("nan")
    return added | {
        "over_fixed": times.ratio,
        "over_fixed_low": low,
        "over_fixed_high": high,
        "detectable": _POWER * spread / np.sqrt(max(len(ratios), 1)),
    }


def narrow(table: pd.DataFrame) -> pd.DataFrame:
    """Of a `timed_table`, what its readers compare; the rest is in the file."""
    return table[list(COMPARED)]


def evaluation_cells(lines: pd.DataFrame) -> pd.DataFrame:
    """Lines of `evaluate`, and what else is known of them, as text.

    Columns that are empty are left out, and facts that all predictors share (`shared_facts`).
    """
    units = lines["unit"].unique()
    cells: dict[str, list[str]] = {}
    for name, form in _SHOWN.items():
        if name not in lines or lines[name].isna().all():
            continue
        if name == "unit" and len(units) == 1:
            continue  # it heads the gains
        if name in _FACTS and lines[name].nunique() < 2:
            continue
        head = str(units[0]) if name == "gain" and len(units) == 1 else name
        cells[head] = ["-" if pd.isna(value) else form.format(value) for value in lines[name]]
        if name == "difference":
            names = ["difference", "difference_low", "difference_high"]
            rounded = lines[names].round(3) + 0.0  # no minus before a zero
            cells[head] = [
                f"{middle:+.3f} ({low:+.3f} to {high:+.3f})"
                for middle, low, high in rounded.itertuples(index=False)
            ]
    own = lines["method"].eq(BEST_FIXED)  # against itself an interval would pretend to be one
    cells["difference"] = [
        "-" if same else text for same, text in zip(own, cells["difference"], strict=True)
    ]
    return pd.DataFrame(cells)


def shared_facts(lines: pd.DataFrame) -> list[str]:
    """What all predictors of an evaluation have in common, in one sentence; none without them."""
    facts = [
        f"{name} {_SHOWN[name].format(lines[name].dropna().iloc[0])}"
        for name in _FACTS
        if name in lines and lines[name].nunique() == 1
    ]
    return [f"Predictors: {', '.join(facts)}."] if facts else []
