"""Smooth forms of a measured cost, for policies that weigh one more node against its price.

Letters: s positions of one forward, c context length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockpilot.decoding.cost import CostPoint

Floats = NDArray[np.float64]

_ROUNDS = 20


def convex(costs: Sequence[float]) -> Floats:
    """The monotone convex sequence closest in slope to `costs` (CaDDTree, arXiv 2606.01813).

    Increments are pooled until they do not fall (pool adjacent violators); what is negative then
    becomes 0.
    """
    values = np.asarray(costs, dtype=np.float64)
    pools: list[tuple[float, int]] = []
    for step in np.diff(values):
        pools.append((float(step), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools[-2:]
            pools[-2:] = [((a * n + b * m) / (n + m), n + m)]
    steps = np.concatenate([[0.0], *(np.full(n, max(step, 0.0)) for step, n in pools)])
    return np.asarray(values[0] + steps.cumsum())


@dataclass(frozen=True)
class Shapes:
    """What a target's forward computes and reads, counted from its configuration."""

    weights: int  # of the layers and the LM head
    attention: int  # query width of all layers
    keys_values: int  # key and value width of all layers

    @classmethod
    def of(cls, config: Any) -> Shapes:
        """From a Hugging Face text configuration of a Llama-like decoder."""
        width, layers = config.hidden_size, config.num_hidden_layers
        head = getattr(config, "head_dim", None) or width // config.num_attention_heads
        query, kv = config.num_attention_heads * head, config.num_key_value_heads * head
        per_layer = width * (2 * query + 2 * kv + 3 * config.intermediate_size)
        weights = layers * per_layer + width * config.vocab_size
        return cls(weights, layers * query, 2 * layers * kv)

    def flops(self, s: float, c: float) -> float:
        """Multiply-adds counted twice, of s positions behind c."""
        return 2.0 * s * self.weights + 4.0 * s * (c + s / 2) * self.attention

    def numbers(self, s: float, c: float) -> float:
        """Numbers read: the weights once, keys and values of context and new positions."""
        return self.weights + self.keys_values * (c + s)


@dataclass(frozen=True)
class Roofline:
    """max(a_c FLOPs + b_c, a_m numbers + b_m), the form of BASTION (arXiv 2605.29727)."""

    shapes: Shapes
    compute: tuple[float, float]  # a_c, b_c
    memory: tuple[float, float]  # a_m, b_m

    @classmethod
    def fit(cls, shapes: Shapes, points: Sequence[CostPoint]) -> Roofline:
        """Least squares, each point counted for the bound that explains it; all terms >= 0.

        Alternates between assigning points and fitting lines, from the half with more positions
        counted as bound by compute.
        """
        flops = np.array([shapes.flops(p.block_size, p.context) for p in points])
        numbers = np.array([shapes.numbers(p.block_size, p.context) for p in points])
        seconds = np.array([p.cycle_s for p in points])
        by_compute = flops >= np.median(flops)
        for _ in range(_ROUNDS):
            compute = _line(flops[by_compute], seconds[by_compute])
            memory = _line(numbers[~by_compute], seconds[~by_compute])
            now = compute[0] * flops + compute[1] >= memory[0] * numbers + memory[1]
            if (now == by_compute).all() or now.all() or not now.any():
                break
            by_compute = now
        return cls(shapes, compute, memory)

    def seconds(self, s: float, c: float) -> float:
        """Seconds of a cycle with s verified positions behind c."""
        computing = self.compute[0] * self.shapes.flops(s, c) + self.compute[1]
        return max(computing, self.memory[0] * self.shapes.numbers(s, c) + self.memory[1])


def _line(x: Floats, y: Floats) -> tuple[float, float]:
    """Slope and intercept >= 0 of least squares; a constant where x does not vary."""
    if len(x) < 2 or np.ptp(x) == 0:
        return 0.0, float(y.mean()) if len(y) else 0.0
    slope, intercept = np.polyfit(x, y, 1)
    if slope < 0:
        return 0.0, float(y.mean())
    if intercept < 0:
        return float((x * y).sum() / (x * x).sum()), 0.0
    return float(slope), float(intercept)


def most_per_second(tokens: Sequence[float], seconds: Sequence[float]) -> int:
    """The number n, from 1, with the largest tokens[n - 1] / seconds[n - 1]; the first of equals.

    All are tried: a measured cost need not be convex, which stopping at the first loss would take
    for granted. `seconds` may be longer.
    """
    rates = [mine / cost for mine, cost in zip(tokens, seconds, strict=False)]
    return 1 + rates.index(max(rates))
