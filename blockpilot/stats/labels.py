"""Labels that a predictor learns: which of m block sizes suits a prompt.

All work on gains [P, m]: tau, or tokens per second, of P prompts at m sizes in increasing order.
"""

from __future__ import annotations

import numpy as np

from blockpilot.stats.arrays import Floats, Ints


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
