"""Pilot: every cycle takes the source and the size that promise the most tokens per second here.

A cycle decodes plainly, verifies a copy of what followed the same tokens before, or asks the
drafter and verifies a tree of its candidates, into which the copy is grafted. What each may accept
says a fitted `AcceptanceModel`; what it costs, a curve of this machine.

The choice weighs a cycle's expected tokens against its seconds at the rate r of tokens per second
that this answer has had so far, by the curve: it takes the largest (expected tokens) - r (seconds).
That, and not the largest ratio, is what the rate of a whole answer grows by (Dinkelbach, 1967).
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from blockpilot.base.errors import UserError
from blockpilot.base.hub import folder_of
from blockpilot.costs.curve import CostCurve, cost_settings, load_cost
from blockpilot.costs.measure import Cell
from blockpilot.decoding.protocols import Drafter, TargetModel
from blockpilot.decoding.text import Copy, IndexedText
from blockpilot.decoding.types import Block, Candidates, Draft, Origin, Verdict, View
from blockpilot.policies.calibration import calibrated
from blockpilot.predictor.acceptance import (
    AcceptanceModel,
    Situation,
    load_acceptance,
)

log = logging.getLogger(__name__)

NODES, LONGEST_COPY = 15, 32  # conf/policy/pilot.yaml has the same: it is fitted and scored so
SHIPPED = Path(__file__).parents[1] / "predictor" / "weights" / "smollm2-135m-pilot"
_LONGEST_ENDING = 8  # tokens of an ending that the index knows
_LONGEST_MATCH = 32  # tokens up to which a match is told from a longer one
_RANKS = 16  # candidates of a slot: what every replay keeps
_WIDEST = 8  # of a slot that a tree can hold
_USUAL = 8  # nodes of the tree that a draft is expected to end in
_FADING = 0.8  # of what is known of the past, per cycle
_HITS, _MISSES = 2.0, 1.0  # of copies, where nothing is known
_PRIOR_CYCLES = 8  # that the rate of an answer starts from


class PilotPolicy:
    """Chooses a source and a size for every cycle, by a fitted model and a measured curve.

    `path` is the folder or repository of a model that the stage `train` fitted; None: the one that
    ships. `cost` is a curve of this pair and machine with copies and, of a drafter with marginals,
    trees; None: the machine is calibrated. `nodes` and `longest_copy` bound what a cycle verifies
    besides the anchor.
    """

    name = "pilot"
    speculates = True
    block_mode = "draft"
    reads_clock = False

    def __init__(
        self, *, path: str | None, cost: str | None, nodes: int, longest_copy: int
    ) -> None:
        for name, value, least in (("nodes", nodes, 1), ("longest_copy", longest_copy, 0)):
            if value < least:
                raise UserError(f"policy.{name}={value}: allowed are numbers >= {least}")
        self.path, self.cost = path, cost
        self.nodes, self.longest_copy = nodes, longest_copy
        self.block_size: int | None = max(nodes, longest_copy) + 1

    def bind(self, target: TargetModel, drafter: Drafter) -> None:
        """Load the model and the curve, and check that they fit this pair and machine (UserError).

        A drafter without per-slot marginals drafts its own block or tree, of one size.
        """
        folder = SHIPPED if self.path is None else folder_of(f"policy {self.path}", self.path)
        model = load_acceptance(folder)
        warn_of_another_pair(model, target, drafter)
        self.ready(drafter.trained_block_size or 1, drafter.has_marginals, model)
        self.curve = self._costs(target, drafter)
        self.fingerprint: str | None = f"{model.digest()}-{self.curve.digest()}"

    def ready(self, trained_block_size: int, marginals: bool, model: AcceptanceModel) -> None:
        """Decide by this model for a drafter of this block; `curve` is still to be set."""
        self.model, self.tree = model, marginals
        self.candidates = _RANKS if marginals else 0
        self._drafted = Block(trained_block_size, trained_block_size)
        self.widest = max(self.nodes, self.longest_copy, trained_block_size) + 1

    def _costs(self, target: TargetModel, drafter: Drafter) -> CostCurve:
        """The curve that was given, or one of a calibration."""
        if self.cost is not None:
            return load_cost(self.cost, cost_settings(target, drafter))
        if not target.timed:
            raise UserError(
                "policy.cost=null: a replay calibrates nothing; give the curve that "
                "python -m blockpilot.cost wrote"
            )
        copies = sorted({min(n, self.longest_copy) for n in (1, 7, 15, self.longest_copy)} - {0})
        cells = [Cell(1, "chain"), *(Cell(n + 1, "copy") for n in copies)]
        if self.tree:
            trees = sorted({min(n, self.nodes) + 1 for n in (1, 3, 7, 11, self.nodes)})
            cells += [Cell(size, "tree") for size in trees]
        elif self._drafted.drafted > 1:
            cells.append(Cell(self._drafted.drafted, "chain"))
        return calibrated(target, drafter, cells)

    def start(self, view: View) -> None:
        """Index the prompt; the costs of this prompt's cycles, at its length."""
        self._text = IndexedText(_LONGEST_ENDING, view.prompt_ids.tolist())
        self._text.extend(view.anchor.tolist())
        curve, context = self.curve, len(view.prompt_ids)
        self._copy_s = [curve.copy_seconds(n + 1, context) for n in range(self.longest_copy + 1)]
        self._draft_s = [math.inf]  # by the number of tokens verified
        if self.tree:
            sizes = range(2, self.nodes + 2)
            self._draft_s += [curve.tree_seconds(size, context) for size in sizes]
        elif self._drafted.drafted > 1:
            self._draft_s += [curve.seconds(self._drafted.drafted, context)]
        self._usual = min(_USUAL, len(self._draft_s) - 1)
        self._past = Past(self.model.mean_drafted, view.temperature)
        choices = [(1.0, self._copy_s[0])]
        if self._usual:
            choices.append((1 + self.model.mean_drafted, self._draft_s[self._usual]))
        promised, seconds = max(choices, key=lambda choice: choice[0] / choice[1])
        self._tokens, self._seconds = _PRIOR_CYCLES * promised, _PRIOR_CYCLES * seconds

    @property
    def _rate(self) -> float:
        """Tokens per second of this answer so far, by the curve."""
        return self._tokens / self._seconds

    def block(self, view: View) -> Block:
        """A draft, where it is worth more than the best copy and than no proposal at all."""
        self._match()
        n_copied, worth = best_length(self._chances, self._copy_s, self._rate)
        draft_s = self._draft_s[self._usual]
        self._drafts = 1 + self.model.expected_draft(self.situation) - self._rate * draft_s > worth
        self._n_copied = n_copied
        return self._drafted if self._drafts else Block(1, n_copied + 1)

    def next(self, draft: Draft, view: View) -> Draft:
        """The copy, or the part that pays of the likeliest tree of drafted and copied tokens."""
        device = view.anchor.device
        if not self._drafts:
            tokens = torch.tensor(self._copy.tokens[: self._n_copied], device=device)
            return Draft(tokens, origins=self._copy.origins[: self._n_copied])
        if not self.tree:
            self._n_verified = 1
            return draft
        tree = self._paying(self._grown(draft.candidates(_RANKS)))
        return Draft(
            torch.tensor([node.token for node in tree], device=device),
            parents=[node.parent for node in tree],
            origins=[node.origin for node in tree],
        )

    def _paying(self, tree: Sequence[Node]) -> Sequence[Node]:
        """The leading nodes that are worth most."""
        expected = list(accumulate((node.chance for node in tree), initial=1.0))
        rate, seconds = self._rate, self._draft_s
        sizes = range(1, len(tree) + 1)
        self._n_verified = max(sizes, key=lambda n: expected[n] - rate * seconds[n])
        return tree[: self._n_verified]

    def _match(self) -> None:
        """What could be copied, and the situation of this cycle."""
        match = self._text.match()
        self._copy, length, agreed = Copy([], []), 0, False
        if match.length:
            place = match.places[-1]
            self._copy = self._text.at(place, self.longest_copy)
            length = self._text.agreement(place, _LONGEST_MATCH)
            tokens = self._text.tokens
            agreed = len(match.places) > 1 and tokens[match.places[-2]] == tokens[place]
        self.situation = Situation(
            match=length,
            several=len(match.places) > 1,
            agreed=agreed,
            quoted=bool(self._copy.origins) and self._copy.origins[0] is Origin.PROMPT,
            hits=self._past.hits,
            misses=self._past.misses,
            drafted=self._past.drafted,
            temperature=self._past.temperature,
        )
        self._chances = self.model.copy_chances(self.situation, len(self._copy.tokens))

    def _grown(self, best: Candidates) -> list[Node]:
        """The likeliest tree of at most `nodes` candidates and copied tokens, best first."""
        children = _Children(self.model, best, self._copy, self._chances)
        heap: list[tuple[float, int, int, int, Family, float]] = []
        tree: list[Node] = []

        def push(parent: int, family: Family, place: int, above: float) -> None:
            mine = children.of(family)
            if place < len(mine):
                heapq.heappush(
                    heap, (-above * mine[place].chance, len(heap), parent, place, family, above)
                )

        push(0, Family(0, True, 0), 0, 1.0)
        while heap and len(tree) < self.nodes:
            minus, _, parent, place, family, above = heapq.heappop(heap)
            child = children.of(family)[place]
            tree.append(Node(child.token, parent, -minus, child.origin))
            following = Family(family.slot + 1, family.along and child.copied, child.rank)
            push(len(tree), following, 0, -minus)
            push(parent, family, place + 1, above)
        return tree

    def observe(self, verdict: Verdict) -> None:
        """What this cycle says of copies and drafts, and of the rate."""
        tokens = verdict.tokens
        self._past.copied(self._copy.tokens, tokens)
        if self._drafts:
            self._past.accepted(len(tokens) - 1)
        n_verified = self._n_verified if self._drafts else self._n_copied
        self._seconds += (self._draft_s if self._drafts else self._copy_s)[n_verified]
        self._tokens += len(tokens)
        self._text.extend(tokens)

    def replay_blocks(self) -> list[Block]:
        return []


