"""Trees by replay against trees by decoding, with a drafter whose marginals are worth something."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoding_kit import VOCAB, ScriptedDrafter, perfect, tiny_target, with_stops
from test_replay import BUDGET, HASHES, PROMPTS, keyed, known_answer
from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.decoding.anchors import KnownAnswer
from blockpilot.decoding.answers import answer
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.replay import decided, replay
from blockpilot.decoding.types import Draft, View
from blockpilot.decoding.verify import verify
from blockpilot.policies.tree import TreePolicy


class Unsure(ScriptedDrafter):
    """Noisy logits that lean to the text, the same in `draft` and `replay`."""

    name = "unsure"
    has_marginals = True

    def __init__(self) -> None:
        super().__init__([], perfect)

    def logits_at(self, place: int, n_slots: int) -> Tensor:
        """Logits [n_slots - 1, V] behind token `place` of the answer."""
        generator = torch.Generator().manual_seed(place)
        logits = 1.5 * torch.randn(n_slots - 1, VOCAB, generator=generator)
        for slot, token in enumerate(self.gold[place + 1 :][: n_slots - 1]):
            logits[slot, token] += 2.5
        return logits

    def draft(self, view: View, n_slots: int) -> Draft:
        logits = self.logits_at(view.position - view.prompt_ids.shape[0], n_slots)
        return Draft(logits.argmax(dim=-1), logits)

    def replay(self, ids: Tensor, features: Tensor | None, anchors: Tensor, n_slots: int) -> Any:
        start = len(ids) - len(self.gold)
        every = torch.stack([self.logits_at(a - start, n_slots) for a in anchors.tolist()])

        class Given:
            def logits(self, rows: Tensor, slot: int) -> Tensor:
                return every[rows, slot]

        return Given()


def best_tree(logits: Tensor, n_nodes: int) -> set[tuple[int, ...]]:
    """Token paths of the prefix-closed tree with the largest sum of path probabilities [S, V].

    A node never scores more than its parent, so they are the best of all paths; of each depth no
    more than `n_nodes` can be among them, nor lead to one.
    """
    logprobs = logits.float().log_softmax(-1)
    scores, paths = torch.zeros(1), torch.zeros(1, 0, dtype=torch.long)
    found: list[tuple[float, tuple[int, ...]]] = []
    for slot in logprobs:
        grown = (scores[:, None] + slot).flatten()
        scores, index = grown.topk(min(n_nodes, len(grown)))
        paths = torch.cat([paths[index // len(slot)], (index % len(slot))[:, None]], dim=1)
        found += [(s, tuple(p)) for s, p in zip(scores.tolist(), paths.tolist(), strict=True)]
    return {path for _, path in sorted(found, reverse=True)[:n_nodes]}


def paths_of(draft: Draft) -> set[tuple[int, ...]]:
    """The tokens from the anchor down to each node of a tree."""
    assert draft.parents is not None
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.tokens.tolist(), draft.parents, strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_of_every_size_are_the_best_and_replay_as_they_decode(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = with_stops(tiny_target(), 3)
    drafter: Any = Unsure()
    drafter.bind(target)
    taus: dict[int, list[float]] = {}
    widest = 0
    said = answer(target, PROMPTS, keyed(temperature, HASHES), BUDGET, drafter.feature_layers)
    for row, one in enumerate(said):
        drafter.gold = one.tokens
        ids = [*PROMPTS[row], *one.tokens]
        start = len(PROMPTS[row])
        found = replay(drafter, torch.tensor(ids), start, one.features, [], chunk=5, candidates=127)
        answered = known_answer(PROMPTS[row], one, temperature)
        for nodes in (1, 7, 15, 31, 63, 127):
            trees: list[tuple[int, Draft]] = []

            def spying(target, cache, view, draft, choose, trees=trees):  # type: ignore[no-untyped-def]
                trees.append((view.position - view.prompt_ids.shape[0], draft))
                return verify(target, cache, view, draft, choose)

            method = Method(drafter, ddtree(nodes)).bind(target)
            monkeypatch.setattr("blockpilot.decoding.loop.verify", spying)
            wanted = decode(target, method, PROMPTS[row], keyed(temperature, [HASHES[row]]), BUDGET)
            for place, draft in trees:
                assert paths_of(draft) == best_tree(drafter.logits_at(place, 8), nodes)
                widest = max(widest, sum(parent == 0 for parent in draft.parents or ()))
            trace = decided(method.policy, found, answered)
            assert trace.tokens == wanted.tokens
            for part in ("committed", "drafted", "verified"):
                assert getattr(trace, part) == getattr(wanted, part), (nodes, part)
            taus.setdefault(nodes, []).append(sum(trace.committed) / max(1, len(trace.committed)))
    means = {nodes: sum(values) / len(values) for nodes, values in taus.items()}
    assert means[1] < means[15] < means[127], f"more nodes accept more: {means}"
    assert widest > 16, "else the trees would not need more candidates"


def test_a_replay_that_kept_too_few_candidates_is_refused() -> None:
    drafter: Any = Unsure()
    drafter.gold = [place % VOCAB for place in range(20)]
    drafter.bind(tiny_target())
    found = replay(drafter, torch.tensor(drafter.gold), 1, None, [], chunk=20, candidates=16)
    answered = KnownAnswer([0], drafter.gold[1:], "budget", 0.0, torch.zeros(VOCAB), torch.zeros(4))
    assert sum(decided(policy(15, drafter), found, answered).committed) == 18
    told = "policy tree: it reads 61 candidates per slot, the replay kept 16"
    with pytest.raises(UserError, match=told):
        decided(policy(63, drafter), found, answered)


def ddtree(nodes: int) -> TreePolicy:
    return TreePolicy(nodes=nodes, cost=None, fit=None, online=False)


def policy(nodes: int, drafter: Any) -> TreePolicy:
    """A bound policy."""
    found = ddtree(nodes)
    found.bind(tiny_target(), drafter)
    return found
