"""What choosing a size per prompt buys, on prompts that no stage has seen, and what luck would.

Gains [P, m] are tau, or tokens per second, of P test prompts at m sizes; a method is the gain [P]
that it got on each. Everything is compared with one fixed size, chosen before, prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from rich.table import Table

from blockpilot import labels
from blockpilot.errors import UserError
from blockpilot.labels import Floats, Ints
from blockpilot.reporting import metrics
from blockpilot.reporting.metrics import bootstrap, mean, share
from blockpilot.reporting.tables import ALL_SETS, sweep_table

COMPARED_BY = ("set", "method", "block_size", "block_mode")
COMPARED = tuple(
    f"{name}{end}"
    for name in ("macro_tau", "speedup", "over_fixed", "drafting")
    for end in ("", "_low", "_high")
)
_DRAFTING = ("drafting", "drafting_low", "drafting_high")
_OVER_FIXED = ("over_fixed", "over_fixed_low", "over_fixed_high", "detectable")
_POWER = 1.96 + 0.84  # two-sided 5%, power 80%

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
    """One line per method: mean gain, what it adds to the fixed size's, how sure that is.

    `turns` [P] names the conversation and the turn of each example: seeds of a turn are averaged,
    then turns of a conversation, and intervals are over conversations. `fixed` is the index of the
    size that was best on the policy split, `choices` are the indices [P] that policies chose,
    `others` gains [P] of methods that choose no size. Columns: method, gain, difference with
    difference_low/high (95%, bootstrap over prompts, paired), detectable (the smallest difference
    that this many prompts show in four of five trials), recovered (share of the cross-fitted
    oracle's gain; NaN where that gains nothing), accuracy (share of examples for which a best
    size was chosen) and regret.
    """
    whole, n = gains.whole, len(gains.whole)
    rows = np.arange(n)
    best = labels.argmax_labels(whole)
    base = whole[:, fixed]

    def line(name: str, values: Floats, chosen: Ints | None = None) -> dict[str, float | str]:
        found = _line(name, _by_prompt(values, turns), _by_prompt(base, turns))
        if chosen is not None:
            found["accuracy"] = float((values == whole.max(axis=1)).mean())
            found["regret"] = float(_by_prompt(whole.max(axis=1) - values, turns).mean())
        return found

    crossed = _cross_fitted(gains, turns, fixed)
    lines = [line("best fixed", base, np.full(n, fixed))]
    for name, chosen in choices.items():
        lines.append(line(name, whole[rows, chosen], chosen))
        if crossed is not None and float(crossed["difference"]) > 0:
            lines[-1]["recovered"] = float(lines[-1]["difference"]) / float(crossed["difference"])
    lines.append(line("uniform random", whole.mean(axis=1)))
    lines += [] if crossed is None else [crossed]
    lines.append(line("oracle", whole[rows, best], best))
    lucky = labels.luck(whole, gains.first, gains.second)
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
    rows, of = np.arange(len(halved)), [turns[i] for i in halved.tolist()]
    crossed = np.mean(
        [on[rows, labels.argmax_labels(by)] for by, on in (halves, halves[::-1])], axis=0
    )
    base = (halves[0][:, fixed] + halves[1][:, fixed]) / 2
    return _line("cross-fitted oracle", _by_prompt(crossed, of), _by_prompt(base, of))


def _line(name: str, values: Floats, base: Floats) -> dict[str, float | str]:
    """A line from the gains of each prompt."""
    difference = values - base
    low, high = bootstrap(mean, difference)
    spread = float(difference.std(ddof=1)) if len(difference) > 1 else float("nan")
    return {
        "method": name,
        "gain": float(values.mean()),
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

    Those of `sweep_table` with over_fixed: the ratio of mean TPOTs, the fixed size's over the
    method's, with over_fixed_low/high (95%, bootstrap over prompts, paired); detectable, the
    smallest change of that ratio that this many prompts show in four of five trials; drafting with
    drafting_low/high and deciding, the shares of the decoding time that drafts and the policy took;
    verified, target positions per cycle. Raises like it, and where one name stands for two methods.
    """
    names_of = records.groupby("method")[["block_size", "block_mode"]].nunique().max(axis=1)
    for name in names_of.index[names_of > 1]:
        raise UserError(f"method {name} has rows of two sizes or modes; keep those of one")
    table = sweep_table(records, by_set=True)
    names = (*_OVER_FIXED, *_DRAFTING, "deciding", "verified")
    columns: dict[str, list[float]] = {name: [] for name in names}
    for line in table.to_dict("records"):
        within = records["prompt_set"].eq(line["set"]) | (line["set"] == ALL_SETS)
        chosen = records[within]
        pairs = metrics.pair_with(chosen[chosen["method"] == line["method"]], chosen, fixed)
        ratio, (low, high) = metrics.speedup(pairs)
        rows = chosen[(chosen["method"] == line["method"]) & (chosen["status"] == "ok")]
        cycles = int(rows["verified"].map(len).sum())
        spent = rows.groupby("prompt_id")[["draft_s", "policy_s", "decode_s"]].sum()
        draft, policy, whole = spent.to_numpy(dtype=np.float64).T
        shares = (float(share(draft, whole)), *bootstrap(share, draft, whole))
        for name, value in zip(_DRAFTING, shares, strict=True):
            columns[name].append(value)
        columns["deciding"].append(float(share(policy, whole)))
        columns["verified"].append(rows["verified"].map(sum).sum() / max(cycles, 1))
        base, own = metrics.paired_times(pairs, "decode_s")
        noise = base / own if len(own) > 1 else np.array([np.nan, np.nan])
        detectable = _POWER * float(noise.std(ddof=1)) / np.sqrt(len(noise))
        for name, value in zip(_OVER_FIXED, (ratio, low, high, detectable), strict=True):
            columns[name].append(value if line["method"] != fixed else float("nan"))
    return table.assign(**columns)


def narrow(table: pd.DataFrame) -> pd.DataFrame:
    """Of a `timed_table`, what its readers compare; the rest is in the file."""
    return table[[*COMPARED_BY, *COMPARED]]


def evaluation_table(lines: pd.DataFrame, title: str, unit: str) -> Table:
    """A frame of `evaluate` for the terminal."""
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    for header in (unit, "over best fixed, 95%", "detectable", "recovered", "accuracy", "regret"):
        table.add_column(header, justify="right")
    for line in lines.to_dict("records"):
        interval = f"{line['difference_low']:+.3f} to {line['difference_high']:+.3f}"
        shown = [f"{line['gain']:.3f}", f"{line['difference']:+.3f} ({interval})"]
        shown.append(f"{line['detectable']:.3f}")
        for name, form in (("recovered", ".0%"), ("accuracy", ".0%"), ("regret", ".3f")):
            shown.append("-" if np.isnan(line[name]) else format(line[name], form))
        if line["method"] == "best fixed":
            shown[1:3] = ["-", "-"]
        table.add_row(str(line["method"]), *shown)
    return table
