"""Methods whose cycles are all of one kind and size, to measure what they cost."""

from __future__ import annotations

from collections.abc import Iterable

from blockpilot.costs.measure import Cell
from blockpilot.decoding.loop import Method
from blockpilot.decoding.protocols import Drafter, Policy, TargetModel
from blockpilot.decoding.target import Target
from blockpilot.decoding.types import Block, Draft, Verdict, View
from blockpilot.drafters.none import NoDrafter
from blockpilot.policies.tree import TreePolicy


class CellPolicy:
    """Verifies a chain of `size` positions in every cycle: drafted, or the anchor again and again,
    as a copy from the text would be.
    """

    name = "cell"
    fingerprint: str | None = None
    speculates = True
    block_mode = "draft"
    reads_clock = False
    tree = False

    def __init__(self, *, size: int, copied: bool) -> None:
        self.copied, self.widest = copied, size
        self.block_size: int | None = size

    def bind(self, target: TargetModel, drafter: Drafter) -> None:
        """Fits every pair."""

    def start(self, view: View) -> None:
        """Reads nothing of the prompt."""

    def block(self, view: View) -> Block:
        return Block(1 if self.copied else self.widest, self.widest)

    def next(self, draft: Draft, view: View) -> Draft:
        return Draft(view.anchor.repeat(self.widest - 1)) if self.copied else draft

    def observe(self, verdict: Verdict) -> None:
        """Nothing changes."""


def cell_methods(cells: Iterable[Cell], drafter: Drafter, target: Target) -> dict[Cell, Method]:
    """A method for each cell, bound; a chain of 1 is plain decoding, without a drafter."""
    methods = {}
    for cell in cells:
        policy: Policy = CellPolicy(size=cell.size, copied=cell.kind == "copy")
        if cell.kind == "tree":
            policy = TreePolicy(nodes=cell.size - 1, cost=None, fit=None, online=False)
        plain = cell == Cell(1, "chain")
        methods[cell] = Method(NoDrafter() if plain else drafter, policy).bind(target)
    return methods
