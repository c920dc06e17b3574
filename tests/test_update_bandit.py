"""When a drafter learns from what it sees, on streams whose speed is scripted."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable

import pytest

from blockpilot.drafters.update_bandit import WINDOW, UpdateBandit

ARMS = ("rank_head", "all")
COSTS = {"rank_head": 0.2, "all": 4.0}
TOKENS, NOISE = 100, 0.15  # tokens of a prompt; of its log seconds per token


class Stream:
    """Prompts of one kind take 20 ms a token; those after a change half as much again and more,
    until updates win a share of it back."""

    def __init__(self, change_at: int, shares: dict[str, float], seed: int) -> None:
        self.change_at, self.shares = change_at, shares
        self.draws, self.n, self.lost = random.Random(seed), 0, 0.5

    def next(self) -> tuple[int, float]:
        level = math.log(0.02) + (self.lost if self.n >= self.change_at else 0.0)
        self.n += 1
        return TOKENS, TOKENS * math.exp(level + self.draws.gauss(0, NOISE))

    def updated(self, arm: str) -> float:
        if self.n > self.change_at:
            self.lost *= 1 - self.shares[arm]
        return COSTS[arm]


def updates(bandit: UpdateBandit, stream: Stream, n_prompts: int) -> list[tuple[int, str]]:
    """Prompts before which an update was made, with its arm."""
    made = []
    for _ in range(n_prompts):
        if arm := bandit.choose():
            made.append((stream.n, arm))
            bandit.updated(arm, stream.updated(arm))
        bandit.seen(*stream.next())
    return made


def test_it_acts_on_no_noise() -> None:
    for seed in range(20):
        stream = Stream(10**9, {"rank_head": 0.0, "all": 0.0}, seed)
        assert updates(UpdateBandit(20_000, ARMS), stream, 300) == [], seed


def test_it_acts_soon_after_a_change_and_ends_with_it() -> None:
    for seed in range(20):
        bandit = UpdateBandit(20_000, ARMS)
        stream = Stream(60, {"rank_head": 0.05, "all": 0.5}, seed)
        made = updates(bandit, stream, 400)
        assert 60 < made[0][0] <= 60 + WINDOW, seed
        assert stream.lost < 0.3, "the arm that helps was found"
        assert made[-1][0] < 300, "what is left is within the noise"


def test_arms_that_win_nothing_back_are_given_up() -> None:
    for seed in range(10):
        bandit = UpdateBandit(2_000, ("all",))
        stream = Stream(60, {"all": 0.0}, seed)
        early, late = updates(bandit, stream, 400), updates(bandit, stream, 400)
        assert 1 <= len(early) < 20 < 340 / WINDOW
        assert len(late) < 5


@pytest.mark.parametrize(("horizon", "acts"), [(20_000, True), (200, False)])
def test_an_update_has_to_pay_for_itself(horizon: int, acts: bool) -> None:
    """What is lost, 0.033 * (1 - exp(-0.5)) s a token, is 2.6 s of a horizon of 200."""
    bandit = UpdateBandit(horizon, ("all",))
    bandit.costs["all"].append(4.0)
    stream = Stream(60, {"all": 0.5}, seed=3)
    assert bool(updates(bandit, stream, 200)) == acts


def test_its_numbers_by_hand() -> None:
    bandit = UpdateBandit(1000, ARMS)
    for n in range(2 * WINDOW):
        bandit.seen(1, math.exp(0.1 if n % 2 else -0.1))
    assert bandit.lost == 0
    for _ in range(WINDOW):
        bandit.seen(1, math.exp(1.0))
    assert bandit.before == pytest.approx([-0.1, 0.1] * WINDOW)
    assert bandit.newest == pytest.approx([1.0] * WINDOW)
    assert bandit.lost == pytest.approx(1.0)
    assert bandit.choose() == "rank_head", "the first of equals"
    bandit.updated("rank_head", 3.0)
    assert bandit.choose() is None, "its window comes first"
    for _ in range(WINDOW):
        bandit.seen(1, math.exp(0.75))
    assert bandit.shares == {"rank_head": [pytest.approx(0.25)], "all": []}
    noise = math.sqrt(2 * (0.16 / 15) / WINDOW) / bandit.lost
    bound = 0.25 + noise * math.sqrt(2 * math.log(2))
    assert bandit.bound("rank_head", bandit.lost) == pytest.approx(bound)
    assert bandit.bound("all", bandit.lost) == 1
    worth: Callable[[float], float] = lambda share: (  # noqa: E731
        1000 * math.exp(0.75) * (1 - math.exp(-share * 0.75))
    )
    assert bandit.choose() == "all"
    bandit.costs["all"] = [worth(1.0) - worth(bound) + 3 + 1]
    assert bandit.choose() == "rank_head"
    bandit.costs["rank_head"] = [worth(bound) + 1]
    bandit.costs["all"] = [worth(1.0) + 1]
    assert bandit.choose() is None


def test_it_continues_from_its_state() -> None:
    whole, parts = UpdateBandit(20_000, ARMS), UpdateBandit(20_000, ARMS)
    streams = [Stream(60, {"rank_head": 0.05, "all": 0.5}, seed=1) for _ in range(2)]
    made = updates(whole, streams[0], 200)
    begun = updates(parts, streams[1], 75)
    again = UpdateBandit(20_000, ARMS)
    again.restore(json.loads(json.dumps(parts.state())))
    assert begun + updates(again, streams[1], 125) == made
