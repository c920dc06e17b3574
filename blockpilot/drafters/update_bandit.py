"""Whether a drafter should learn from what it has just seen: numbers only, no network.

No formula of the published bandit is known; this is the reading used here. A stream of prompts has
a level, the mean over prompts of log(seconds per token): noise is a share of it, whatever the
machine. The newest WINDOW prompts are compared with all before them. What is *lost* is how far
their mean lies above, and nothing as long as that is within SIGMAS standard errors: on noise there
is nothing to win back. While something is lost, the level before stays as it was.

An arm is a kind of update; it wins back a share of what was lost, at most 1, measured over the
WINDOW prompts after it. Its upper confidence bound is that of UCB1 with the measured noise
instead of a range: mean + noise * sqrt(2 ln(1 + N) / n), for n of N updates, and 1 before the
first. An update by an arm is worth

    horizon * seconds per token now * (1 - exp(-bound * lost)) - its mean cost so far

seconds, with no cost known before its first. The best arm is chosen if it is worth more than 0,
else the arm `skip`. What a stream lacks from its beginning on is not seen: there is nothing to
compare it with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance
from typing import Any

WINDOW = 8
SIGMAS = 4.0


class UpdateBandit:
    """Chooses among arms from seconds and tokens of prompt after prompt.

    `horizon` is over how many tokens an update has to pay for itself.
    """

    def __init__(self, horizon: int, arms: Sequence[str]) -> None:
        self.horizon = horizon
        self.shares: dict[str, list[float]] = {arm: [] for arm in arms}  # won back
        self.costs: dict[str, list[float]] = {arm: [] for arm in arms}  # seconds
        self.before: list[float] = []  # levels of prompts
        self.newest: list[float] = []  # of the last ones
        self.tried: tuple[str, float, float] | None = None  # arm, level and loss at its update

    def seen(self, tokens: int, seconds: float) -> None:
        """A prompt was decoded after the latest update."""
        self.newest.append(math.log(seconds / tokens))
        if len(self.newest) > WINDOW:
            oldest = self.newest.pop(0)
            if not self.lost:
                self.before.append(oldest)
        if self.tried and len(self.newest) == WINDOW:
            arm, level, lost = self.tried
            self.shares[arm].append((level - fmean(self.newest)) / lost)
            self.tried = None

    def choose(self) -> str | None:
        """The arm to update by, or None: skip."""
        lost = self.lost
        if self.tried or not lost:
            return None
        now = math.exp(fmean(self.newest))
        worth = {
            arm: self.horizon * now * (1 - math.exp(-self.bound(arm, lost) * lost))
            - (fmean(costs) if costs else 0.0)
            for arm, costs in self.costs.items()
        }
        best = max(worth, key=worth.__getitem__)
        return best if worth[best] > 0 else None

    def updated(self, arm: str, seconds: float) -> None:
        """An update was made and took so long."""
        self.tried = arm, fmean(self.newest), self.lost
        self.costs[arm].append(seconds)
        self.newest = []

    @property
    def lost(self) -> float:
        """How far the newest prompts lie above those before, in logs; 0 within the noise."""
        if len(self.newest) < WINDOW or len(self.before) < 2 * WINDOW:
            return 0.0
        loss = fmean(self.newest) - fmean(self.before)
        error = math.sqrt(variance(self.before) * (1 / WINDOW + 1 / len(self.before)))
        return loss if loss > SIGMAS * error else 0.0

    def bound(self, arm: str, lost: float) -> float:
        """Upper confidence bound of the share that an arm wins back."""
        shares = self.shares[arm]
        if not shares:
            return 1.0
        noise = math.sqrt(2 * variance(self.before) / WINDOW) / lost
        made = sum(map(len, self.shares.values()))
        width = noise * math.sqrt(2 * math.log(1 + made) / len(shares))
        return min(1.0, fmean(shares) + width)

    def state(self) -> dict[str, Any]:
        """Everything but the horizon, as JSON values."""
        names = ("shares", "costs", "before", "newest", "tried")
        return {name: getattr(self, name) for name in names}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""
        self.shares, self.costs = dict(state["shares"]), dict(state["costs"])
        self.before, self.newest = list(state["before"]), list(state["newest"])
        self.tried = None if state["tried"] is None else tuple(state["tried"])
