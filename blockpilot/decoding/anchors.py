"""What a replay knows of every token of an answer, and the walk that turns it into cycles.

Letters: A anchors, S = B - 1 proposed slots, K top candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from blockpilot.decoding.types import Block, Trace

TOP = 16  # candidates that every replay keeps per slot; more where a policy reads more


@dataclass(frozen=True)
class Marginals:
    """What the drafter thought of each slot of its trained block, for policies trained offline."""

    rank: Tensor  # [A, S] int32: tokens it preferred to the answer's; -1 past the answer's end
    top_tokens: Tensor  # [A, S, K] int32
    top_logprobs: Tensor  # [A, S, K] float32; float16 once stored
    after: Tensor | None = None  # [A, S, H, H] of a path head's H candidates, as `Candidates.after`


@dataclass(frozen=True)
class KnownAnswer:
    """An answer that a policy did not decode itself."""

    prompt_ids: Sequence[int]
    tokens: list[int]
    stop_reason: str
    temperature: float
    prefill_logits: Tensor  # [V]
    prefill_hidden: Tensor  # [D]


@dataclass(frozen=True)
class Replay:
    """Drafts from all anchors of one answer; anchor a is the answer's token a."""

    # [A] int16 accepted proposals, censored at the answer's end; -1 where nothing was drafted
    accepted: dict[Block, Tensor]
    marginals: Marginals | None

    def trace(self, block: Block, tokens: list[int], stop_reason: str) -> Trace:
        """The trace that decoding with this block in every cycle would have left, without times."""
        committed = walk(self.accepted[block].tolist())
        n, nothing = len(committed), [0] * len(committed)
        return Trace(
            tokens=tokens,
            committed=committed,
            drafted=[block.drafted - 1 if block.verified > 1 else 0] * n,
            verified=[block.verified] * n,
            copied=nothing,
            quoted=nothing,
            repeated=nothing,
            stop_reason=stop_reason,
        )


def visited(accepted: Sequence[int]) -> list[int]:
    """Anchors at which the cycles of a walk begin."""
    committed = walk(accepted)
    return [0, *accumulate(committed)][: len(committed)]


def walk(accepted: Sequence[int]) -> list[int]:
    """Tokens committed per cycle, from the accepted proposals at every anchor.

    The commit, not the block, is cut at the answer's end. The mean over anchors is not tau: a walk
    jumps across the stretches in which much is accepted.
    """
    committed: list[int] = []
    place = 0
    while place < len(accepted):
        assert accepted[place] >= 0, "a replay without drafts at an anchor that this walk visits"
        step = min(accepted[place] + 1, len(accepted) - place)
        committed += [step]
        place += step
    return committed
