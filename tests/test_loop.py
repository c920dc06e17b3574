"""The decode loop with a drafter whose acceptance is scripted."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from decoding_kit import (
    PROMPT,
    ScriptedDrafter,
    perfect,
    plain,
    sampler,
    scripted,
    tiny_target,
    with_stops,
)

from blockpilot.base.errors import UserError
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.timing import Clock
from blockpilot.decoding.types import Block, Draft, Verdict, View
from blockpilot.decoding.verify import verify
from blockpilot.drafters.none import NoDrafter
from blockpilot.policies.fixed import FixedPolicy, block_of

LONG = 48


@pytest.fixture(scope="module")
def gold() -> list[int]:
    """A text of varied tokens."""
    return plain(tiny_target(), LONG, sampler(1.0)).tokens


def first_places(tokens: list[int]) -> list[int]:
    """Indices at which a token occurs for the first time."""
    return [i for i, token in enumerate(tokens) if token not in tokens[:i]]


@pytest.mark.parametrize("block_size", [2, 4, 7, 16])
def test_stop_token_inside_a_block_ends_the_text(gold: list[int], block_size: int) -> None:
    for k in first_places(gold[:20]):
        target = with_stops(tiny_target(), gold[k])
        trace = scripted(target, gold, block_size, LONG, choose=sampler(1.0))
        assert trace.tokens == gold[: k + 1]
        assert trace.stop_reason == "stop"


@pytest.mark.parametrize("budget", [1, 5, 40, 48])
def test_nothing_past_the_stop_or_the_budget_is_counted(gold: list[int], budget: int) -> None:
    block_size = 6
    stops = [
        None,
        *(gold[k] for k in (0, 1, block_size - 1, block_size) if k in first_places(gold)),
    ]
    for stop in stops:
        target = tiny_target() if stop is None else with_stops(tiny_target(), stop)
        trace = scripted(target, gold, block_size, budget, choose=sampler(1.0))
        assert sum(trace.committed) + 1 == len(trace.tokens)
        assert len(trace.tokens) <= budget
        if stop == gold[0]:
            assert trace.committed == []


def test_perfect_drafter_reports_what_it_committed(gold: list[int]) -> None:
    assert scripted(tiny_target(), gold, 16, 5, choose=sampler(1.0)).committed == [4]


@pytest.mark.parametrize("block_size", [2, 8])
def test_a_block_larger_than_the_budget(gold: list[int], block_size: int) -> None:
    b = block_size
    for budget in (0, 1, 2, b - 1, b, b + 1, 2 * b + 3):
        trace = scripted(tiny_target(), gold, b, budget, choose=sampler(1.0))
        assert trace.tokens == gold[:budget]
        assert trace.stop_reason == "budget"
        # The block is never shortened near the budget; only the commit is cut.
        assert all(n == b for n in trace.verified)
        if budget <= 1:
            assert trace.verified == []


def test_budget_of_one_calls_no_drafter(gold: list[int]) -> None:
    drafter = ScriptedDrafter(gold, perfect)
    method = Method(drafter, FixedPolicy(block_size=4, block_mode="draft"))
    method.bind(tiny_target())
    decode(tiny_target(), method, PROMPT, sampler(), 1)
    assert drafter.calls == 0


def test_every_accept_pattern_of_block_4(gold: list[int]) -> None:
    target, choose = tiny_target(), sampler(1.0)
    for n_wrong in range(4):
        for wrong in itertools.combinations(range(3), n_wrong):
            trace = scripted(target, gold, 4, LONG, lambda cycle, wrong=wrong: wrong, choose)
            accepted = min(wrong, default=3)
            assert trace.tokens == gold
            assert set(trace.committed[:-1]) == {accepted + 1}


def test_random_accept_patterns_of_block_16(gold: list[int]) -> None:
    draw = random.Random(0)
    for _ in range(10):
        wrong = [[s for s in range(15) if draw.random() < 0.2] for _ in range(LONG)]
        trace = scripted(tiny_target(), gold, 16, LONG, wrong.__getitem__, sampler(1.0))
        assert trace.tokens == gold
        hand = [min(slots, default=15) + 1 for slots in wrong[: len(trace.committed)]]
        assert trace.committed[:-1] == hand[:-1]


def test_cache_holds_all_committed_tokens_but_the_anchor(
    gold: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, choose = tiny_target(), sampler(1.0)
    lengths: list[tuple[int, int]] = []

    def spying(target, cache, view, draft, choose):  # type: ignore[no-untyped-def]
        verdict = verify(target, cache, view, draft, choose)
        lengths.append((cache.length, view.position + len(verdict.tokens)))
        return verdict

    drafter = ScriptedDrafter(gold, lambda cycle: [cycle % 5])
    method = Method(drafter, FixedPolicy(block_size=6, block_mode="draft"))
    monkeypatch.setattr("blockpilot.decoding.loop.verify", spying)
    method.bind(target)
    assert decode(target, method, PROMPT, choose, LONG).tokens == gold
    # positions count from 0, so the anchor's position is the number of tokens before it
    assert lengths
    assert all(held == anchor for held, anchor in lengths)


@pytest.mark.parametrize("temperature", [0, 1e-8, 1e-6, 1e-4, 0.7, 1, 2])
def test_every_temperature_is_equal_and_finite(temperature: float) -> None:
    target, choose = tiny_target(), sampler(temperature)
    text = plain(target, 24, choose).tokens
    assert scripted(target, text, 5, 24, lambda c: [c % 4], choose).tokens == text
    if temperature <= 1e-6:
        assert text == plain(target, 24).tokens


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_k": 3}, {"top_p": 0.3}, {"top_p": 1e-9}])
def test_filters_shift_both_sides_alike(filters: dict[str, float]) -> None:
    target, choose = tiny_target(), sampler(1.0, **filters)
    text = plain(target, 24, choose).tokens
    assert scripted(target, text, 5, 24, perfect, choose).tokens == text
    assert scripted(target, text, 5, 24, perfect, choose).committed[0] == 5
    if filters in ({"top_k": 1}, {"top_p": 1e-9}):
        assert text == plain(target, 24).tokens


def test_block_size_one_is_plain_decoding(gold: list[int]) -> None:
    drafter = ScriptedDrafter(gold, perfect)
    method = Method(drafter, FixedPolicy(block_size=1, block_mode="draft"))
    method.bind(tiny_target())
    trace = decode(tiny_target(), method, PROMPT, sampler(1.0), LONG)
    assert trace.tokens == gold
    assert set(trace.committed) == {1}
    assert drafter.calls == 0


@pytest.mark.parametrize(
    ("size", "mode", "trained"), [(0, "draft", 8), (9, "verify", 8), (2, "x", 8)]
)
def test_impossible_sizes_are_refused(size: int, mode: str, trained: int) -> None:
    drafter = ScriptedDrafter([], perfect)
    drafter.trained_block_size, drafter.has_marginals = trained, True
    with pytest.raises(UserError, match="allowed are"):
        block_of(size, mode, drafter)


def test_verify_mode_without_a_trained_size_is_refused() -> None:
    policy = FixedPolicy(block_size=4, block_mode="verify")
    with pytest.raises(UserError, match="trained block size"):
        Method(NoDrafter(), policy).bind(tiny_target())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("padded_rows", [0, 7])
def test_oracle_tau_is_the_block_size(tied: bool, padded_rows: int) -> None:
    target = tiny_target("qwen3", tied=tied, padded_rows=padded_rows)
    text = plain(target, 41, sampler(1.0)).tokens
    trace = scripted(target, text, 8, 41, choose=sampler(1.0))
    assert trace.tokens == text
    assert trace.committed == [8] * 5


def test_a_batch_is_refused_before_any_forward() -> None:
    method = Method(NoDrafter(), FixedPolicy(block_size=1, block_mode="draft"))
    method.bind(tiny_target())
    with pytest.raises(UserError, match="one prompt at a time"):
        decode(tiny_target(), method, [PROMPT, PROMPT], sampler(), 4)  # type: ignore[list-item]


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    with pytest.raises(UserError, match="exceed the target's context of 256"):
        plain(tiny_target(), 10, prompt=[1] * 250)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UserError, match="no tokens"):
        plain(tiny_target(), 10, prompt=[])


def test_non_finite_logits_are_refused() -> None:
    target = tiny_target(seed=3)
    head = target.model.get_output_embeddings().weight
    kept = head.data[7].clone()
    try:
        head.data[7] = float("nan")
        with pytest.raises(UserError, match="not finite at new token 1"):
            plain(target, 4)
    finally:
        head.data[7] = kept


def test_a_sync_comes_before_each_read_of_the_clock() -> None:
    now, events = [0.0], []

    def read() -> float:
        events.append("read")
        now[0] += 1.0
        return now[0]

    clock = Clock(torch.device("cpu"), read, lambda: events.append("sync"))
    clock.start()
    for part in ("draft", "verify", "draft"):
        clock.mark(part)
    total, parts = clock.finish()
    assert events[0] == "sync"
    assert events[-2:] == ["sync", "read"]
    assert parts == {"draft": 2.0, "verify": 1.0}
    assert total == 5.0  # begin, first mark, three marks, end: one tick each


def test_parts_sum_to_the_total(gold: list[int]) -> None:
    class Slow(ScriptedDrafter):
        def draft(self, view: View, n_slots: int) -> Draft:
            torch.randn(200, 200) @ torch.randn(200, 200)
            return super().draft(view, n_slots)

    method = Method(Slow(gold, perfect), FixedPolicy(block_size=4, block_mode="draft"))
    method.bind(tiny_target())
    trace = decode(tiny_target(), method, PROMPT, sampler(1.0), LONG)
    parts = trace.draft_s + trace.verify_s + trace.policy_s + trace.other_s
    assert parts == pytest.approx(trace.decode_s, rel=0.05)


def test_tokens_are_emitted_as_they_are_committed(gold: list[int]) -> None:
    seen: list[list[int]] = []
    method = Method(ScriptedDrafter(gold, perfect), FixedPolicy(block_size=4, block_mode="draft"))
    method.bind(tiny_target())
    trace = decode(tiny_target(), method, PROMPT, sampler(1.0), 10, emit=seen.append)
    assert [len(piece) for piece in seen] == [1, *trace.committed]
    assert list(itertools.chain(*seen)) == trace.tokens


def test_one_host_sync_per_cycle(gold: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = 0
    original = torch.Tensor.tolist

    def counting(self: torch.Tensor) -> object:
        nonlocal syncs
        syncs += 1
        return original(self)

    monkeypatch.setattr(torch.Tensor, "tolist", counting)
    for name in ("item", "__bool__", "__int__", "__float__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, _forbidden(name))
    policy = FixedPolicy(block_size=4, block_mode="draft")
    method = Method(ScriptedDrafter(gold, perfect), policy)
    method.bind(tiny_target())
    trace = decode(tiny_target(), method, PROMPT, sampler(), 24)
    assert syncs == 1 + len(trace.committed)


def _forbidden(name: str):  # type: ignore[no-untyped-def]
    def refuse(self: torch.Tensor, *args: object) -> None:
        raise AssertionError(f"Tensor.{name} waits for the device inside the loop")

    return refuse


def test_the_drafter_sees_every_verdict(gold: list[int]) -> None:
    verdicts: list[Verdict] = []

    class Watching(ScriptedDrafter):
        def observe(self, verdict: Verdict) -> None:
            verdicts.append(verdict)

    policy = FixedPolicy(block_size=4, block_mode="draft")
    method = Method(Watching(gold, perfect), policy).bind(tiny_target())
    trace = decode(tiny_target(), method, PROMPT, sampler(1.0), 12)
    assert [len(v.tokens) for v in verdicts[:-1]] == trace.committed[:-1]


def test_a_prompt_that_is_not_speculated_on_costs_no_drafter(gold: list[int]) -> None:
    class Declining(FixedPolicy):
        speculates = False

        def block(self, view: View) -> Block:
            return Block(1, 1)

    class Untouched(ScriptedDrafter):
        def start(self, view: View, capacity: int) -> None:
            raise AssertionError("started")

        def observe(self, verdict: Verdict) -> None:
            raise AssertionError("told of a verdict")

    method = Method(Untouched(gold, perfect), Declining(block_size=4, block_mode="draft"))
    method.bind(tiny_target())
    trace = decode(tiny_target(), method, PROMPT, sampler(1.0), 12)
    assert trace.tokens == gold[:12]
    assert set(trace.verified) == {1}


def test_no_second_decode_loop() -> None:
    """The loop and the walk over a replay count cycles: a copy would count on its own."""
    package = Path(__file__).parents[1] / "blockpilot"
    found = [f.name for f in package.rglob("*.py") if "trace.count(" in f.read_text()]
    assert sorted(found) == ["loop.py", "replay.py"]
