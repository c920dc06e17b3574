"""Trees by replay against trees by decoding, with a drafter whose marginals are worth something."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoding_kit import VOCAB, ScriptedDrafter, perfect, tiny_target, with_stops
from test_replay import BUDGET, HASHES, PROMPTS, keyed
from torch import Tensor

from blockpilot.decoding.anchors import Answered
from blockpilot.decoding.answers import answer
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.replay import replay
from blockpilot.decoding.types import Draft, View
from blockpilot.policies.tree import TreePolicy
from blockpilot.verify.tree import verify


class Unsure(ScriptedDrafter):
    """Noisy logits that lean to the text, the same in `draft` and `replay`."""

    name = "unsure"
    replayable = True
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replayed_trees_have_the_cycles_of_decoded_ones(temperature: float) -> None:
    target = with_stops(tiny_target(), 3)
    drafter: Any = Unsure()
    drafter.bind(target)
    taus: dict[int, list[float]] = {}
    said = answer(target, PROMPTS, keyed(temperature, HASHES), BUDGET, drafter.feature_layers)
    for row, one in enumerate(said):
        drafter.gold = one.tokens
        ids = [*PROMPTS[row], *one.tokens]
        start = len(PROMPTS[row])
        found = replay(
            drafter, torch.tensor(ids), start, one.features, [], chunk=5, with_marginals=True
        )
        answered = Answered(one.tokens, start, one.prefill_logits, one.prefill_hidden)
        for nodes in (1, 7, 15, 40):
            method = Method(drafter, TreePolicy(nodes=nodes, cost=None, fit=None), verify)
            method.bind(target)
            wanted = decode(target, method, PROMPTS[row], keyed(temperature, [HASHES[row]]), BUDGET)
            choices = method.policy.replayed(found, answered)
            trace = choices.trace(one.tokens, one.stop_reason)
            assert trace.tokens == wanted.tokens
            for part in ("committed", "drafted", "verified"):
                assert getattr(trace, part) == getattr(wanted, part), (nodes, part)
            taus.setdefault(nodes, []).append(sum(trace.committed) / max(1, len(trace.committed)))
    means = [sum(values) / len(values) for values in taus.values()]
    assert means[0] < means[1] < means[3], "more nodes accept more"
    assert means[3] > 1.4
