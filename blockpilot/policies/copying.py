"""Copy where the text repeats, else draft: a source per cycle by two lines.

The longest ending of the text that occurred before tells what may follow. If it is long enough, its
continuation is verified and the drafter is not asked; else the drafter's tree is.
"""

from __future__ import annotations

import torch

from blockpilot.base.errors import UserError
from blockpilot.decoding.protocols import Drafter, TargetModel
from blockpilot.decoding.text import IndexedText
from blockpilot.decoding.types import Block, Draft, Verdict, View
from blockpilot.policies.tree import TreePolicy

_LONGEST_ENDING = 8  # tokens of an ending that are compared


class CopyPolicy:
    """Verifies a copy of `length` tokens behind an ending of `min_match` tokens or more that
    occurred before.

    Elsewhere it verifies the best tree of `nodes` tokens of the drafter's block, or, of a drafter
    without per-slot marginals, its whole draft; without a drafter it decodes plainly.
    """

    name = "copy"
    speculates = True
    block_mode = "draft"
    reads_clock = False
    tree = True

    def __init__(self, *, min_match: int, length: int, nodes: int) -> None:
        for name, value in (("length", length), ("nodes", nodes)):
            if value < 1:
                raise UserError(f"policy.{name}={value}: allowed are numbers >= 1")
        if not 1 <= min_match <= _LONGEST_ENDING:
            raise UserError(f"policy.min_match={min_match}: allowed are 1 to {_LONGEST_ENDING}")
        self.min_match, self.longest_copy, self.nodes = min_match, length, nodes
        self.fingerprint: str | None = f"{min_match},{length},{nodes}"
        self.block_size: int | None = max(length, nodes) + 1

    def bind(self, target: TargetModel, drafter: Drafter) -> None:
        """The tree, where the drafter has marginals; else its own block."""
        trained = drafter.trained_block_size or 1
        self._trees: TreePolicy | None = None
        self._drafted = Block(trained, trained)
        self.candidates = 0
        if drafter.has_marginals:
            self._trees = TreePolicy(nodes=self.nodes, cost=None, fit=None, online=False)
            self._trees.bind(target, drafter)
            self.candidates = self._trees.candidates
        self.widest = max(self.longest_copy, self.nodes, trained) + 1

    def start(self, view: View) -> None:
        """Index the prompt and the first token."""
        self._text = IndexedText(_LONGEST_ENDING, view.prompt_ids.tolist())
        self._text.extend(view.anchor.tolist())
        if self._trees is not None:
            self._trees.start(view)

    def block(self, view: View) -> Block:
        """No draft where a copy is verified."""
        self._match = self._text.match()
        self._copies = self._match.length >= self.min_match
        if self._copies:
            return Block(1, self.longest_copy + 1)
        return self._drafted

    def next(self, draft: Draft, view: View) -> Draft:
        """The copy, or a tree of what was drafted."""
        if not self._copies:
            return draft if self._trees is None else self._trees.next(draft, view)
        copy = self._text.at(self._match.places[-1], self.longest_copy)
        tokens = torch.tensor(copy.tokens, device=view.anchor.device)
        return Draft(tokens, origins=copy.origins)

    def observe(self, verdict: Verdict) -> None:
        """The text grows."""
        self._text.extend(verdict.tokens)

    def replay_blocks(self) -> list[Block]:
        return []
