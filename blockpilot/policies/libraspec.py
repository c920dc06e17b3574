"""LibraSpec (arXiv 2608.08721): cut each drafted block where the drafter stops being sure enough.

A block drafter cannot draft past its block before verifying, so here the rule is a truncation.
Letters: d drafted tokens, q_k the drafter's own probability of its k-th token, uncalibrated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from blockpilot.base.errors import UserError
from blockpilot.costs.curve import CostCurve, cost_settings, load_cost
from blockpilot.costs.fits import most_per_second
from blockpilot.decoding.protocols import Drafter, TargetModel
from blockpilot.decoding.types import Block, Draft, Verdict, View


class LibraSpecPolicy:
    """Verifies the first tokens of the trained block, as many as their confidences are worth.

    With `alpha` by the paper's practical rule; with `cost`, the file of a curve that was measured
    on this pair and machine, by the exact marginal rule. One of the two is given.
    """

    name = "libraspec"
    candidates = 1
    reads_clock = False
    speculates = True
    tree = False
    block_mode = "verify"

    def __init__(self, *, alpha: float | None, cost: str | None) -> None:
        if (alpha is None) == (cost is None):
            raise UserError(f"policy.alpha={alpha}, policy.cost={cost}: give one of the two")
        if alpha is not None and not alpha > 0:
            raise UserError(f"policy.alpha={alpha}: allowed are numbers > 0")
        self.alpha, self.cost = alpha, cost
        self.block_size: int | None = None

    def bind(self, target: TargetModel, drafter: Drafter) -> None:
        """Refuse a drafter without confidences, a curve of another pair or machine (UserError)."""
        trained = drafter.trained_block_size
        if not drafter.has_marginals or trained is None or trained < 2:
            raise UserError(f"policy {self.name}: drafter {drafter.name} has no slot marginals")
        self.block_of = Block(trained, trained)
        self.block_size = self.widest = trained
        self._curve: CostCurve | None = None
        self.fingerprint = f"alpha={self.alpha}"
        if self.cost is not None:
            self._curve = load_cost(self.cost, cost_settings(target, drafter))
            self.fingerprint = self._curve.digest()

    def start(self, view: View) -> None:
        """The costs of this prompt's cycles, taken at its length."""
        self._seconds = self._costs(len(view.prompt_ids))

    def _costs(self, context: int) -> list[float]:
        """Seconds of cycles that verify 1, 2, ... drafted tokens; none for the practical rule."""
        if self._curve is None:
            return []
        trained = self.block_of.drafted
        sizes = range(2, trained + 1)
        return [self._curve.cut_seconds(trained, size, context) for size in sizes]

    def block(self, view: View) -> Block:
        return self.block_of

    def next(self, draft: Draft, view: View) -> Draft:
        """The leading tokens that the rule keeps; one host sync for the confidences."""
        best = [math.exp(logprob) for _, logprob in draft.candidates(1).chain()]
        return draft.cut(self._kept(best, self._seconds))

    def _kept(self, confidences: Sequence[float], seconds: Sequence[float]) -> int:
        if self.alpha is not None:
            return practical_length(confidences, self.alpha)
        return exact_length(confidences, seconds)

    def observe(self, verdict: Verdict) -> None:
        """Every cycle is decided on its own."""

    def replay_blocks(self) -> list[Block]:
        return [self.block_of]


def practical_length(confidences: Sequence[float], alpha: float) -> int:
    """min over i of floor(i + alpha * sum_{j >= i} prod_{k = i..j} q_k), within 1..d."""
    d = len(confidences)
    limits = [
        math.floor(i + alpha * sum(accumulate(confidences[i - 1 :], mul))) for i in range(1, d + 1)
    ]
    return max(1, min(d, *limits))


def exact_length(confidences: Sequence[float], seconds: Sequence[float]) -> int:
    """Tokens to verify, at least one, for the most expected tokens per second.

    `seconds[n - 1]` is a cycle's cost with n verified tokens. Expected are the target's own token
    and the products of the confidences.
    """
    expected = list(accumulate(accumulate(confidences, mul), initial=1.0))
    return most_per_second(expected[1:], seconds)
