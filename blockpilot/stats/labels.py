"""Labels of block sizes, and how much of an oracle's gain is luck.

All work on gains [P, m]: tau, or tokens per second, of P prompts at m sizes in increasing order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def argmax_labels(gains: Floats) -> Ints:
    """Index [P] of the best size; ties go to the smaller one (BlockPilot, arXiv 2606.31315)."""
    return np.asarray(gains.argmax(axis=1))


def soft_labels(gains: Floats, sharpness: float) -> Floats:
    """Distribution [P, m] over sizes: softmax of the gains over the best fixed size's, divided by
    `sharpness` (in the gains' unit: at a tenth, a size worse by a tenth has 1/e of the weight).
    """
    scaled = (gains - gains.max(axis=1, keepdims=True)) / sharpness
    weights = np.exp(scaled)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def best_fixed(gains: Floats) -> int:
    """Index of the size with the highest mean; ties go to the smaller one."""
    return int(gains.mean(axis=0).argmax())


def oracle(gains: Floats) -> float:
    """Mean of each prompt's best: what hindsight would give."""
    return float(gains.max(axis=1).mean())


def cross_fitted(chosen_on: Floats, scored_on: Floats) -> float:
    """Mean gain when the size is chosen on one part of the evidence and scored on the other.

    Both parts take both roles. An oracle whose gain is luck falls back here to what a size chosen
    by noise gives, which is less than the best fixed one's.
    """
    scores = [
        scores[np.arange(len(scores)), argmax_labels(choice)].mean()
        for choice, scores in ((chosen_on, scored_on), (scored_on, chosen_on))
    ]
    return float(np.mean(scores))


def luck(gains: Floats, first: Floats, second: Floats) -> Floats:
    """Of each prompt [P], what an oracle would gain if all prompts preferred the same sizes.

    That is the best of prompt mean plus size mean plus noise. The noise of a gain from a whole
    answer is half of what the gains `first` and `second` from its halves differ by, as large as
    that prompt's and as alike at neighbouring sizes; it is added, and taken away, and both bests
    are averaged. An answer without halves (NaN) has none. Where nothing but noise tells prompts
    apart, the oracle's mean excess over this is zero.
    """
    fitted = gains.mean(axis=1, keepdims=True) + gains.mean(axis=0) - gains.mean()
    noise = (first - second) / 2
    if np.isfinite(noise).any():
        noise = noise - np.nanmean(noise, axis=0)  # how the later half differs in general
    noise = np.nan_to_num(noise)
    noise -= noise.mean(axis=1, keepdims=True)  # of all sizes alike: no reason to choose one
    return np.asarray(((fitted + noise).max(axis=1) + (fitted - noise).max(axis=1)) / 2)


@dataclass(frozen=True)
class LuckNull:
    """The oracle of prompts that all prefer the same sizes and differ by what the fit leaves."""

    mean: float
    std: float
    p_value: float  # share of draws whose oracle is at least the observed one


def luck_null(gains: Floats, *, draws: int = 2000, seed: int = 0) -> LuckNull:
    """`oracle` after the residuals of each size are permuted over prompts.

    It needs no halves, takes every preference for noise and forgets what neighbouring sizes share:
    a bound of `luck` from above, that can refute luck but no preference.
    Residuals are what prompt means and size means leave; removing those means shrinks them, so
    they are rescaled by sqrt(m / (m - 1) * n / (n - 1)), without which the null reads too low.
    """
    n, m = gains.shape
    fitted = gains.mean(axis=1, keepdims=True) + gains.mean(axis=0) - gains.mean()
    residuals = (gains - fitted) * np.sqrt(m / (m - 1) * n / (n - 1))
    generator = np.random.default_rng(seed)
    oracles = np.empty(draws)
    for draw in range(draws):
        oracles[draw] = oracle(fitted + generator.permuted(residuals, axis=0))
    p_value = (1 + (oracles >= oracle(gains)).sum()) / (1 + draws)
    return LuckNull(float(oracles.mean()), float(oracles.std()), float(p_value))


def hindsight_seconds(accepted: Ints, seconds: Floats) -> float:
    """Least time of an answer when every cycle may have a size of its own, known in advance.

    `accepted` [A, m] are the accepted lengths at each anchor of an answer for each size, `seconds`
    [m] what a cycle of that size costs: the shortest path over the anchors. With all costs 1 it
    counts the fewest cycles. No policy reaches it: it sees the answer.
    """
    n = len(accepted)
    left = np.zeros(n + 1)
    for anchor in range(n - 1, -1, -1):
        reached = np.minimum(anchor + accepted[anchor] + 1, n)
        left[anchor] = (seconds + left[reached]).min()
    return float(left[0])
