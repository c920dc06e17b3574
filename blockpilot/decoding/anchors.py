"""What a replay knows of every token of an answer, and the walk that turns it into cycles.

Letters: A anchors, S = B - 1 proposed slots, K top candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from blockpilot.decoding.types import Plan, Trace

TOP = 16  # candidates kept per slot


@dataclass(frozen=True)
class Marginals:
    """What the drafter thought of each slot of its trained block, for policies trained offline."""

    rank: Tensor  # [A, S] int32: tokens it preferred to the answer's; -1 past the answer's end
    top_tokens: Tensor  # [A, S, K] int32
    top_logprobs: Tensor  # [A, S, K] float32; float16 once stored


@dataclass(frozen=True)
class Answered:
    """What a policy may know of an answer that it did not decode itself."""

    tokens: list[int]
    n_prompt_tokens: int
    prefill_logits: Tensor  # [V]
    prefill_hidden: Tensor  # [D]


@dataclass(frozen=True)
class Replay:
    """Drafts from all anchors of one answer; anchor a is the answer's token a."""

    accepted: dict[Plan, Tensor]  # [A] int16 accepted proposals; censored at the answer's end
    marginals: Marginals | None

    def trace(self, plan: Plan, tokens: list[int], stop_reason: str) -> Trace:
        """The trace that decoding with this plan would have left, without times."""
        return replayed_trace(self.accepted[plan].tolist(), plan, tokens, stop_reason)


def replayed_trace(
    accepted: Sequence[int], plan: Plan, tokens: list[int], stop_reason: str
) -> Trace:
    """The trace of cycles that accept `accepted[a]` proposals at anchor a, without times."""
    committed = walk(accepted)
    n_cycles, proposed = len(committed), plan.drafted - 1 if plan.verified > 1 else 0
    return Trace(
        tokens=tokens,
        committed=committed,
        drafted=[proposed] * n_cycles,
        verified=[plan.verified] * n_cycles,
        stop_reason=stop_reason,
    )


def walk(accepted: Sequence[int]) -> list[int]:
    """Tokens committed per cycle, from the accepted proposals at every anchor.

    The commit, not the block, is cut at the answer's end. The mean over anchors is not tau: a walk
    jumps across the stretches in which much is accepted.
    """
    committed: list[int] = []
    place = 0
    while place < len(accepted):
        step = min(accepted[place] + 1, len(accepted) - place)
        committed += [step]
        place += step
    return committed
