"""What a cycle costs between and beside the measured points, for policies that weigh one more node.

A measured curve is read as it is, linear between its sizes. CaDDTree (arXiv 2606.01813) fits a
convex one to it, which stopping at the first loss needs; here all numbers of nodes are tried. On
simulated costs (roofs, stairs of 8 to 32 positions, concave, with a dip; noise of 0, 2 and 5%; 6 to
127 measured sizes; up to 63 and 127 nodes) the number chosen by the raw curve loses 1.2 and 1.3% of
the true best tokens per second, by a convex fit of the increments 1.9 and 2.4%, of the values, the
paper's, 4.2 and 4.8%: real kernels have stairs. Only a smooth curve measured at every size with 5%
noise is better read through the paper's fit (0.9 against 2.1%).

Letters: s positions of one forward, c context length.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from blockpilot.costs.curve import CostPoint

Floats = NDArray[np.float64]

_ROUNDS = 20
_SPLITS = 9  # quantiles at which the search for a roofline parts the points
_ROUNDING = 1e-12  # squared relative errors below it are equal
_WINDOW = 9  # latest cycles of a bucket that count
_LEAST = 3  # cycles from which a bucket is known: the median of three survives an outlier


@dataclass(frozen=True)
class Shapes:
    """What a target's forward computes and reads, counted from its configuration.

    A mixture of experts computes with `n_active` experts per position and reads those that some
    position wants: of E experts E (1 - (1 - n_active / E)^s), as if each position drew its own
    evenly. Floats: products pass the largest 64-bit integer for targets over 3e9 weights.
    """

    weights: float  # that every position uses: all but the experts, the LM head counted
    attention: float  # query width of all layers
    keys_values: float  # key and value width of all layers
    expert: float = 0.0  # weights of one expert, in all layers that have them
    n_experts: int = 0
    n_active: int = 0

    @classmethod
    def of(cls, config: Any) -> Shapes:
        """From a Hugging Face text configuration of a Llama-like decoder, dense or with experts."""
        width, layers = float(config.hidden_size), config.num_hidden_layers
        head = getattr(config, "head_dim", None) or width // config.num_attention_heads
        query, kv = config.num_attention_heads * head, config.num_key_value_heads * head
        n_experts = getattr(config, "num_experts", None) or 0
        n_active = config.num_experts_per_tok if n_experts else 0
        sparse = _sparse_layers(config) if n_experts else 0
        inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        return cls(
            weights=width * (layers * (2 * query + 2 * kv) + config.vocab_size)
            + width * 3 * config.intermediate_size * (layers - sparse)
            + width * n_experts * sparse,  # the routers
            attention=float(layers * query),
            keys_values=float(2 * layers * kv),
            expert=width * 3 * inner * sparse,
            n_experts=n_experts,
            n_active=n_active,
        )

    def flops(self, s: float, c: float) -> float:
        """Multiply-adds counted twice, of s positions behind c."""
        weights = self.weights + self.n_active * self.expert
        return 2.0 * s * weights + 4.0 * s * (c + s / 2) * self.attention

    def numbers(self, s: float, c: float) -> float:
        """Numbers read: the weights once, keys and values of context and new positions."""
        numbers = self.weights + self.keys_values * (c + s)
        if self.n_experts:
            wanted = 1 - (1 - self.n_active / self.n_experts) ** s  # share of the experts
            numbers += self.expert * self.n_experts * wanted
        return numbers


def _sparse_layers(config: Any) -> int:
    """Layers that have experts."""
    step, dense = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", [])
    layers = range(config.num_hidden_layers)
    return sum((layer + 1) % step == 0 and layer not in (dense or []) for layer in layers)


@dataclass(frozen=True)
class Roofline:
    """max(a_c FLOPs + b_c, a_m numbers + b_m), the form of BASTION (arXiv 2605.29727)."""

    shapes: Shapes
    compute: tuple[float, float]  # a_c, b_c
    memory: tuple[float, float]  # a_m, b_m

    @classmethod
    def fit(cls, shapes: Shapes, points: Sequence[CostPoint]) -> Roofline:
        """Least squares of the relative error; all terms >= 0.

        Alternates between assigning points to the bound that explains them and fitting lines, from
        many splits. Of all lines on the way those count that Schwarz's criterion likes best: a
        second line that explains no more than noise would mislead between the points.
        """
        flops = np.array([shapes.flops(p.block_size, p.context) for p in points])
        numbers = np.array([shapes.numbers(p.block_size, p.context) for p in points])
        seconds = np.array([p.cycle_s for p in points])
        candidates: list[tuple[float, Roofline]] = []  # score, least is best
        n = len(points)
        for by_compute in _splits(flops / numbers, flops, numbers, seconds):
            for _ in range(_ROUNDS):
                compute = _line(flops[by_compute], seconds[by_compute])
                memory = _line(numbers[~by_compute], seconds[~by_compute])
                computing = compute[0] * flops + compute[1]
                reading = memory[0] * numbers + memory[1]
                errors = np.maximum(computing, reading) / seconds - 1
                terms = np.count_nonzero([*compute, *memory])
                score = n * np.log(errors @ errors + _ROUNDING) + terms * np.log(n)
                candidates.append((float(score), cls(shapes, compute, memory)))
                if ((computing >= reading) == by_compute).all():
                    break
                by_compute = computing >= reading
        return min(candidates, key=lambda each: each[0])[1]

    def seconds(self, s: float, c: float) -> float:
        """Seconds of a cycle with s verified positions behind c."""
        computing = self.compute[0] * self.shapes.flops(s, c) + self.compute[1]
        return max(computing, self.memory[0] * self.shapes.numbers(s, c) + self.memory[1])


def _splits(*features: Floats) -> Iterator[NDArray[np.bool_]]:
    """Points above, and those below, several quantiles of each feature."""
    for feature in features:
        for bound in np.quantile(feature, np.linspace(0, 1, _SPLITS)):
            yield feature >= bound
            yield feature < bound


def _line(x: Floats, y: Floats) -> tuple[float, float]:
    """Slope and intercept >= 0 of least squares of the relative error; a constant where x does not
    vary, 0 without points.
    """
    if not len(x):
        return 0.0, 0.0
    largest = x.max()  # scaled by it, both columns are of one size; of equal ones the first counts
    (intercept, slope), _ = nnls(np.stack([1 / y, x / largest / y], axis=1), np.ones(len(y)))
    return float(slope / largest), float(intercept)


class OnlineCost:
    """Corrects predicted seconds of cycles by those that the cycles of a run took.

    Positions fall into buckets, each up to twice the one before: 2, 3-4, 5-8, ... A bucket's factor
    is the median of measured over predicted seconds of its latest cycles, so a lone slow cycle
    moves nothing and a changed machine is followed. A curve that is too high for a size would keep
    cycles from ever going there: until a bucket has been measured a few times it is the only
    choice.
    """

    def __init__(self) -> None:
        self._ratios: dict[int, deque[float]] = {}

    def learn(self, positions: int, seconds: float, predicted: float) -> None:
        """What a cycle of `positions` verified positions took, and should have taken."""
        ratios = self._ratios.setdefault(_bucket(positions), deque(maxlen=_WINDOW))
        ratios.append(seconds / predicted)

    def seconds(self, predicted: Sequence[float]) -> list[float]:
        """Corrected seconds of cycles with 1, 2, ... nodes; infinite for those that have to wait
        until another bucket is known.
        """
        buckets = [_bucket(positions) for positions in range(2, len(predicted) + 2)]
        unknown = [each for each in buckets if len(self._ratios.get(each, ())) < _LEAST]
        if unknown:
            factors = {each: 1.0 if each == unknown[0] else math.inf for each in buckets}
        else:
            factors = {each: median(self._ratios[each]) for each in dict.fromkeys(buckets)}
        return [known * factors[each] for known, each in zip(predicted, buckets, strict=True)]


def _bucket(positions: int) -> int:
    return (positions - 1).bit_length()


def most_per_second(tokens: Sequence[float], seconds: Sequence[float]) -> int:
    """The number n, from 1, with the largest tokens[n - 1] / seconds[n - 1]; the first of equals.

    All are tried: a measured cost need not be convex, which stopping at the first loss would take
    for granted. `seconds` may be longer.
    """
    rates = [mine / cost for mine, cost in zip(tokens, seconds, strict=False)]
    return 1 + rates.index(max(rates))
