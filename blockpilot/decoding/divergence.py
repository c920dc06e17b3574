"""Where two outputs of the same prompt part, and how close the call was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.target import Target

EXACT_MARGIN = 1e-4
"""Largest margin that rounding explains in float32; a larger one is a defect."""


@dataclass(frozen=True)
class Divergence:
    """First new token (0-based) that differs, and by how much its score beat the other's."""

    index: int
    margin: float


@torch.inference_mode()
def divergence(
    target: Target,
    prompt_ids: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
    sampler: KeyedSampler,
) -> Divergence | None:
    """None for equal outputs; else the gap of the perturbed scores of the two tokens.

    An output that ends where the other goes on differs at its end, with margin infinity: no score
    explains it.
    """
    if list(plain) == list(other):
        return None
    pairs = zip(plain, other, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if index is None:
        return Divergence(min(len(plain), len(other)), float("inf"))
    ids = torch.tensor([*prompt_ids, *plain[:index]], device=target.device)
    target.capture(())
    logits = target.forward(ids, target.new_cache(len(ids)), n_logits=1).logits
    scores = sampler.scores(logits, torch.tensor([len(ids)], device=target.device))[0]
    return Divergence(index, abs(float(scores[plain[index]] - scores[other[index]])))
