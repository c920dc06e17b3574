"""Values that travel through the decode loop.

Letters used for shapes: N proposed tokens, n target positions of one forward, V vocabulary rows,
F width of the concatenated target features, D hidden width of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

import torch
from torch import Tensor

BLOCK_MODES = ("draft", "verify")


@dataclass(frozen=True)
class Block:
    """Slots of one cycle, anchor included: how many are drafted and how many verified at most.

    `drafted == verified` is block mode `draft`; `drafted` = trained size with a smaller `verified`
    is block mode `verify`. With `drafted == 1` the drafter is not called: what is verified then is
    the policy's own, as copies from the text are, and `verified == 1` is plain decoding.
    """

    drafted: int
    verified: int


class Origin(IntEnum):
    """Where a proposed token comes from."""

    DRAFTER = 0
    PROMPT = 1  # copied from it
    ANSWER = 2  # copied from the text generated so far


@dataclass(frozen=True)
class Candidates:
    """Best tokens of every slot of a drafted block, best first: S slots, K candidates each.

    `after`, where the drafter has a path head, holds the log-probability of candidate k of slot s
    behind candidate j of slot s - 1; of slot 0 only row 0 counts, which is behind the anchor.
    """

    tokens: Sequence[Sequence[int]]  # [S][K]
    logprobs: Sequence[Sequence[float]]  # [S][K]
    after: Sequence[Sequence[Sequence[float]]] | None = None  # [S][K][K]

    def row(self, slot: int, before: int) -> Sequence[float]:
        """Log-probabilities [K] of a slot behind candidate `before` of the one before it."""
        if self.after is None:
            return self.logprobs[slot]
        return self.after[slot][before if slot else 0]

    def chain(self) -> list[tuple[int, float]]:
        """Rank and log-probability of each slot's token, the best behind the one before it."""
        found: list[tuple[int, float]] = []
        rank = 0
        for slot in range(len(self.tokens)):
            row = self.row(slot, rank)
            rank = max(range(len(row)), key=row.__getitem__)
            found.append((rank, row[rank]))
        return found


@dataclass(frozen=True)
class Shortlist:
    """What a path head says of the best K tokens of S slots: K and S as in `Candidates`."""

    tokens: Tensor  # [S, K] int64
    logits: Tensor  # [S, K] float32, the drafter's own
    within: Tensor  # [S, K, K] float32 log-probabilities among the K, as `Candidates.after`


@dataclass(frozen=True)
class Draft:
    """Proposed tokens: a chain, `tokens[j]` for position anchor + 1 + j, or a tree.

    In a tree node 0 is the anchor and node i the i-th token; `parents` come before their children.
    `logits` are the drafter's own, for policies that read its confidences or other candidates.
    """

    tokens: Tensor  # [N] int64, on the target's device
    logits: Tensor | None = None  # [N, V]
    parents: Sequence[int] | None = None  # [N] nodes; None: a chain
    origins: Sequence[Origin] | None = None  # [N]; None: all the drafter's
    known: Candidates | None = None  # of a replay, which keeps no logits
    shortlist: Shortlist | None = None  # of a path head; the tokens are then the chain along it

    def cut(self, n_tokens: int) -> Draft:
        """The first `n_tokens` proposals; of a tree they are one, parents come first."""
        return Draft(
            self.tokens[:n_tokens],
            None if self.logits is None else self.logits[:n_tokens],
            None if self.parents is None else self.parents[:n_tokens],
            None if self.origins is None else self.origins[:n_tokens],
        )

    def candidates(self, most: int) -> Candidates:
        """The best `most` tokens of every slot, or all there are; one host sync.

        Only of a draft with logits, in a replay as many as it kept, and with a path head those that
        it scored.
        """
        if self.known is not None:
            return self.known
        assert self.logits is not None
        logits = self.logits.float()
        if self.shortlist is not None:
            return _scored(self.shortlist, logits.logsumexp(dim=-1))
        top = logits.topk(min(most, logits.shape[-1]), dim=-1)
        logprobs = top.values - logits.logsumexp(dim=-1, keepdim=True)
        # float64 holds a token's number and a float32 exactly, so that both come in one transfer.
        tokens, scores = torch.stack([top.indices.double(), logprobs.double()]).tolist()
        return Candidates([[int(token) for token in slot] for slot in tokens], scores)


def _scored(found: Shortlist, normalizer: Tensor) -> Candidates:
    """Candidates of a shortlist, in one transfer: the K share what the drafter gave them of the
    whole vocabulary, whose logsumexp [S] is `normalizer`."""
    mass = found.logits.logsumexp(dim=-1) - normalizer
    after = found.within + mass[:, None, None]
    logprobs = found.logits - normalizer[:, None]
    parts = [found.tokens.double()[:, None], logprobs.double()[:, None], after.double()]
    slots = torch.cat(parts, dim=1).tolist()  # [S][2 + K][K]
    return Candidates(
        [[int(token) for token in slot[0]] for slot in slots],
        [slot[1] for slot in slots],
        [slot[2:] for slot in slots],
    )


