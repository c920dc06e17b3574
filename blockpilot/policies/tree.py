"""Trees from the marginals of one drafted block: DDTree (arXiv 2604.12989), CaDDTree (2606.01813)
and BASTION (2605.29727).

A block drafter gives every slot a distribution of its own. A node is a choice of tokens for the
first d slots and scores the product of their probabilities; best-first by score gives, for every
number of nodes, the prefix-closed tree with the largest expected number of accepted tokens. How
many nodes pay depends on what verifying them costs. With a path head a slot's distribution depends
on the token before, and so does the order of a node's children; the search is the same.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import accumulate

import torch

from blockpilot.base.errors import UserError
from blockpilot.costs.curve import cost_settings, load_cost
from blockpilot.costs.fits import OnlineCost, Roofline, Shapes, most_per_second
from blockpilot.decoding.protocols import Drafter, TargetModel
from blockpilot.decoding.types import Block, Candidates, Draft, Verdict, View

FITS = ("measured", "roofline")
_CANDIDATES = 128  # of a slot, at most: BASTION's
_LEAST_POINTS = 4  # a roofline has four terms

Node = tuple[int, int, int]  # slot, rank among its candidates, parent
After = Sequence[Sequence[Sequence[float]]]


class TreePolicy:
    """Verifies a tree of proposed tokens from the trained block.

    Without `cost` it has `nodes` tokens, the anchor not counted (DDTree). With `cost`, the file of
    a curve with trees measured on this pair and machine, it has at most that many: as many as
    promise the most tokens per second. `fit` says how the curve is read: as `measured` (CaDDTree)
    or as a `roofline` (BASTION). With `online` it is corrected by the seconds that the run's own
    cycles take. With `nodes` = B - 1 it is not plain DFlash: the best tree may branch.
    """

    name = "tree"
    speculates = True
    tree = True

    def __init__(self, *, nodes: int, cost: str | None, fit: str | None, online: bool) -> None:
        if nodes < 1:
            raise UserError(f"policy.nodes={nodes}: allowed are numbers >= 1")
        if (cost is None) != (fit is None) or fit not in (None, *FITS):
            raise UserError(
                f"policy.cost={cost}, policy.fit={fit}: give both or neither, fit is "
                f"{' or '.join(FITS)}"
            )
        if online and cost is None:
            raise UserError("policy.online=true: it corrects a curve, give policy.cost")
        self.nodes, self.cost, self.fit = nodes, cost, fit
        # A tree of n nodes holds at most n tokens of a slot.
        self.candidates = min(nodes, _CANDIDATES)
        self.reads_clock = online
        self.block_size: int | None = nodes + 1
        self.block_mode = "draft"

    def bind(self, target: TargetModel, drafter: Drafter) -> None:
        """Refuse a drafter without per-slot marginals, and a curve of another pair or machine or
        without trees of `nodes` tokens or with too few to fit (UserError).
        """
        if not drafter.has_marginals or drafter.trained_block_size is None:
            raise UserError(f"policy {self.name}: drafter {drafter.name} has no slot marginals")
        self.block_of = Block(drafter.trained_block_size, drafter.trained_block_size)
        self.widest = max(self.nodes + 1, drafter.trained_block_size)
        self.fingerprint: str | None = None
        self._online = OnlineCost() if self.reads_clock else None
        if self.cost is not None:
            curve = load_cost(self.cost, cost_settings(target, drafter))
            online = "-online" if self.reads_clock else ""
            self.fingerprint = f"{self.fit}-{curve.digest()}{online}"
            curve.tree_seconds(2, 1), curve.tree_seconds(self.nodes + 1, 1)
            self._curve = curve
            if self.fit == "roofline":
                trees = [point for point in curve.points if point.kind == "tree"]
                if len(trees) < _LEAST_POINTS:
                    raise UserError(
                        f"cost={self.cost}: fit=roofline needs {_LEAST_POINTS} points of trees or "
                        f"more, the curve holds {len(trees)}"
                    )
                self._roofline = Roofline.fit(Shapes.of(target.config), trees)

    def _costs(self, context: int) -> Sequence[float]:
        """Seconds of a cycle with 1..nodes tokens behind a context; empty for a fixed number."""
        positions = range(2, self.nodes + 2)
        if self.cost is None:
            return []
        if self.fit == "roofline":
            return [self._roofline.seconds(s, context) for s in positions]
        return [self._curve.tree_seconds(s, context) for s in positions]

    def start(self, view: View) -> None:
        """The costs of this prompt's cycles, taken at its length."""
        self._seconds = self._costs(len(view.prompt_ids))

    def block(self, view: View) -> Block:
        """The trained block; learns on the way what an earlier cycle took."""
        if self._online is not None and view.timed is not None:
            positions, seconds = view.timed
            self._online.learn(positions, seconds, self._seconds[positions - 2])
        return self.block_of

    def next(self, draft: Draft, view: View) -> Draft:
        """The best tree of the block's candidates; one host sync for them."""
        best = draft.candidates(self.candidates)
        return tree_draft(self._grown(best, self._seconds), best, view.anchor.device)

    def observe(self, verdict: Verdict) -> None:
        """Every tree is grown on its own."""

    def replay_blocks(self) -> list[Block]:
        return []

    def _grown(self, best: Candidates, seconds: Sequence[float]) -> list[Node]:
        tree = best_first(best.logprobs, self.nodes, best.after)
        if self._online is not None:
            seconds = self._online.seconds(seconds[: len(tree)])
        if not seconds:
            return tree
        return tree[: paying_nodes(tree, best.logprobs, seconds, best.after)]


