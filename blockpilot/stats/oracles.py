"""One size for all prompts, and what choosing a size per prompt or per cycle could give at most.

All but the last work on gains [P, m]: tau, or tokens per second, of P prompts at m sizes in
increasing order.
"""

from __future__ import annotations

import numpy as np

from blockpilot.stats.arrays import Floats, Ints
from blockpilot.stats.labels import argmax_labels


def best_fixed(gains: Floats) -> int:
    """Index of the size with the highest mean; ties go to the smaller one."""
    return int(gains.mean(axis=0).argmax())


def oracle(gains: Floats) -> float:
    """Mean of each prompt's best: what hindsight would give."""
    return float(gains.max(axis=1).mean())


def cross_fitted(first: Floats, second: Floats) -> Floats:
    """Gain [P] of each prompt when its size is chosen on one half of the evidence and scored on the
    other; both halves [P, m] take both roles and the two gains are averaged.

    An oracle whose gain is luck falls back here to what a size chosen by noise gives, which is less
    than the best fixed one's.
    """
    prompts = np.arange(len(first))
    gains = first[prompts, argmax_labels(second)] + second[prompts, argmax_labels(first)]
    return np.asarray(gains / 2)


def hindsight_seconds(accepted: Ints, seconds: Floats) -> float:
    """Least time of an answer when every cycle may have a size of its own, known in advance.

    `accepted` [A, m] are the accepted lengths at each anchor of an answer for each size, `seconds`
    [m] what a cycle of that size costs: the shortest path over the anchors. With all costs 1 it
    counts the fewest cycles. No policy reaches it: it sees the answer.
    """
    n = len(accepted)
    remaining = np.zeros(n + 1)
    for anchor in range(n - 1, -1, -1):
        reached = np.minimum(anchor + accepted[anchor] + 1, n)
        remaining[anchor] = (seconds + remaining[reached]).min()
    return float(remaining[0])