@dataclass(frozen=True)
class Branches:
    """Shape of a tree in a forward of n new positions: positions follow depth, sight ancestry.

    Node 0 is the anchor; `parents` are those of nodes 1, 2, ... Raises ValueError for a parent that
    does not precede its child.
    """

    parents: Sequence[int]  # [n - 1]
    device: torch.device

    def __post_init__(self) -> None:
        for node, parent in enumerate(self.parents, start=1):
            if not 0 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}: parents come before children")

    @cached_property
    def depths(self) -> Tensor:
        """Depths [n] int64, 0 for the anchor."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return torch.tensor(depths, device=self.device)

    @cached_property
    def visible(self) -> Tensor:
        """[n, n] bool: the node of a row sees that of a column, an ancestor or itself."""
        visible = torch.eye(len(self.parents) + 1, dtype=torch.bool)
        for node, parent in enumerate(self.parents, start=1):
            visible[node] |= visible[parent]
        return visible.to(self.device)


@dataclass(frozen=True)
class Forward:
    """Result of one target forward. Its tensors are valid until the next forward of the target."""

    logits: Tensor  # [n, V] of the last n positions asked for
    features: Tensor | None  # [n_in, F] of every input position, None when no layer is captured
    hidden: Tensor  # [n, D] input of the LM head at the positions of `logits`


@dataclass(frozen=True)
class Verdict:
    """What one target forward decided.

    `tokens` are the committed tokens before any cut by the stop token or the budget: the accepted
    proposals and the target's own token after them, the next `anchor`. `features` belong to the
    old anchor and the accepted proposals, in order: exactly the positions that the caches keep.
    """

    tokens: list[int]
    anchor: Tensor  # [1] int64, the last of `tokens`, on the target's device
    features: Tensor | None  # [len(tokens), F]
    path: Sequence[int]  # [len(tokens) - 1] accepted nodes of the draft, from 1


@dataclass(frozen=True)
class View:
    """Read-only picture of the state that drafters and policies see.

    `anchor` stands at absolute position `position` (0-based); the target has features of all
    positions before it. `new_features` are those that became known since the previous cycle.
    `timed`, where the policy reads the clock, are the verified positions and the seconds of the
    latest cycle that the device is known to have finished: the one before the last.
    """

    prompt_ids: Tensor  # [P] int64
    anchor: Tensor  # [1] int64
    position: int
    new_features: Tensor | None  # [n, F]
    prefill: Forward
    temperature: float = 0.0  # of the sampler
    timed: tuple[int, float] | None = None


def source_of(n_drafted: int, n_verified: int) -> str:
    """Where a cycle's proposals come from: draft, copy, or plain where there are none."""
    if n_drafted:
        return "draft"
    return "copy" if n_verified > 1 else "plain"


@dataclass
class Trace:
    """What decoding one prompt with one method produced; times in seconds.

    `sum(committed) + 1 == len(tokens)`, the one being the prefill's token; a prompt with budget 0
    has no tokens and no cycles. Per cycle: `drafted` counts the drafter's tokens, `verified` target
    positions, `copied` those of them that were copied from the text, and `quoted` and `repeated`
    the accepted copies: from the prompt and from the answer itself.
    """

    tokens: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)
    quoted: list[int] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)
    stop_reason: str = ""  # "stop" or "budget" once finished
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    start_s: float = 0.0  # of draft_s: the drafter's reading of the prompt
    verify_s: float = 0.0
    policy_s: float = 0.0
    other_s: float = 0.0
    cycle_s: list[float] | None = None  # where the policy reads them
    prefill_logits: Tensor | None = None  # [V]
    prefill_hidden: Tensor | None = None  # [D]

    def count(self, n_drafted: int, draft: Draft, path: Sequence[int], committed: int) -> None:
        """Append a cycle: tokens of the drafter, what was verified, the accepted nodes and how many
        tokens were committed.
        """
        origins = draft.origins or [Origin.DRAFTER] * draft.tokens.shape[0]
        accepted = [origins[node - 1] for node in path[:committed]]
        self.committed.append(committed)
        self.drafted.append(n_drafted)
        self.verified.append(draft.tokens.shape[0] + 1)
        self.copied.append(sum(origin != Origin.DRAFTER for origin in origins))
        self.quoted.append(accepted.count(Origin.PROMPT))
        self.repeated.append(accepted.count(Origin.ANSWER))
