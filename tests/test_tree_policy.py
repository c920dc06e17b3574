"""Trees from block marginals against brute force, and in the loop on the law's targets."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from decoding_kit import PROMPT, plain, sampler, tiny_target

from blockpilot.decoding.loop import Method, decode
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.drafters.none import NoDrafter
from blockpilot.errors import UserError
from blockpilot.policies.fixed import FixedPolicy
from blockpilot.policies.tree import TreePolicy, accepted_by, best_first
from blockpilot.verify.tree import branches_of, verify


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
    branches_of([parent for _, _, parent in tree], torch.device("cpu"))  # parents come first


def test_one_candidate_per_slot_is_the_chain() -> None:
    logprobs = [[row[0]] for row in drawn(5, 3, 0)]
    assert best_first(logprobs, 9) == [(slot, 0, slot) for slot in range(5)]


def test_what_a_tree_accepts_of_a_text_by_hand() -> None:
    #   0 -> rank 0 (node 1) -> rank 0 (node 3); 0 -> rank 1 (node 2) -> rank 2 (node 4)
    tree = [(0, 0, 0), (0, 1, 0), (1, 0, 1), (1, 2, 2)]
    assert accepted_by(tree, [0, 0, 0]) == 2
    assert accepted_by(tree, [1, 2]) == 2
    assert accepted_by(tree, [1, 0]) == 1
    assert accepted_by(tree, [-1, 0]) == 0
    assert accepted_by(tree, []) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("nodes", [1, 7, 40])
def test_trees_of_a_block_give_plain_decodings_tokens(nodes: int, temperature: float) -> None:
    target = tiny_target()
    wanted = plain(target, 16, sampler(temperature)).tokens
    method = Method(DFlashDrafter(checkpoint="random"), TreePolicy(nodes=nodes), verify)
    method.bind(target)
    trace = decode(target, method, PROMPT, sampler(temperature), 16)
    assert trace.tokens == wanted
    assert set(trace.drafted) == {15}
    assert set(trace.verified) == {nodes + 1}


def test_a_greedy_tree_accepts_at_least_what_its_chain_does() -> None:
    """As many nodes as the chain, plus a spare: the chain's own path is among the best."""
    target = tiny_target()
    taus = []
    for policy in (FixedPolicy(block_size=16, block_mode="draft"), TreePolicy(nodes=60)):
        method = Method(DFlashDrafter(checkpoint="random"), policy, verify)
        method.bind(target)
        committed = decode(target, method, PROMPT, sampler(), 60).committed
        taus.append(sum(committed) / len(committed))
    assert taus[1] >= taus[0]


def test_settings_and_drafters_that_cannot_be_are_refused() -> None:
    with pytest.raises(UserError, match=r"policy.nodes=0: allowed are numbers >= 1"):
        TreePolicy(nodes=0)
    with pytest.raises(UserError, match=r"policy tree: drafter none has no slot marginals"):
        Method(NoDrafter(), TreePolicy(nodes=3), verify).bind(tiny_target())
