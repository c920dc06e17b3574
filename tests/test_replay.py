"""The law of replay: it visits the cycles of decoding, for every drafter, size, mode and T."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_kit import (
    KINDS,
    PROMPT,
    VOCAB,
    ScriptedDrafter,
    perfect,
    plain,
    sampler,
    tiny_target,
    with_stops,
)
from test_law import DRAFTERS, POLICIES, bound_methods, build
from torch import Tensor

from blockpilot.decoding.anchors import TOP, KnownAnswer, walk
from blockpilot.decoding.answers import Answer, answer
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.protocols import Drafter, ReplayablePolicy
from blockpilot.decoding.replay import (
    accepted_lengths,
    anchors_per_chunk,
    can_replay,
    decided,
    marginals,
    replay,
    slot_labels,
)
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.target import Target
from blockpilot.decoding.types import Block, Draft, View
from blockpilot.policies.fixed import FixedPolicy
from blockpilot.records.schema import PER_CYCLE

PROMPTS = [[5, 17, 3, 42, 8], [7], [9, 9, 30, 2, 11, 50, 4, 4, 23]]
HASHES = ["a", "b", "c"]
BUDGET = 20


class HalfRight(ScriptedDrafter):
    """Knows the text but errs at some (position, slot), in `draft` and `replay` alike."""

    name = "half-right"
    has_marginals = True

    def __init__(self, gold: list[int]) -> None:
        super().__init__(gold, perfect)

    def draft(self, view: View, n_slots: int) -> Draft:
        start = view.prompt_ids.shape[0]
        return Draft(self.guesses(view.position - start, n_slots))

    def guesses(self, place: int, n_slots: int) -> Tensor:
        """Proposals behind token `place` of the answer."""
        known = (self.gold[place + 1 :] + [0] * n_slots)[: n_slots - 1]
        spoilt = [(token + 1) % VOCAB for token in known]
        wrong = [(7 * place * place + 5 * slot) % 13 < 3 for slot in range(n_slots - 1)]
        return torch.tensor([b if w else a for a, b, w in zip(known, spoilt, wrong, strict=True)])

    def replay(self, ids: Tensor, features: Tensor | None, anchors: Tensor, n_slots: int) -> Any:
        start = len(ids) - len(self.gold)
        rows = [self.guesses(anchor - start, n_slots) for anchor in anchors.tolist()]
        return Certain(torch.stack(rows))


class Certain:
    """Proposals of tokens without doubt."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def logits(self, rows: Tensor, slot: int) -> Tensor:
        return torch.nn.functional.one_hot(self.tokens[rows, slot], VOCAB).double()


def keyed(temperature: float, hashes: list[str]) -> KeyedSampler:
    return KeyedSampler(temperature=temperature, seed=4, prompt_hashes=hashes)


def blocks(drafter: Drafter) -> dict[tuple[int, str], Block]:
    """Plans of several sizes in both modes."""
    found = {}
    for mode in ("draft", "verify"):
        for size in (1, 2, 5, 16):
            if mode == "verify" and size > (drafter.trained_block_size or 1):
                continue
            if drafter.trained_block_size is None and size > 1:
                continue
            policy = FixedPolicy(block_size=size, block_mode=mode)
            policy.bind(tiny_target(), drafter)
            found[size, mode] = policy.fixed_block
    return found


def decoded(target: Target, drafter: Drafter, key: tuple[int, str], row: int, t: float) -> Any:
    method = Method(drafter, FixedPolicy(block_size=key[0], block_mode=key[1]))
    method.bind(target)
    return decode(target, method, PROMPTS[row], keyed(t, [HASHES[row]]), BUDGET)


def known_answer(prompt: list[int], said: Answer, temperature: float) -> KnownAnswer:
    """What a policy may know of an answer."""
    prefill = said.prefill_logits, said.prefill_hidden
    return KnownAnswer(prompt, said.tokens, said.stop_reason, temperature, *prefill)


