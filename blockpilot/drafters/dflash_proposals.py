"""Drafts of many blocks at once, read slot by slot, and what a path head says of a block.

Letters: A anchors, S drafting slots of a block, D width, V vocabulary, r width of a path's vectors,
n rows asked for, J tokens before a slot, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockpilot.decoding.paths import within
from blockpilot.decoding.types import Shortlist
from blockpilot.drafters.dflash_net import DFlashNetwork
from blockpilot.drafters.path_head import PathHead
from blockpilot.drafters.path_state import PathState


@dataclass(frozen=True)
class BlockProposals:
    """Drafts of many blocks; the LM head runs where it is asked to."""

    hidden: Tensor  # [A, S, D]
    head_logits: Callable[[Tensor], Tensor]  # [..., D] -> [..., rows of the LM head]
    network: DFlashNetwork

    def logits(self, rows: Tensor, slot: int) -> Tensor:
        """Logits [n, V] of one slot of the anchors `rows` [n]."""
        return self.network.over_vocabulary(self.head_logits(self.hidden[rows, slot]))


@dataclass(frozen=True)
class StateBlockProposals(BlockProposals):
    """Drafts of many blocks with the logits behind each one's greedy chain."""

    vectors: Tensor  # [A, S, r]

    def logits(self, rows: Tensor, slot: int) -> Tensor:
        """As of `BlockProposals`, with what the chain's tokens add."""
        path = self.network.path
        assert isinstance(path, PathState)
        logits = self.head_logits(self.hidden[rows, slot])
        return self.network.over_vocabulary(logits + self.vectors[rows, slot] @ path.output.T)


@dataclass(frozen=True)
class PathBlockProposals(BlockProposals):
    """Drafts of many blocks whose tokens a path head decides."""

    anchors: Tensor  # [A] tokens
    head: PathHead

    @property
    def n_scored(self) -> int:
        """Best tokens of a slot that the head scores."""
        return self.head.config.top_k

    def bias(self, rows: Tensor, slot: int, before: Tensor, tokens: Tensor) -> Tensor:
        """What the logits of `tokens` [n, K] gain behind each of `before` [n, J]: [n, J, K]."""
        found: Tensor = self.head(self.hidden[rows, slot], before, tokens)
        return torch.zeros_like(found) if slot == 0 and self.head.config.skips_first else found


def shortlist(head: PathHead, hidden: Tensor, logits: Tensor, anchors: Tensor) -> Shortlist:
    """What a head says of the best tokens of blocks with states [..., B - 1, D], logits
    [..., B - 1, V] and anchor tokens [...]."""
    top = logits.float().topk(min(head.config.top_k, logits.shape[-1]), dim=-1)
    bias = head.of_block(hidden, anchors, top.indices)
    return Shortlist(top.indices, top.values, within(top.values, bias))