class Past:
    """How copies and drafts of an answer fared lately.

    A copy is judged in every cycle that could have taken one, also where it did not.
    """

    def __init__(self, drafted: float, temperature: float) -> None:
        self.hits, self.misses, self.drafted = _HITS, _MISSES, drafted
        self.temperature = temperature

    def copied(self, copy: Sequence[int], committed: Sequence[int]) -> None:
        """What a copy would have had right of the committed tokens."""
        pairs = list(zip(copy, committed, strict=False))
        right = next((n for n, (mine, own) in enumerate(pairs) if mine != own), len(pairs))
        if pairs:
            self.hits = _FADING * self.hits + (1 - _FADING) * _HITS + right
            self.misses = _FADING * self.misses + (1 - _FADING) * _MISSES + (right < len(pairs))

    def accepted(self, n_tokens: int) -> None:
        """What a draft had accepted."""
        self.drafted = _FADING * self.drafted + (1 - _FADING) * n_tokens


@dataclass(frozen=True)
class Node:
    """A node of a tree with the chance that the path to it is right."""

    token: int
    parent: int
    chance: float
    origin: Origin


class Family(NamedTuple):
    """What the chances of a node's children depend on."""

    slot: int  # theirs, 0 behind the anchor
    along: bool  # the path to them is the copy's
    rank: int  # of their parent among the candidates of its slot, which a path head reads