def tree_draft(tree: Sequence[Node], best: Candidates, device: torch.device) -> Draft:
    """The tokens of a tree of a block's candidates."""
    tokens = [best.tokens[slot][rank] for slot, rank, _ in tree]
    return Draft(torch.tensor(tokens, device=device), parents=[parent for _, _, parent in tree])


def paying_nodes(
    tree: Sequence[Node],
    logprobs: Sequence[Sequence[float]],
    seconds: Sequence[float],
    after: After | None = None,
) -> int:
    """Leading nodes of a best-first tree that promise the most tokens per second.

    `seconds[n - 1]` is a cycle's cost with n nodes. Expected are the target's own token and the
    nodes' scores; `logprobs` and `after` are those that the tree was grown from.
    """
    scores = [1.0]
    for slot, rank, parent in tree:
        row = logprobs[slot] if after is None else after[slot][_rank_of(tree, parent)]
        scores.append(scores[parent] * math.exp(row[rank]))
    return most_per_second(list(accumulate(scores))[1:], seconds)


def best_first(
    logprobs: Sequence[Sequence[float]], n_nodes: int, after: After | None = None
) -> list[Node]:
    """(slot, rank, parent) of the best prefix-closed tree, in the order of falling scores.

    `logprobs` [S][R] are each slot's best candidates, best first; parents are node numbers, 0 the
    anchor. With `after` [S][R][R], as in `Candidates`, a node scores by the row of its parent, in
    whose order the children come. A node's first child and its next sibling are the only ones that
    can follow it next, so the heap holds at most two entries per node. Fewer nodes come back when
    the slots hold fewer.
    """
    ranked: dict[tuple[int, int], list[tuple[float, int]]] = {}

    def children(slot: int, before: int) -> list[tuple[float, int]]:
        """(log-probability, rank) of the tokens of a slot behind a rank before it, best first."""
        key = (slot, 0 if after is None else before)
        if key not in ranked:
            row = logprobs[slot] if after is None else after[slot][before]
            order = (
                range(len(row)) if after is None else sorted(range(len(row)), key=lambda r: -row[r])
            )
            ranked[key] = [(row[rank], rank) for rank in order]
        return ranked[key]

    # minus score, slot, place among the siblings, parent, parent's score
    heap = [(-children(0, 0)[0][0], 0, 0, 0, 0.0)]
    tree: list[Node] = []
    while heap and len(tree) < n_nodes:
        minus, slot, place, parent, above = heapq.heappop(heap)
        siblings = children(slot, _rank_of(tree, parent))
        rank = siblings[place][1]
        tree.append((slot, rank, parent))
        if slot + 1 < len(logprobs):
            child = -minus + children(slot + 1, rank)[0][0]
            heapq.heappush(heap, (-child, slot + 1, 0, len(tree), -minus))
        if place + 1 < len(siblings):
            sibling = above + siblings[place + 1][0]
            heapq.heappush(heap, (-sibling, slot, place + 1, parent, above))
    return tree


def _rank_of(tree: Sequence[Node], node: int) -> int:
    """The rank of a node among its slot's candidates, 0 for the anchor."""
    return tree[node - 1][1] if node else 0
