"""Fits an `AcceptanceModel` to what replays say would have been accepted.

Letters: n examples, f features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockpilot.predictor.acceptance import AcceptanceModel

Floats = NDArray[np.float64]

_RIDGE = 1.0  # as if one example said that a weight is 0
_ROUNDS = 30


@dataclass
class Outcomes:
    """Examples of the three functions: their features, and what came of them."""

    copy: list[tuple[list[float], bool]] = field(default_factory=list)
    draft: list[tuple[list[float], float]] = field(default_factory=list)
    node: list[tuple[list[float], bool]] = field(default_factory=list)

    def fit(self, fitted_to: dict[str, Any]) -> AcceptanceModel:
        """The model of these examples: two logistic regressions and one of least squares."""
        drafted = [value for _, value in self.draft]
        return AcceptanceModel(
            copy=logistic_regression(*_arrays(self.copy)),
            draft=least_squares(*_arrays(self.draft)),
            node=logistic_regression(*_arrays(self.node)),
            mean_drafted=float(np.mean(drafted)),
            fitted_to=fitted_to,
        )

    def shuffled(self, generator: np.random.Generator) -> Outcomes:
        """The same situations with each other's outcomes."""
        return Outcomes(*(_dealt(each, generator) for each in (self.copy, self.draft, self.node)))

    def __str__(self) -> str:
        sizes = len(self.copy), len(self.draft), len(self.node)
        return "{} copied tokens, {} drafts, {} candidates".format(*sizes)


def _dealt(examples: list[Any], generator: np.random.Generator) -> list[Any]:
    values = [examples[n][1] for n in generator.permutation(len(examples))]
    return [(features, value) for (features, _), value in zip(examples, values, strict=True)]


def _arrays(examples: Sequence[tuple[list[float], float | bool]]) -> tuple[Floats, Floats]:
    features, values = zip(*examples, strict=True)
    return np.array(features, dtype=float), np.array(values, dtype=float)


def logistic_regression(features: Floats, hits: Floats) -> list[float]:
    """Weights [f] of the likeliest logistic function of features [n, f], by Newton's method."""
    weights = np.zeros(features.shape[1])
    for _ in range(_ROUNDS):
        chance = 1 / (1 + np.exp(-features @ weights))
        gradient = features.T @ (chance - hits) + _RIDGE * weights
        curvature = (features * (chance * (1 - chance))[:, None]).T @ features
        step = np.linalg.solve(curvature + _RIDGE * np.eye(len(weights)), gradient)
        weights -= step
        if np.abs(step).max() < 1e-8:
            break
    return [float(weight) for weight in weights]


def least_squares(features: Floats, values: Floats) -> list[float]:
    """Weights [f] of the closest linear function of features [n, f]."""
    ridge = _RIDGE * np.eye(features.shape[1])
    weights = np.linalg.solve(features.T @ features + ridge, features.T @ values)
    return [float(weight) for weight in weights]
