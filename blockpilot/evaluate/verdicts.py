"""What a table comes to: a line for each thing that it compares, from its figures alone.

No line is chosen by the test prompts it speaks of, unless it says so.
"""

from __future__ import annotations

import pandas as pd

from blockpilot.evaluate.comparison import CROSS_FITTED
from blockpilot.policies.blockpilot import BlockSizePolicy
from blockpilot.records.schema import PLAIN
from blockpilot.sweep.tables import ALL_SETS, names_of

_SPEEDS = {  # what a method is judged by: the first one that a table has
    "speedup": "by measured time",
    "predicted_speedup": "by predicted time",
    "macro_tau": "nothing was timed",
}


def of_evaluation(lines: pd.DataFrame) -> list[str]:
    """Each predictor against the policy split's best fixed size, by gain, over all test prompts.

    Where no predictor was scored: the cross-fitted oracle, which says what one could find.
    `lines` are those of the stage `evaluate`.
    """
    pooled = lines[lines["prompt_set"] == ALL_SETS]
    chosen = pooled[pooled["features"].notna()] if "features" in pooled else pooled.iloc[:0]
    subject, scored_on = "the learned size {}", ""
    if chosen.empty:
        chosen = pooled[pooled["method"] == CROSS_FITTED]
        subject, scored_on = "the {}", ", both on halves of answers"
    verdicts = []
    for line in chosen.to_dict("records"):
        names = ("difference", "difference_low", "difference_high", "detectable")
        share, low, high, detectable = (line[name] / line["baseline"] for name in names)
        unit = line["unit"]
        verdicts.append(
            f"{subject.format(line['method'])} gains {share:+.1%} {unit} "
            f"{_interval(low, high, '+.1%')} against block {line['fixed_size']}{scored_on}: "
            f"{_outcome(low, high, 0, f'more {unit}', f'less {unit}')} with "
            f"{_prompts(line['prompts'])}{_detectable(low, high, 0, detectable)}"
        )
    return verdicts


def of_timed(lines: pd.DataFrame) -> list[str]:
    """Each learned size against the best fixed one, by measured time; `lines` of `timed_table`."""
    pooled = lines[lines["set"].eq(ALL_SETS) & lines["policy"].eq(BlockSizePolicy.name)]
    verdicts = []
    for line in pooled.to_dict("records"):
        low, high = line["over_fixed_low"], line["over_fixed_high"]
        verdicts.append(
            f"the learned size {line['method']} is {line['over_fixed']:.2f} times as fast as "
            f"{line['best_fixed']} {_interval(low, high, '.2f')} by measured time: "
            f"{_outcome(low, high, 1, 'faster', 'slower')} with {_prompts(line['prompts'])}"
            f"{_detectable(low, high, 1, line['detectable'])}"
        )
    return verdicts


def of_sweep(lines: pd.DataFrame) -> list[str]:
    """The best method against plain decoding, or nothing where there is none beside it.

    By measured time, else by predicted time, else by tau; `lines` are those of `sweep_table`.
    """
    pooled = lines[lines["set"] == ALL_SETS] if "set" in lines else lines
    methods = pooled.assign(name=names_of(pooled))
    methods = methods[methods["method"].ne(PLAIN)]
    column = next((each for each in _SPEEDS if methods[each].notna().any()), None)
    if column is None:
        return []
    best = methods.sort_values(column, ascending=False, kind="stable").iloc[0]
    how = _SPEEDS[column]
    low, high, ratio = best[f"{column}_low"], best[f"{column}_high"], f"{best[column]:.2f}"
    name = f"{best['name']}, the best of {len(methods)} methods on these very prompts,"
    interval = _interval(low, high, ".2f")
    if column == "macro_tau":
        return [
            f"{name} commits {ratio} tokens per cycle {interval} where plain decoding commits 1, "
            f"with {_prompts(best['prompts'])}; {how}"
        ]
    return [
        f"{name} is {ratio} times as fast as plain decoding {interval} {how}: "
        f"{_outcome(low, high, 1, 'faster', 'slower')} with {_prompts(best['paired'])}"
    ]


def _interval(low: float, high: float, form: str) -> str:
    return "(no interval)" if low != low else f"({low:{form}} to {high:{form}}, 95%)"


def _outcome(low: float, high: float, equal: float, more: str, less: str) -> str:
    """What an interval shows; NaN, of a single prompt, shows nothing."""
    if low > equal:
        return more
    return less if high < equal else "no difference shown"


def _detectable(low: float, high: float, equal: float, detectable: float) -> str:
    """Beside a difference that is not shown: how large it would have to be."""
    return f" ({detectable:.1%} would show)" if low <= equal <= high else ""


def _prompts(count: int) -> str:
    return f"{count} prompt{'' if count == 1 else 's'}"
