"""Trees from the marginals of one drafted block: DDTree (arXiv 2604.12989).

A block drafter gives every slot a distribution of its own. A node is a choice of tokens for the
first d slots and scores the product of their probabilities; best-first by score gives, for every
number of nodes, the prefix-closed tree with the largest expected number of accepted tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import torch

from blockpilot.decoding.anchors import TOP, Answered, Replay
from blockpilot.decoding.protocols import Drafter, TargetModel
from blockpilot.decoding.types import Draft, Plan, Verdict, View
from blockpilot.errors import UserError


class TreePolicy:
    """Verifies a tree of `nodes` proposed tokens, the anchor not counted, from the trained block.

    One child per slot, `nodes` = B - 1, is not plain DFlash: the best tree of that size may branch.
    """

    name = "tree"
    reads_marginals = True

    def __init__(self, *, nodes: int) -> None:
        if nodes < 1:
            raise UserError(f"policy.nodes={nodes}: allowed are numbers >= 1")
        self.nodes = nodes
        self.block_size, self.block_mode = nodes + 1, "draft"

    def bind(self, target: TargetModel, drafter: Drafter) -> None:
        """Refuse a drafter without per-slot marginals (UserError)."""
        if not drafter.has_marginals or drafter.trained_block_size is None:
            raise UserError(f"policy {self.name}: drafter {drafter.name} has no slot marginals")
        self.block_plan = Plan(drafter.trained_block_size, drafter.trained_block_size)
        self.widest = max(self.nodes + 1, drafter.trained_block_size)

    def start(self, view: View) -> None:
        """Reads nothing of the prompt."""

    def plan(self, view: View) -> Plan:
        return self.block_plan

    def next(self, draft: Draft, view: View) -> Draft:
        """The best tree of the block's marginals; one host sync for its candidates.

        A tree uses as many candidates per slot as a replay keeps.
        """
        assert draft.logits is not None
        ranks = min(TOP, draft.logits.shape[-1])
        logits = draft.logits.float()
        top = logits.topk(ranks, dim=-1)
        logprobs = top.values - logits.logsumexp(dim=-1, keepdim=True)
        tree = best_first(logprobs.tolist(), self.nodes)
        index = torch.tensor(
            [slot * ranks + rank for slot, rank, _ in tree], device=draft.tokens.device
        )
        tokens = top.indices.flatten()[index]
        return Draft(tokens, parents=[parent for _, _, parent in tree])

    def observe(self, verdict: Verdict) -> None:
        """Learns nothing."""

    def replay_plans(self) -> list[Plan]:
        return []

    def replayed(self, known: Replay, answered: Answered) -> tuple[list[int], Plan]:
        """The tree of every anchor, from its marginals, against the tokens that follow it."""
        accepted: list[int] = []
        if known.marginals is not None:
            candidates = known.marginals.top_tokens.tolist()
            logprobs = known.marginals.top_logprobs.tolist()
            for anchor, slots in enumerate(candidates):
                following = answered.tokens[anchor + 1 :][: len(slots)]
                ranks = [
                    slot.index(token) if token in slot else -1
                    for token, slot in zip(following, slots, strict=False)
                ]
                accepted.append(accepted_by(best_first(logprobs[anchor], self.nodes), ranks))
        return accepted, replace(self.block_plan, verified=self.nodes + 1)


def best_first(logprobs: Sequence[Sequence[float]], n_nodes: int) -> list[tuple[int, int, int]]:
    """(slot, rank, parent) of the best prefix-closed tree, in the order of falling scores.

    `logprobs` [S][R] are each slot's best candidates, best first; parents are node numbers, 0 the
    anchor. A node's first child and its next sibling are the only ones that can follow it next, so
    the heap holds at most two entries per node. Fewer nodes come back when the slots hold fewer.
    """
    heap = [(-logprobs[0][0], 0, 0, 0, 0.0)]  # minus score, slot, rank, parent, parent's score
    tree: list[tuple[int, int, int]] = []
    while heap and len(tree) < n_nodes:
        minus, slot, rank, parent, above = heapq.heappop(heap)
        tree.append((slot, rank, parent))
        if slot + 1 < len(logprobs):
            child = -minus + logprobs[slot + 1][0]
            heapq.heappush(heap, (-child, slot + 1, 0, len(tree), -minus))
        if rank + 1 < len(logprobs[slot]):
            sibling = above + logprobs[slot][rank + 1]
            heapq.heappush(heap, (-sibling, slot, rank + 1, parent, above))
    return tree


def accepted_by(tree: Sequence[tuple[int, int, int]], ranks: Sequence[int]) -> int:
    """Leading tokens of a text that a tree holds; `ranks` [S] are theirs among each slot's
    candidates, -1 where a token is none of them.
    """
    children = {(parent, rank): node for node, (_, rank, parent) in enumerate(tree, start=1)}
    node = 0
    for n_accepted, rank in enumerate(ranks):
        if (node, rank) not in children:
            return n_accepted
        node = children[node, rank]
    return len(ranks)
