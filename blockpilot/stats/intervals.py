"""95% percentile bootstrap intervals over prompts, paired where two methods meet."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from blockpilot.stats.arrays import Floats

Interval = tuple[float, float]

NO_INTERVAL = (float("nan"), float("nan"))
_RESAMPLES = 2000
_TAIL = 0.025  # beyond each end
_SEED = 0  # the same numbers give the same interval


def bootstrap(statistic: Callable[..., Floats], *columns: Floats) -> Interval:
    """95% percentile interval of `statistic` over prompts drawn with replacement.

    columns: [P] each, drawn together, so they stay paired. `statistic` takes arrays [..., P] and
    reduces the last axis. With fewer than two prompts the interval is NaN.
    """
    n_prompts = len(columns[0])
    if n_prompts < 2:
        return NO_INTERVAL
    generator = np.random.default_rng(_SEED)
    drawn = generator.integers(n_prompts, size=(_RESAMPLES, n_prompts))  # [R, P]
    values = statistic(*(column[drawn] for column in columns))  # [R]
    low, high = np.quantile(values, [_TAIL, 1 - _TAIL])
    return float(low), float(high)


def mean(values: Floats) -> Floats:
    """Mean over the last axis, for `bootstrap`."""
    return np.asarray(values.mean(axis=-1))


def share(part: Floats, whole: Floats) -> Floats:
    """Ratio of the sums over the last axis, for `bootstrap`."""
    return np.asarray(part.sum(axis=-1) / whole.sum(axis=-1))
