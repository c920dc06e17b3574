"""Probabilities of a slot's best tokens behind the token before, as a path head scores them.

Letters: S slots, K best tokens of a slot, J tokens before it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def within(logits: Tensor, bias: Tensor) -> Tensor:
    """Log-probabilities [..., J, K] float32 among K tokens with logits [..., K] of the drafter and
    a `bias` [..., J, K] behind each of J tokens."""
    return (logits.float()[..., None, :] + bias.float()).log_softmax(dim=-1)


def before_each(anchors: Tensor, tokens: Tensor) -> Tensor:
    """Tokens [..., S, K] that may stand before each slot: the anchor [...] before the first, then
    the best ones `tokens` [..., S, K] of the slot before."""
    first = anchors[..., None, None].expand_as(tokens[..., :1, :])
    return torch.cat([first, tokens[..., :-1, :]], dim=-2)


def greedy_chain(tokens: Tensor, within: Tensor) -> Tensor:
    """Tokens [..., S] of the chain whose every token is the best behind the one before.

    Of best tokens [..., S, K] with `within` [..., S, K, K]; on a GPU without a host sync.
    """
    best = within.argmax(dim=-1)  # [..., S, K]
    ranks = [best[..., 0, :1]]
    for slot in range(1, best.shape[-2]):
        ranks.append(best[..., slot, :].gather(-1, ranks[-1]))
    return tokens.gather(-1, torch.stack(ranks, dim=-2))[..., 0]
