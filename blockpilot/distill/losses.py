"""The loss of a drafter's slots: cross-entropy over candidate tokens, towards hard and soft labels.

Letters: n slots, R tokens of a response, D width, V vocabulary rows, K candidate tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from blockpilot.decoding.target import capped


@dataclass(frozen=True)
class Candidates:
    """Tokens that the loss is computed over in one step, with the LM head's rows."""

    weight: Tensor  # [K, D]
    offset: Tensor  # [K] log-correction of sampled tokens
    index: Tensor  # [V] of a token among the candidates
    cap: float | None  # that the target's logits are softly held under


class CandidateHead:
    """The softmax of the loss over the tokens that occur in responses and a sample of the others.

    Most of a vocabulary never occurs in the responses and the LM head is the largest matrix of the
    step. The sampled tokens stand for all the absent ones: their logits are raised by
    log(absent / sampled), which keeps the partition function unbiased. `n_sampled` None takes the
    whole vocabulary.
    """

    def __init__(
        self, head: Tensor, seen: Tensor, n_sampled: int | None, cap: float | None
    ) -> None:
        self.head, self.cap = head, cap  # [V, D]
        absent = torch.ones(head.shape[0], dtype=torch.bool)
        absent[seen] = False
        self.seen, self.absent = seen, absent.nonzero()[:, 0]
        self.n_sampled = n_sampled if n_sampled and n_sampled < len(self.absent) else None

    def draw(self, generator: torch.Generator) -> Candidates:
        """Candidates of one step."""
        device = self.head.device
        if self.n_sampled is None:
            everything = torch.arange(self.head.shape[0], device=device)
            return Candidates(self.head, torch.zeros(1, device=device), everything, self.cap)
        drawn = torch.randperm(len(self.absent), generator=generator)[: self.n_sampled]
        ids = torch.cat([self.seen, self.absent[drawn]]).to(device)
        offset = torch.zeros(len(ids), device=device)
        offset[len(self.seen) :] = math.log(len(self.absent) / self.n_sampled)
        index = torch.zeros(self.head.shape[0], dtype=torch.int64, device=device)
        index[ids] = torch.arange(len(ids), device=device)
        return Candidates(self.head[ids], offset, index, self.cap)


def soft_targets(
    head_inputs: Tensor, candidates: Candidates, rows: Tensor, cap: float | None
) -> tuple[Tensor, Tensor]:
    """What `cross_entropies` reads of the target's distribution p at each of R tokens.

    `head_inputs` [R, D] are those that chose the tokens of a response; `rows` W [K, D] and `cap`
    are those of the head that is to learn, the target's own or another. The cross-entropy towards p
    is logsumexp(z) - sum_v p_v z_v. With logits z = W h + o that sum is
    h . (sum_v p_v W_v) + sum_v p_v o_v: one row [R, D] and one number [R] say all of p. Under a cap
    the logits are no linear map, and p itself [R, K] is returned.
    """
    with torch.no_grad():
        logits = capped(F.linear(head_inputs, candidates.weight).float(), candidates.cap)
        probability = (logits + candidates.offset).softmax(dim=-1)
        offset = probability @ candidates.offset.expand(logits.shape[-1])
    if cap is not None:
        return probability, offset
    return probability.to(rows.dtype) @ rows, offset


def cross_entropies(
    hidden: Tensor,  # [n, D]
    weight: Tensor,  # [K, D]
    offset: Tensor,  # [K] or [1]
    labels: Tensor,  # [n]
    expected: Tensor,  # [n, D], under a cap [n, K]
    expected_offset: Tensor,  # [n]
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    """Cross-entropies [n] in float32 of LM-head inputs over K candidates: towards the labels, and
    towards the target's distribution, which `soft_targets` describes."""
    logits = capped(F.linear(hidden, weight).float(), cap)
    normalizer = (logits + offset).logsumexp(dim=-1)
    hard = normalizer - (logits + offset).gather(-1, labels[:, None])[:, 0]
    if cap is None:
        agreed = (hidden.float() * expected.float()).sum(dim=-1)
    else:
        agreed = (expected * logits).sum(dim=-1)
    return hard, normalizer - agreed - expected_offset