def compare(target: Target, drafter: Drafter, temperature: float, chunk: int) -> list[int]:
    """Replay equals decode on all prompts and blocks; all commits of wide blocks."""
    sampler = keyed(temperature, HASHES)
    said = answer(target, PROMPTS, sampler, BUDGET, drafter.feature_layers)
    commits = []
    for row, one in enumerate(said):
        if isinstance(drafter, HalfRight):
            drafter.gold = one.tokens
        ids = torch.tensor([*PROMPTS[row], *one.tokens])
        wanted = blocks(drafter)
        start = len(PROMPTS[row])
        found, everywhere = (
            replay(drafter, ids, start, one.features, wanted.values(), chunk=chunk, candidates=kept)
            for kept in (0, 3)
        )
        for key, block in wanted.items():
            drafted = found.accepted[block] >= 0
            assert torch.equal(found.accepted[block][drafted], everywhere.accepted[block][drafted])
            assert (everywhere.accepted[block] >= 0).all()
            trace = found.trace(block, one.tokens, one.stop_reason)
            other = decoded(target, drafter, key, row, temperature)
            assert trace.tokens == other.tokens, key
            assert trace.stop_reason == other.stop_reason
            for part in ("committed", "drafted", "verified"):
                assert getattr(trace, part) == getattr(other, part), (key, part)
            commits += trace.committed if key[0] > 1 else []
    return commits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", DRAFTERS, ids=lambda p: p.stem)
def test_replay_equals_decode_for_every_replayable_drafter(
    file: Path, kind: str, temperature: float
) -> None:
    target = with_stops(tiny_target(kind), 3, 33)
    drafter: Any = build(file)
    drafter.bind(target)
    if not can_replay(drafter):
        pytest.skip("decoded instead")
    compare(target, drafter, temperature, chunk=7)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.stem)
@pytest.mark.parametrize("drafter_file", DRAFTERS, ids=lambda p: p.stem)
def test_replay_equals_decode_for_every_policy(drafter_file: Path, policy: Path) -> None:
    """Behind prompts that hold the target's own text, where copies are accepted too."""
    target = with_stops(tiny_target(), 3)
    drafter: Any = build(drafter_file)
    drafter.bind(target)
    if not can_replay(drafter):
        pytest.skip("decoded instead")
    for temperature, seed in ((0.0, 0), (1.0, 0), (1.0, 1)):
        choose = sampler(temperature, seed)
        prompt = [*PROMPT, *(2 * plain(target, 12, choose).tokens), *PROMPT]
        one = answer(target, [prompt], choose, BUDGET, drafter.feature_layers)[0]
        ids = torch.tensor([*prompt, *one.tokens])
        for name, method in bound_methods(drafter_file, policy, target, known=drafter):
            if not isinstance(method.policy, ReplayablePolicy):
                continue
            kept = max(TOP, method.policy.candidates)
            blocks = method.policy.replay_blocks()
            if any(block.drafted > 1 for block in blocks) and drafter.trained_block_size is None:
                continue  # asks for a block where nothing is drafted
            found = replay(
                drafter, ids, len(prompt), one.features, blocks, chunk=7, candidates=kept
            )
            trace = decided(method.policy, found, known_answer(prompt, one, temperature))
            decoded = decode(target, method, prompt, choose, BUDGET)
            for part in ("tokens", "stop_reason", *PER_CYCLE):
                assert getattr(trace, part) == getattr(decoded, part), (name, temperature, part)


@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replay_equals_decode_where_much_is_accepted(temperature: float, chunk: int) -> None:
    target = with_stops(tiny_target(), 3, 33)
    drafter: Any = HalfRight([])
    drafter.bind(target)
    commits = compare(target, drafter, temperature, chunk)
    assert len(set(commits)) > 2, "else the law would hold for any walk"
    assert sum(commits) > 1.5 * len(commits)


