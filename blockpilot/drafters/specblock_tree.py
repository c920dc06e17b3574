"""How a SpecBlock tree grows: what each slot offers, where a block continues, which nodes are kept.

Numbers only, no network. A block is a greedy chain of K slots; slot k offers its best tokens behind
the chain's first k. A slot that offers two or more branches: behind every token that it offers, the
chain's own included, another block may begin. Behind the chain's end one may begin in any case but
that of an offer of none. Offers of two blocks that mean the same path are one node with the better
score (own reading, where the published description is silent).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FIRST_OFFERS = 10
"""What the first slot of a block offers, whatever its class."""
FIRST_FEWER = ((0.9, 3), (0.8, 5), (0.6, 8))
"""Fewer, from a probability of its best token on."""
OTHERS_MOST = ((0.95, 2), (0.85, 3))
"""At most so many tokens of another slot, from a probability of its best token on."""


def n_offered(slot: int, probability: float, by_class: int) -> int:
    """Tokens that a slot offers, from the probability of its best and what its class stands for."""
    if slot == 0:
        return next((n for least, n in FIRST_FEWER if probability >= least), FIRST_OFFERS)
    return min([by_class, *(most for least, most in OTHERS_MOST if probability >= least)])


@dataclass(frozen=True)
class Slot:
    """The best tokens of one slot, best first, and how many of them it offers."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    offered: int


@dataclass
class Node:
    """A proposed token; `score` is the sum of log-probabilities from the anchor to it."""

    token: int
    score: float
    parent: int


@dataclass(frozen=True)
class Ending:
    """A node behind which a block can begin, and the block and the slot that proposed it."""

    node: int
    block: int
    slot: int


class SpecBlockTree:
    """Nodes in the order of their making, so that parents come first; node 0 is the anchor."""

    def __init__(self) -> None:
        self.nodes = [Node(-1, 0.0, -1)]
        self._children: dict[tuple[int, int], int] = {}

    def scores(self, nodes: Sequence[int]) -> list[float]:
        """What nodes score so far."""
        return [self.nodes[node].score for node in nodes]

    def add(self, block: int, root: int, score: float, slots: Sequence[Slot]) -> list[Ending]:
        """The offers of a block behind a node that scores so much; where further ones may begin."""
        endings: list[Ending] = []
        for place, slot in enumerate(slots):
            offers = zip(slot.tokens, slot.logprobs, strict=True)
            made = [
                self._child(root, token, score + logprob)
                for token, logprob in list(offers)[: max(slot.offered, 1)]
            ]
            if slot.offered > 1 or (slot.offered == 1 and place == len(slots) - 1):
                endings += [Ending(node, block, place) for node in made]
            root, score = made[0], score + slot.logprobs[0]
        return endings

    def best(self, n: int) -> list[int]:
        """The `n` nodes with the best scores in the order of their making, or all there are.

        No node scores more than its parent, and of equal ones the earlier counts: so the parents of
        all of them are among them.
        """
        ranked = sorted(range(1, len(self.nodes)), key=lambda node: -self.nodes[node].score)
        return sorted(ranked[:n])

    def hopeful(self, endings: Sequence[Ending], n: int) -> list[Ending]:
        """Those behind which a node can still be among the best `n`: an exact saving."""
        kept = self.best(n)
        least = min(self.scores(kept)) if len(kept) == n else float("-inf")
        return [each for each in endings if self.nodes[each.node].score > least]

    def _child(self, parent: int, token: int, score: float) -> int:
        node = self._children.setdefault((parent, token), len(self.nodes))
        if node == len(self.nodes):
            self.nodes.append(Node(token, score, parent))
        self.nodes[node].score = max(self.nodes[node].score, score)
        return node
