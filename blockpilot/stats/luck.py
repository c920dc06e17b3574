"""How much of an oracle's gain is luck: the best of several noisy numbers is too good.

Both work on gains [P, m]: tau, or tokens per second, of P prompts at m sizes in increasing order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blockpilot.stats.arrays import Floats
from blockpilot.stats.oracles import oracle


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
