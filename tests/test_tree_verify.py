"""Tree verification: the output law for random trees, the accepted path, what the caches keep."""

from __future__ import annotations

import random

import pytest
import torch
from decoding_kit import KINDS, PROMPT, ScriptedDrafter, perfect, plain, sampler, tiny_target
from torch import Tensor

from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.target import Target
from blockpilot.decoding.types import Branches, Draft, Trace, Verdict, View
from blockpilot.decoding.verify import accepted_path
from blockpilot.policies.fixed import FixedPolicy

BUDGET = 18


class RandomTrees(ScriptedDrafter):
    """Trees of random shape in which the right token is often, but not always, somewhere."""

    name = "trees"

    def __init__(self, gold: list[int], n_nodes: int, *, chain: bool = False) -> None:
        super().__init__(gold, perfect)
        self.n_nodes, self.chain = n_nodes, chain
        self.features: list[Tensor] = []

    def start(self, view: View, capacity: int) -> None:
        super().start(view, capacity)
        assert view.new_features is not None
        self.features = [view.new_features.clone()]

    def draft(self, view: View, n_slots: int) -> Draft:
        place = view.position - view.prompt_ids.shape[0]
        super().draft(view, n_slots)  # counts the features
        rng = random.Random(place)
        depths, right, tokens, parents = [0], [True], [], []
        for node in range(1, self.n_nodes + 1):
            parent = node - 1 if self.chain else rng.randrange(node)
            depth = depths[parent] + 1
            gold = self.gold[place + depth] if place + depth < len(self.gold) else 0
            good = right[parent] and rng.random() < 0.7
            tokens.append(gold if good else rng.randrange(self.rows))
            parents.append(parent)
            depths.append(depth)
            right.append(right[parent] and tokens[-1] == gold)
        return Draft(torch.tensor(tokens), parents=parents)

    def observe(self, verdict: Verdict) -> None:
        assert verdict.features is not None
        assert len(verdict.features) == len(verdict.tokens)
        self.features.append(verdict.features.clone())


def decoded_trees(target: Target, drafter: RandomTrees, temperature: float, seed: int = 0) -> Trace:
    policy = FixedPolicy(block_size=drafter.n_nodes + 1, block_mode="draft")
    method = Method(drafter, policy)
    method.bind(target)
    return decode(target, method, PROMPT, sampler(temperature, seed), BUDGET)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS)
def test_random_trees_give_plain_decodings_tokens(kind: str, tied: bool, attention: str) -> None:
    target = tiny_target(kind, tied=tied, attention=attention)
    commits = []
    for temperature, seed in ((0.0, 0), (0.7, 0), (1.0, 0), (1.0, 1)):
        gold = plain(target, BUDGET, sampler(temperature, seed)).tokens
        for n_nodes in (1, 4, 15):
            trace = decoded_trees(target, RandomTrees(gold, n_nodes), temperature, seed)
            assert trace.tokens == gold, (temperature, seed, n_nodes)
            assert set(trace.drafted) == {n_nodes}
            assert set(trace.verified) == {n_nodes + 1}
            commits += trace.committed
    assert sum(commits) > 1.3 * len(commits), "branches were taken"


@torch.no_grad()
def test_the_drafter_gets_the_features_of_the_accepted_path() -> None:
    target = tiny_target()
    gold = plain(target, BUDGET, sampler(1.0)).tokens
    drafter = RandomTrees(gold, 12)
    trace = decoded_trees(target, drafter, 1.0)
    found = torch.cat(drafter.features)
    ids = torch.tensor([*PROMPT, *trace.tokens])
    whole = target.model(ids[None], output_hidden_states=True).hidden_states[2][0]
    torch.testing.assert_close(found[: len(ids) - 1], whole[: len(ids) - 1])


def test_a_chain_with_parents_is_the_chain_without() -> None:
    target = tiny_target()
    gold = plain(target, BUDGET, sampler(1.0)).tokens

    class Bare(RandomTrees):
        def draft(self, view: View, n_slots: int) -> Draft:
            return Draft(super().draft(view, n_slots).tokens)

    traces = [decoded_trees(target, kind(gold, 6, chain=True), 1.0) for kind in (RandomTrees, Bare)]
    assert traces[0].tokens == traces[1].tokens
    assert traces[0].committed == traces[1].committed
    assert max(traces[0].committed) > 2


def test_a_walk_by_hand() -> None:
    #        0
    #      1   2      tokens 5, 6
    #     3     4     tokens 7, 7
    parents, proposed = [0, 0, 1, 2], [9, 5, 6, 7, 7]
    assert accepted_path([6, 0, 7, 0, 1], proposed, parents) == [0, 2, 4]
    assert accepted_path([5, 8, 7, 0, 1], proposed, parents) == [0, 1]
    assert accepted_path([8, 7, 7, 0, 1], proposed, parents) == [0]
    assert accepted_path([5, 5], [9, 5], [0]) == [0, 1]
    assert accepted_path([5, 7, 1], [9, 5, 5], [0, 0]) == [0, 1], "of two equal children the first"


def test_branches_by_hand_and_a_parent_that_comes_late() -> None:
    branches = Branches([0, 0, 1, 2], torch.device("cpu"))
    assert branches.depths.tolist() == [0, 1, 1, 2, 2]
    assert branches.visible.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
    ]
    with pytest.raises(ValueError, match="node 1 has parent 2: parents come before children"):
        Branches([2, 0], torch.device("cpu"))
