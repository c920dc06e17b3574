"""Trees from block marginals against brute force, and in the loop on the law's targets."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_kit import PROMPT, bound_dflash, plain, sampler, tiny_target

from blockpilot.base.errors import UserError
from blockpilot.costs.curve import CostCurve, CostPoint, cost_settings
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.replay import known_path
from blockpilot.decoding.types import Branches, Draft
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.drafters.none import NoDrafter
from blockpilot.policies.tree import FITS, TreePolicy, best_first, paying_nodes


def ddtree(nodes: int) -> TreePolicy:
    return TreePolicy(nodes=nodes, cost=None, fit=None, online=False)


def drawn(slots: int, ranks: int, seed: int) -> list[list[float]]:
    """Log-probabilities of the best candidates of some slots, best first."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(slots, ranks + 2, generator=generator)
    found: list[list[float]] = (
        logits.log_softmax(-1).sort(descending=True).values[:, :ranks].tolist()
    )
    return found


def paths_of(tree: list[tuple[int, int, int]]) -> list[tuple[int, ...]]:
    """The ranks from the anchor down to each node."""
    paths: list[tuple[int, ...]] = [()]
    for slot, rank, parent in tree:
        assert len(paths[parent]) == slot
        paths.append((*paths[parent], rank))
    return paths[1:]


def score(path: tuple[int, ...], logprobs: list[list[float]]) -> float:
    return math.exp(sum(logprobs[slot][rank] for slot, rank in enumerate(path)))


@pytest.mark.parametrize("seed", range(6))
def test_the_tree_is_the_best_prefix_closed_one_of_every_size(seed: int) -> None:
    logprobs = drawn(3, 3, seed)
    everything = [p for depth in (1, 2, 3) for p in itertools.product(range(3), repeat=depth)]
    for n_nodes in (1, 2, 3, 4):
        best = 0.0
        for chosen in itertools.combinations(everything, n_nodes):
            if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
                best = max(best, sum(score(path, logprobs) for path in chosen))
        tree = best_first(logprobs, n_nodes)
        assert sum(score(path, logprobs) for path in paths_of(tree)) == pytest.approx(best)


def test_scores_fall_so_the_expected_length_is_concave_and_trees_nest() -> None:
    logprobs = drawn(7, 10, 3)
    tree = best_first(logprobs, 40)
    scores = [score(path, logprobs) for path in paths_of(tree)]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(scores))
    assert len(set(paths_of(tree))) == 40
    assert best_first(logprobs, 15) == tree[:15]
    Branches([parent for _, _, parent in tree], torch.device("cpu"))  # parents come first


def test_one_candidate_per_slot_is_the_chain() -> None:
    logprobs = [[row[0]] for row in drawn(5, 3, 0)]
    assert best_first(logprobs, 9) == [(slot, 0, slot) for slot in range(5)]


def test_what_a_tree_accepts_of_a_text_by_hand() -> None:
    #   0 -> token 5 (node 1) -> 5 (node 3); 0 -> 6 (node 2) -> 7 (node 4)
    tree = Draft(torch.tensor([5, 6, 5, 7]), parents=[0, 0, 1, 2])
    assert known_path(tree, [5, 5, 5]) == [1, 3]
    assert known_path(tree, [6, 7]) == [2, 4]
    assert known_path(tree, [6, 5]) == [2]
    assert known_path(tree, [7, 5]) == []
    assert known_path(tree, []) == []
    assert known_path(Draft(torch.tensor([5, 6])), [5, 6, 7]) == [1, 2], "a chain is one branch"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("nodes", [1, 7, 40])
def test_trees_of_a_block_give_plain_decodings_tokens(nodes: int, temperature: float) -> None:
    target = tiny_target()
    wanted = plain(target, 16, sampler(temperature)).tokens
    method = Method(DFlashDrafter(checkpoint="random", ignore_keys=[], head=None), ddtree(nodes))
    method.bind(target)
    trace = decode(target, method, PROMPT, sampler(temperature), 16)
    assert trace.tokens == wanted
    assert set(trace.drafted) == {15}
    assert set(trace.verified) == {nodes + 1}