class _Child(NamedTuple):
    """A token behind a parent, with the chance that it follows where the parent is right."""

    token: int
    chance: float
    origin: Origin
    copied: bool
    rank: int


class _Children:
    """Tokens that may follow a node, likeliest first."""

    def __init__(
        self, model: AcceptanceModel, best: Candidates, copy: Copy, copy_chances: Sequence[float]
    ) -> None:
        self.model, self.best, self.copy, self.copy_chances = model, best, copy, copy_chances
        self._found: dict[Family, list[_Child]] = {}

    def of(self, family: Family) -> list[_Child]:
        """Children of a node."""
        if self.best.after is None:  # every parent has the same
            family = family._replace(rank=0)
        if family not in self._found:
            self._found[family] = sorted(self._made(family), key=lambda child: -child.chance)
        return self._found[family]

    def _made(self, family: Family) -> list[_Child]:
        slot = family.slot
        drafted: list[_Child] = []
        if slot < len(self.best.tokens) and family.rank >= 0:
            row = self.best.row(slot, family.rank)
            drafted = [
                _Child(token, math.exp(logprob), Origin.DRAFTER, False, rank)
                for rank, (token, logprob) in enumerate(
                    zip(self.best.tokens[slot], row, strict=True)
                )
            ]
            drafted = heapq.nlargest(_WIDEST, drafted, key=lambda child: child.chance)
        if not family.along or slot >= len(self.copy.tokens):
            return drafted
        copied, trust = self.copy.tokens[slot], self.copy_chances[slot]
        if not drafted:
            return [_Child(copied, trust, self.copy.origins[slot], True, -1)]
        if all(child.token != copied for child in drafted):
            drafted.append(_Child(copied, 0.0, self.copy.origins[slot], True, -1))
        merged = self.model.merged_chance
        return [
            child._replace(
                chance=merged(child.chance, child.token == copied, trust, slot),
                copied=child.token == copied,
            )
            for child in drafted
        ]


def warn_of_another_pair(model: AcceptanceModel, target: TargetModel, drafter: Drafter) -> None:
    """Say that a model was fitted to another pair: what it knows of texts and of a draft's own
    chances carries over, but not measured to be best.
    """
    for what, origin, current in (
        ("target", model.fitted_to.get("target"), target.name),
        ("drafter", model.fitted_to.get("drafter"), drafter.fingerprint),
    ):
        if origin != current:
            log.warning(
                "pilot: fitted to %s %s, this is %s (output is unaffected); fit one with "
                "python -m blockpilot.train runs=[...]",
                what,
                origin,
                current,
            )
            return


def best_length(
    chances: Sequence[float], seconds: Sequence[float], rate: float
) -> tuple[int, float]:
    """Copied tokens to verify, 0 for plain decoding, and what the cycle is worth: its expected
    tokens less its seconds at the rate.

    `chances` are those of each token, given the ones before; `seconds[n]` a cycle's with n tokens.
    """
    expected = reached = 1.0
    n_best, most = 0, expected - rate * seconds[0]
    for n, chance in enumerate(chances, start=1):
        reached *= chance
        expected += reached
        if (worth := expected - rate * seconds[n]) > most:
            n_best, most = n, worth
    return n_best, most
