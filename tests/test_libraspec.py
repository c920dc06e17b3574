"""LibraSpec: its rules against formula and brute force, in the loop, by replay."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_kit import PROMPT, bound_dflash, plain, sampler, tiny_target, with_stops
from test_replay import BUDGET, HASHES, PROMPTS, keyed, known_answer
from test_replay_trees import Unsure

from blockpilot.base.errors import UserError
from blockpilot.costs.curve import CostCurve, CostPoint, cost_settings
from blockpilot.decoding.answers import answer
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.replay import decided, replay
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.drafters.none import NoDrafter
from blockpilot.policies.libraspec import LibraSpecPolicy, exact_length, practical_length


def drawn(seed: int, d: int = 7) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(d, generator=generator).tolist()


@pytest.mark.parametrize("seed", range(20))
def test_the_practical_rule_is_its_formula(seed: int) -> None:
    q, alpha, d = drawn(seed), 2.2, 7
    limits = []
    for i in range(1, d + 1):
        gain = sum(math.prod(q[i - 1 : j]) for j in range(i, d + 1))
        limits.append(math.floor(i + alpha * gain))
    assert practical_length(q, alpha) == max(1, min(d, *limits))


def test_the_practical_rule_by_hand() -> None:
    assert practical_length([1.0] * 5, 2.2) == 5, "a sure drafter is verified to its end"
    assert practical_length([0.0] * 5, 2.2) == 1
    assert practical_length([0.9, 0.9, 0.01, 0.9], 1.0) == 2, "1 + 0.9 + 0.81 + 0.008 + 0.007"


@pytest.mark.parametrize("seed", range(20))
def test_the_exact_rule_is_brute_force(seed: int) -> None:
    q = drawn(seed)
    costs = sorted(1 + x for x in drawn(seed + 100))
    rates = [
        (1 + sum(math.prod(q[:j]) for j in range(1, n + 1))) / costs[n - 1] for n in range(1, 8)
    ]
    assert exact_length(q, costs) == 1 + rates.index(max(rates))


@pytest.mark.parametrize("seed", range(20))
def test_with_a_linear_cost_the_marginal_rule_stops_where_brute_force_does(seed: int) -> None:
    """Extend while gain over extra cost exceeds what the chain has so far: the paper's rule."""
    q, cost, step = drawn(seed), 1.0, 0.07
    n, expected = 1, 1 + q[0]
    while n < len(q):
        gain = math.prod(q[: n + 1])
        if gain / step <= expected / (cost + step * n):
            break
        n, expected = n + 1, expected + gain
    assert exact_length(q, [cost + step * m for m in range(1, 8)]) == n


def curve(folder: Path, target: Any) -> Path:
    points = [
        CostPoint(size, 4, 1, 1.0, 0.0, 0.0, 0.2, 0.5 + size / 4, 0.0, 0.0) for size in (1, 2, 16)
    ]
    file = folder / "cost.json"
    file.write_text(CostCurve(cost_settings(target, bound_dflash()), {}, points).to_json())
    return file


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("exact", [False, True])
def test_tokens_are_plain_decodings(tmp_path: Path, exact: bool, temperature: float) -> None:
    target = tiny_target()
    given = {"alpha": None, "cost": str(curve(tmp_path, target))}
    policy = LibraSpecPolicy(**(given if exact else {"alpha": 2.2, "cost": None}))
    method = Method(DFlashDrafter(checkpoint="random", ignore_keys=[], head=None), policy)
    method.bind(target)
    trace = decode(target, method, PROMPT, sampler(temperature), 24)
    assert trace.tokens == plain(target, 24, sampler(temperature)).tokens
    assert set(trace.drafted) == {15}
    assert all(2 <= positions <= 16 for positions in trace.verified)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_replay_has_the_cycles_of_decoding(temperature: float) -> None:
    target = with_stops(tiny_target(), 3)
    drafter: Any = Unsure()
    drafter.bind(target)
    said = answer(target, PROMPTS, keyed(temperature, HASHES), BUDGET, drafter.feature_layers)
    sizes = set()
    for row, one in enumerate(said):
        drafter.gold = one.tokens
        ids, start = torch.tensor([*PROMPTS[row], *one.tokens]), len(PROMPTS[row])
        answered = known_answer(PROMPTS[row], one, temperature)
        for alpha in (0.5, 2.2, 9.0):
            method = Method(drafter, LibraSpecPolicy(alpha=alpha, cost=None))
            method.bind(target)
            blocks = method.policy.replay_blocks()
            found = replay(drafter, ids, start, one.features, blocks, chunk=5, candidates=1)
            wanted = decode(target, method, PROMPTS[row], keyed(temperature, [HASHES[row]]), BUDGET)
            trace = decided(method.policy, found, answered)
            for part in ("tokens", "committed", "drafted", "verified"):
                assert getattr(trace, part) == getattr(wanted, part), (alpha, part)
            sizes |= set(trace.verified)
    assert len(sizes) > 3, "else every cycle had one size"


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for alpha, cost in ((None, None), (2.2, "x.json")):
        with pytest.raises(UserError, match="give one of the two"):
            LibraSpecPolicy(alpha=alpha, cost=cost)
    with pytest.raises(UserError, match=r"policy.alpha=0: allowed are numbers > 0"):
        LibraSpecPolicy(alpha=0, cost=None)
    policy = LibraSpecPolicy(alpha=2.2, cost=None)
    with pytest.raises(UserError, match="policy libraspec: drafter none has no slot marginals"):
        Method(NoDrafter(), policy).bind(tiny_target())
    other = curve(tmp_path, tiny_target(dtype=torch.float32))
    policy = LibraSpecPolicy(alpha=None, cost=str(other))
    with pytest.raises(UserError, match="measured with dtype=float32, this run has float64"):
        Method(DFlashDrafter(checkpoint="random", ignore_keys=[], head=None), policy).bind(
            tiny_target()
        )


def test_how_far_the_practical_rule_is_from_the_exact_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Under its own model: confidences that are right, extra positions of equal cost."""
    step, losses = 0.05, []
    costs = [1 + step * n for n in range(1, 16)]
    for seed in range(300):
        q = drawn(seed, 15)

        def rate(n: int, q: list[float] = q) -> float:
            return (1 + sum(itertools.accumulate(q[:n], lambda a, b: a * b))) / costs[n - 1]

        best = exact_length(q, costs)
        tau = 1 + sum(itertools.accumulate(q[:best], lambda a, b: a * b))
        losses.append(1 - rate(practical_length(q, costs[best - 1] / (tau * step))) / rate(best))
    mean = sum(losses) / len(losses)
    with capsys.disabled():
        print(f"[practical rule loses {mean:.1%} on average]", end=" ")
    assert 0 < mean < 0.5
    assert min(losses) >= -1e-12, "nothing beats the exact rule"