def test_settings_and_drafters_that_cannot_be_are_refused() -> None:
    with pytest.raises(UserError, match=r"policy.nodes=0: allowed are numbers >= 1"):
        ddtree(0)
    with pytest.raises(UserError, match=r"policy tree: drafter none has no slot marginals"):
        Method(NoDrafter(), ddtree(3)).bind(tiny_target())


# --- as many nodes as pay ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_the_nodes_that_pay_are_the_best_of_all_sizes(seed: int) -> None:
    logprobs = drawn(4, 4, seed)
    tree = best_first(logprobs, 30)
    generator = torch.Generator().manual_seed(seed)
    seconds = (1 + torch.rand(30, generator=generator).cumsum(0) / 10).tolist()
    scores = [score(path, logprobs) for path in paths_of(tree)]
    rates = [(1 + sum(scores[:n])) / seconds[n - 1] for n in range(1, 31)]
    assert paying_nodes(tree, logprobs, seconds) == 1 + rates.index(max(rates))
    assert paying_nodes(tree, logprobs, [1.0] * 30) == 30, "all nodes, where they cost nothing"
    assert paying_nodes(tree, logprobs, [10.0**n for n in range(30)]) == 1


@pytest.fixture
def curve(tmp_path: Path) -> Path:
    """Chains and trees for the random tiny pair: more positions cost more."""
    points = [
        CostPoint(
            size,
            4,
            1,
            1.0 + size / 50,
            0.0,
            0.0,
            0.2,
            0.8 + size / 50,
            0.0,
            0.0,
            kind="tree" if tree else "chain",
        )
        for tree, sizes in ((False, (1, 2, 16)), (True, (2, 8, 16, 64)))
        for size in sizes
    ]
    settings = cost_settings(tiny_target(), bound_dflash())
    file = tmp_path / "cost.json"
    file.write_text(CostCurve(settings, {}, points).to_json())
    return file


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fit", FITS)
def test_trees_that_pay_keep_the_output_law(curve: Path, fit: str, temperature: float) -> None:
    target = tiny_target()
    wanted = plain(target, 16, sampler(temperature)).tokens
    policy = TreePolicy(nodes=63, cost=str(curve), fit=fit, online=False)
    method = Method(DFlashDrafter(checkpoint="random", ignore_keys=[], head=None), policy)
    method.bind(target)
    trace = decode(target, method, PROMPT, sampler(temperature), 16)
    assert trace.tokens == wanted
    assert all(2 <= positions <= 64 for positions in trace.verified)


def test_a_curve_that_does_not_fit_is_refused(curve: Path) -> None:
    def bound(nodes: int, fit: str | None = "measured", target: Any = None) -> None:
        policy = TreePolicy(nodes=nodes, cost=str(curve), fit=fit, online=False)
        target = target or tiny_target()
        Method(DFlashDrafter(checkpoint="random", ignore_keys=[], head=None), policy).bind(target)

    with pytest.raises(UserError, match=r"no cost for tree 65: the curve holds 2\.\.64"):
        bound(64)
    with pytest.raises(UserError, match="measured with dtype=float64, this run has float32"):
        bound(7, target=tiny_target(dtype=torch.float32))
    with pytest.raises(UserError, match=r"policy.fit=None: give both or neither"):
        bound(7, fit=None)
    with pytest.raises(UserError, match=r"policy.fit=other: .*measured or roofline"):
        bound(7, fit="other")
    few = json.loads(curve.read_text())
    few["points"] = [point for point in few["points"] if point["block_size"] != 8]
    curve.write_text(json.dumps(few))
    with pytest.raises(UserError, match=r"cost\.json: .*needs 4 points of trees or more.* holds 3"):
        bound(7, fit="roofline")