def test_without_marginals_only_what_the_walks_visit_is_drafted() -> None:
    """The first width is drafted everywhere; its lengths tell where the next one's cycles lie."""
    target = with_stops(tiny_target(), 3, 33)
    gold = [place % VOCAB for place in range(200)]
    drafter = HalfRight(gold)
    drafter.bind(target)
    blocks = [Block(size, size) for size in (4, 5, 8)]
    found = replay(drafter, torch.tensor(gold), 1, None, blocks, chunk=7).accepted
    assert (found[blocks[0]] >= 0).all()
    for block in blocks[1:]:
        drafted = int((found[block] >= 0).sum())
        assert len(walk(found[block].tolist())) <= drafted < 150


def test_a_walk_to_where_nothing_was_drafted_is_a_defect() -> None:
    with pytest.raises(AssertionError, match="without drafts"):
        walk([1, 0, -1])


def test_a_walk_by_hand() -> None:
    assert walk([]) == []
    assert walk([0, 0, 0]) == [1, 1, 1]
    assert walk([2, 9, 9, 1, 0]) == [3, 2]
    assert walk([4, 9]) == [2], "the commit is cut at the end"


def test_accepted_lengths_stop_at_the_first_error_and_at_the_end() -> None:
    ids = torch.tensor([9, 1, 2, 3, 4])
    anchors = torch.tensor([0, 1, 2, 3])
    labels, known = slot_labels(ids, anchors, 4)
    guesses = Certain(torch.tensor([[1, 2, 3], [2, 0, 4], [3, 4, 4], [0, 4, 4]]))
    by_slot = accepted_lengths(guesses, labels, known)
    for lengths in (by_slot, marginals(guesses, labels, known, candidates=1)[1]):
        assert lengths.tolist() == [3, 1, 2, 0]


def test_marginals_by_hand() -> None:
    ids = torch.tensor([9, 1, 2])
    labels, known = slot_labels(ids, torch.tensor([0, 1]), 3)
    logits = torch.randn(2, 2, VOCAB, generator=torch.Generator().manual_seed(0))

    class Given:
        def logits(self, rows: Tensor, slot: int) -> Tensor:
            return logits[rows, slot]

    found, _ = marginals(Given(), labels, known, candidates=16)
    whole, _ = marginals(Given(), labels, known, candidates=2 * VOCAB)
    assert whole.top_tokens.shape == (2, 2, VOCAB), "a smaller vocabulary is kept whole"
    order = logits.argsort(dim=-1, descending=True)
    for anchor, slot in ((0, 0), (0, 1), (1, 0)):
        place = (order[anchor, slot] == labels[anchor, slot]).nonzero().item()
        assert found.rank[anchor, slot] == place
    assert found.rank[1, 1] == -1, "past the end"
    assert torch.equal(found.top_tokens.long(), order[..., :16])
    wanted = logits.log_softmax(-1).gather(-1, order[..., :16])
    torch.testing.assert_close(found.top_logprobs, wanted)


def test_a_small_budget_still_runs_one_anchor_at_a_time() -> None:
    target = tiny_target()
    drafter: Any = HalfRight([])
    drafter.bind(target)
    assert anchors_per_chunk(drafter, target, 100, budget=1) == 1
    many = anchors_per_chunk(drafter, target, 100, budget=1 << 30)
    assert many > anchors_per_chunk(drafter, target, 10_000, budget=1 << 30) > 1


def test_an_answer_keeps_the_prefill_distribution_and_where_it_was_read() -> None:
    target = tiny_target()
    said = answer(target, PROMPTS, keyed(1.0, HASHES), 4)
    for prompt, one in zip(PROMPTS, said, strict=True):
        forward = target.forward(torch.tensor(prompt), target.new_cache(len(prompt)), n_logits=1)
        torch.testing.assert_close(one.prefill_logits, forward.logits[0])
        torch.testing.assert_close(one.prefill_hidden, forward.hidden[0])
        assert one.features is None
