"""Extension points of the decode loop: what a target, drafter and policy must offer.

Plug-ins depend on these, not on each other; the loop depends on these, not on plug-ins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PretrainedConfig

from blockpilot.decoding.cache import SlabCache
from blockpilot.decoding.target import LogitShape
from blockpilot.decoding.types import Block, Branches, Draft, Forward, Verdict, View

Choose = Callable[[Tensor, Tensor], Tensor]
"""(logits [n, V], positions [n]) -> tokens [n]; -1 where the logits are not finite."""


class TargetModel(Protocol):
    """The model whose output is wanted, one sequence at a time."""

    name: str
    config: PretrainedConfig
    device: torch.device
    dtype: torch.dtype
    embed_rows: int  # rows of the embedding: the vocabulary with its padding
    embedding_scale: float  # by which `embed` multiplies them
    engine: str
    timed: bool  # False where only tokens count: in a replay

    @property
    def fingerprint(self) -> str:
        """Changes with the weights."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., D] of ids [...]."""
        ...

    def logits(self, hidden: Tensor, shape: LogitShape | None = None) -> Tensor:
        """Logits [..., V] of LM-head inputs [..., D]; `shape` None: the target's own."""
        ...

    def forward(
        self, ids: Tensor, cache: SlabCache, n_logits: int, branches: Branches | None = None
    ) -> Forward:
        """Append ids [n] to the cache; logits of the last `n_logits` positions.

        With `branches` the ids are a tree behind the cache, else a chain.
        """
        ...


class Proposals(Protocol):
    """Drafts from many anchors of one known text, read slot by slot."""

    def logits(self, rows: Tensor, slot: int) -> Tensor:
        """Logits [n, V] of slot `slot` (0 is the first proposed) of the anchors `rows` [n]."""
        ...


@runtime_checkable
class PathProposals(Proposals, Protocol):
    """What proposals also offer whose tokens depend on the token before them."""

    anchors: Tensor  # [A] tokens
    n_scored: int  # best tokens of a slot among which the one before decides

    def bias(self, rows: Tensor, slot: int, before: Tensor, tokens: Tensor) -> Tensor:
        """What the logits of `tokens` [n, K] gain behind each token of `before` [n, J]: [n, J, K].

        Of slot `slot` of the anchors `rows` [n].
        """
        ...


class Drafter(Protocol):
    """Proposes tokens. One instance serves many prompts, one at a time."""

    name: str
    fingerprint: str | None  # changes with the weights and what else decides its drafts
    shape: str | None  # what the cost of a draft depends on; known once bound
    has_marginals: bool  # the logits of a draft are per-slot marginals
    trained_block_size: int | None
    feature_layers: tuple[int, ...]  # target layers whose outputs it reads

    def bind(self, target: TargetModel) -> None:
        """Load for this target, or refuse by name before anything is generated (UserError)."""
        ...

    def start(self, view: View, capacity: int) -> None:
        """A new prompt; no position will reach `capacity`."""
        ...

    def draft(self, view: View, n_slots: int) -> Draft:
        """Propose `n_slots - 1` tokens after the anchor."""
        ...

    def observe(self, verdict: Verdict) -> None:
        """What a cycle committed, whether or not it asked for a draft."""
        ...


@runtime_checkable
class Replayable(Protocol):
    """What a drafter also offers where its draft depends on committed tokens and features only."""

    def replay(
        self, ids: Tensor, features: Tensor | None, anchors: Tensor, n_slots: int
    ) -> Proposals:
        """Drafts of `n_slots` slots, two or more, behind anchors [A] of the text `ids` [T].

        `features` [T - 1, F] are the target's; a draft reads those before its anchor only. Needs
        `bind`, not `start`.
        """
        ...


@runtime_checkable
class Batchable(Protocol):
    """What a drafter also offers where it can be measured what drafts of many sequences take."""

    def batched(self, rows: int, context: int, widest: int) -> Callable[[int], Tensor]:
        """Drafts of `rows` sequences at once behind `context` made-up positions each.

        The function takes a number of slots, 2 to `widest`, and gives tokens [rows, n_slots - 1].
        Needs `bind`, not `start`.
        """
        ...


@runtime_checkable
class Adaptive(Protocol):
    """What a drafter also offers that may learn from the prompts of a stream, between them.

    It learns only once it is told to: what a calibration decodes is no stream.
    """

    @property
    def updates(self) -> int | None:
        """How often it has learnt; None where it never does."""
        ...

    def learn(self, saved: Mapping[str, Tensor] | None) -> None:
        """From now on learn from what is decoded, anew or as from a snapshot."""
        ...

    def snapshot(self) -> dict[str, Tensor]:
        """All that it learnt, on the CPU."""
        ...


class Policy(Protocol):
    """Picks the block: `block` before a draft, `next` after it, and `observe` after verifying."""

    name: str
    fingerprint: str | None  # of what was learnt, measured or set and decides; known once bound
    speculates: bool  # False where `start` chose to decode the whole prompt without drafts
    block_size: int | None  # most slots that a cycle verifies, anchor included; known once bound
    block_mode: str
    widest: int  # most slots that any of its blocks has, known once bound
    reads_clock: bool  # its choices depend on measured seconds
    tree: bool  # what it verifies may branch

    def bind(self, target: TargetModel, drafter: Drafter) -> None:
        """Load what it needs and check that it fits this target and bound drafter (UserError)."""
        ...

    def start(self, view: View) -> None:
        """A new prompt, with its prefill distribution in `view.prefill`."""
        ...

    def block(self, view: View) -> Block:
        """Slots of the coming cycle."""
        ...

    def next(self, draft: Draft, view: View) -> Draft:
        """What to verify: the draft, a part of it, a tree of its candidates, or something else."""
        ...

    def observe(self, verdict: Verdict) -> None:
        """What the cycle committed."""
        ...


@runtime_checkable
class ReplayablePolicy(Protocol):
    """What a policy also offers whose choices follow from what a replay keeps of an answer: the
    text, accepted lengths and, of each slot of the trained block, the best candidates.
    """

    candidates: int  # of each slot of the trained block that it reads; 0: none

    def replay_blocks(self) -> list[Block]:
        """Blocks whose drafts it cuts, as chains; known once bound."""
        ...
