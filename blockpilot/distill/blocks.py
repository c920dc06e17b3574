"""What one training step of a block drafter is made of: anchors, slot weights, the mask's id.

Letters: A anchors of one sequence, S = B - 1 predicted slots of a block of size B, T tokens of the
sequence, prompt included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.decoding.target import Target


def sample_anchors(
    prompt_length: int, n_tokens: int, n_anchors: int, generator: torch.Generator
) -> Tensor:
    """Distinct random anchors [A] in increasing order, A <= n_anchors.

    An anchor is a response token whose successor is known, so it lies in
    `prompt_length .. n_tokens - 2`; a response of one token has none.
    """
    candidates = n_tokens - 1 - prompt_length
    chosen = torch.randperm(max(candidates, 0), generator=generator)[:n_anchors]
    return prompt_length + chosen.sort().values


def decay_weights(n_slots: int, gamma: float) -> Tensor:
    """w_j = exp(-(j - 1) / gamma) for slots j = 1..S (DFlash, arXiv 2602.06036)."""
    return torch.exp(-torch.arange(n_slots) / gamma)


def dpace_weights(label_probability: Tensor, known: Tensor, smoothing: float = 0.5) -> Tensor:
    """D-PACE weights [A, S]: how much slot j matters for the accepted length, detached.

    With q~ = (1 - a) q + a for the drafter's probability q of the label and P_j the running product
    of q~, weight_j = sum of P_i over i >= j: with a = 0 the gradient of the expected accepted
    length with respect to log q_j.
    """
    smoothed = (1 - smoothing) * label_probability.detach() + smoothing
    reach = smoothed.cumprod(dim=-1) * known
    return reach.flip(-1).cumsum(-1).flip(-1) * known


def unused_id(target: Target) -> int:
    """The first row of the target's embedding that is no token's, fit for a mask.

    Looked up by id: where added tokens leave gaps, the number of tokens is the id of one. Raises
    UserError where every row is taken.
    """
    used = set(target.tokenizer.get_vocab().values())
    for token_id in range(target.embed_rows):
        if token_id not in used:
            return token_id
    raise UserError(
        f"recipe.mask_token_id: {target.name} has no embedding row past its tokenizer's "
        f"{len(used)} entries; name a token that never occurs in text"
    )
