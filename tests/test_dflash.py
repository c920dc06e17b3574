"""The DFlash network and its decoding against the slow reference.

Letters in shapes as in reference.py.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import reference as ref
import torch
from decoding_kit import PROMPT, VOCAB, plain, sampler, tiny_target
from torch import Tensor

from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.target import Target
from blockpilot.decoding.types import Block, Draft, Forward, Trace, Verdict, View
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.drafters.dflash_net import DFlashNetwork
from blockpilot.drafters.forms.dflash import DFlashConfig
from blockpilot.policies.fixed import FixedPolicy

TRAINED = 5
MASK = VOCAB - 1
LAYERS = [0, 2]
CASES = [("llama", False), ("llama", True), ("qwen3", False), ("qwen3", True)]
IDS = ["llama", "llama-tied", "qwen3", "qwen3-tied"]
# A drafter that never learned is right by luck alone: seeds and prompts that have some.
LUCKY = {
    ("llama", False): (2, [7, 7, 7, 7]),
    ("llama", True): (15, PROMPT),
    ("qwen3", False): (2, [7, 7, 7, 7]),
    ("qwen3", True): (19, PROMPT),
}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@cache
def weights(kind: str, tied: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Random drafter in the published form whose drafts are accepted now and then."""
    config = tiny_target(kind, tied=tied).config
    return ref.random_drafter(config, LAYERS, 2, TRAINED, MASK, seed=LUCKY[kind, tied][0])


def network(kind: str, tied: bool = False) -> DFlashNetwork:
    state, config = weights(kind, tied)
    net = DFlashNetwork(DFlashConfig.parse(config, "test")).double()
    net.load_state_dict(state)
    return net


def bound(target: Target, kind: str, tied: bool = False) -> DFlashDrafter:
    """Drafter with the reference's weights, as if loaded from a checkpoint."""
    drafter = DFlashDrafter(checkpoint="test", ignore_keys=[], head=None)
    drafter.network = network(kind, tied)
    drafter.bind(target)
    return drafter


def run(
    target: Target,
    drafter: DFlashDrafter,
    block_size: int,
    budget: int,
    choose: KeyedSampler | None = None,
    mode: str = "draft",
    prompt: list[int] = PROMPT,
) -> Trace:
    """Decoding with one size."""
    method = Method(drafter, FixedPolicy(block_size=block_size, block_mode=mode))
    method.bind(target)
    return decode(target, method, prompt, choose or sampler(), budget)


def reference_hidden(
    kind: str, target: Target, ids: Tensor, anchor: int, n_slots: int, tied: bool = False
) -> Tensor:
    """Hidden states [B, D] of the block at `anchor` by the reference."""
    state, config = weights(kind, tied)
    features = ref.reference_features(target.model, ids.tolist(), LAYERS)[:anchor]
    block = torch.tensor([int(ids[anchor])] + [MASK] * (n_slots - 1))
    return ref.reference_dflash(
        state,
        config,
        features,
        target.embed(block),
        torch.arange(anchor, anchor + n_slots),
        torch.arange(anchor),
    )


def text(n: int = 24) -> Tensor:
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(9))


# --- the network -------------------------------------------------------------------------------


@pytest.mark.parametrize("n_slots", [2, TRAINED, 9])
@pytest.mark.parametrize(("kind", "tied"), CASES, ids=IDS)
def test_packed_blocks_equal_the_reference(kind: str, tied: bool, n_slots: int) -> None:
    """The training forward, many blocks over one context; an anchor at 0 has no context at all."""
    target, ids = tiny_target(kind, tied=tied), text()
    features = ref.reference_features(target.model, ids.tolist(), LAYERS)
    anchors = torch.tensor([0, 1, 5, 6, 17, 23])
    masks = torch.full((len(anchors), n_slots - 1), MASK)
    blocks = target.embed(torch.cat([ids[anchors, None], masks], dim=1))
    got = network(kind, tied)(features, blocks, anchors)
    for row, anchor in zip(got, anchors.tolist(), strict=True):
        want = reference_hidden(kind, target, ids, anchor, n_slots, tied)
        torch.testing.assert_close(row, want, atol=1e-5, rtol=1e-5)


def view(target: Target, ids: Tensor, position: int, features: Tensor) -> View:
    nothing = Forward(torch.empty(0), None, torch.empty(0))
    return View(ids[:1], ids[position : position + 1], position, features, nothing)


def inference_hidden(drafter: DFlashDrafter, seen: View, n_slots: int) -> tuple[Tensor, list[int]]:
    """Final hidden states [B - 1, D] behind the anchor as the LM head gets them, and the draft."""
    assert drafter.network is not None
    caught: list[Tensor] = []
    head = drafter._target.logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            drafter._target, "logits", lambda hidden, _: (caught.append(hidden), head(hidden))[1]
        )
        draft = drafter.draft(seen, n_slots)
    return caught[0], draft.tokens.tolist()


@pytest.mark.parametrize(("kind", "tied"), CASES, ids=IDS)
def test_the_cached_context_equals_the_reference(kind: str, tied: bool) -> None:
    """Context appended step by step, as decoding does, with blocks of other sizes in between."""
    target, ids = tiny_target(kind, tied=tied), text()
    features = ref.reference_features(target.model, ids.tolist(), LAYERS)
    drafter = bound(target, kind, tied)
    state, config = weights(kind, tied)
    drafter.start(view(target, ids, 4, features[:4]), capacity=64)
    known = 4
    for anchor, n_slots in ((4, TRAINED), (5, 3), (9, 9), (10, 2), (20, TRAINED)):
        if anchor > known:
            new = ids[known + 1 : anchor + 1]
            drafter.observe(Verdict(new.tolist(), new[-1:], features[known:anchor], ()))
        seen = view(target, ids, anchor, features[known:anchor])
        got, tokens = inference_hidden(drafter, seen, n_slots)
        want = reference_hidden(kind, target, ids, anchor, n_slots, tied)
        torch.testing.assert_close(got, want[1:], atol=1e-5, rtol=1e-5)
        prefix = ids[: anchor + 1].tolist()
        assert tokens == ref.reference_draft(target.model, state, config, prefix, n_slots)
        known = anchor


def test_training_and_inference_are_the_same_function() -> None:
    target, ids = tiny_target("qwen3"), text()
    features = ref.reference_features(target.model, ids.tolist(), LAYERS)
    drafter = bound(target, "qwen3")
    assert drafter.network is not None
    drafter.start(view(target, ids, 11, features[:11]), capacity=64)
    got, _ = inference_hidden(drafter, view(target, ids, 11, features[:11]), TRAINED)
    block = torch.tensor([[int(ids[11])] + [MASK] * (TRAINED - 1)])
    packed = drafter.network(features, target.embed(block), torch.tensor([11]))[0]
    torch.testing.assert_close(got, packed[1:], atol=1e-12, rtol=1e-9)


def test_blocks_do_not_see_each_other() -> None:
    target, ids = tiny_target(), text()
    features = ref.reference_features(target.model, ids.tolist(), LAYERS)
    net = network("llama")
    anchors = torch.tensor([6, 7, 8])
    blocks = target.embed(torch.cat([ids[anchors, None], torch.full((3, 4), MASK)], dim=1))
    together = net(features, blocks, anchors)
    changed = blocks.clone()
    changed[1] += 1.0
    others = net(features, changed, anchors)
    assert torch.equal(others[[0, 2]], together[[0, 2]])
    assert not torch.allclose(others[1], together[1])
    alone = net(features, blocks[2:], anchors[2:])[0]
    torch.testing.assert_close(alone, together[2], atol=1e-12, rtol=1e-9)


def test_a_draft_depends_on_the_context_before_the_anchor_only() -> None:
    """Garbage in features from the anchor on changes nothing; before it, something."""
    target, ids = tiny_target(), text()
    features = ref.reference_features(target.model, ids.tolist(), LAYERS)
    net = network("llama")
    anchors = torch.tensor([9])
    block = target.embed(torch.cat([ids[anchors, None], torch.full((1, 4), MASK)], dim=1))
    base = net(features, block, anchors)
    later, earlier = features.clone(), features.clone()
    later[9:] = -7 * later[9:].flip(1)
    earlier[8] = -7 * earlier[8].flip(0)
    assert torch.equal(net(later, block, anchors), base)
    torch.testing.assert_close(net(features[:9], block, anchors), base, atol=1e-12, rtol=1e-9)
    assert (net(earlier, block, anchors) - base).abs().max() > 1e-3


# --- decoding ----------------------------------------------------------------------------------


def by_position(choose: KeyedSampler) -> Callable[[Tensor, int], int]:
    """The keyed sampler in the reference's form."""
    return lambda logits, position: int(choose(logits[None], torch.tensor([position])))


def settings() -> Iterator[tuple[str, int]]:
    """Modes and sizes that can be."""
    yield from (("draft", size) for size in range(1, 7))
    yield from (("verify", size) for size in range(1, TRAINED + 1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("kind", "tied"), CASES, ids=IDS)
def test_decoding_equals_the_reference(kind: str, tied: bool, temperature: float) -> None:
    """Tokens and accepted lengths, for every size and mode."""
    target, budget, prompt = tiny_target(kind, tied=tied), 10, LUCKY[kind, tied][1]
    state, config = weights(kind, tied)
    drafter = bound(target, kind, tied)
    choose = sampler(temperature)
    lengths: set[int] = set()
    for mode, size in settings():
        want = ref.reference_dflash_decode(
            target.model, state, config, prompt, budget, (), by_position(choose), size, mode
        )
        trace = run(target, drafter, size, budget, choose, mode, prompt)
        assert (trace.tokens, trace.committed) == want, (mode, size)
        lengths |= set(trace.committed)
    assert len(lengths) > 1


def test_the_accepted_lengths_of_the_comparison_vary() -> None:
    """Else the comparison with the reference would be one of refused drafts."""
    lengths: Counter[int] = Counter()
    for kind, tied in CASES:
        target, prompt = tiny_target(kind, tied=tied), LUCKY[kind, tied][1]
        drafter = bound(target, kind, tied)
        for temperature in (0.0, 1.0):
            lengths.update(
                run(target, drafter, 6, 10, sampler(temperature), prompt=prompt).committed
            )
    assert set(lengths) >= {1, 2, 3}
    assert sum(n for length, n in lengths.items() if length > 1) > 0.15 * lengths.total()


class Alternating(FixedPolicy):
    """Asks for a draft in every third cycle only, as a per-cycle policy may."""

    cycle = 0

    def block(self, view: View) -> Block:
        self.cycle += 1
        return Block(1, 1) if self.cycle % 3 else super().block(view)

    def next(self, draft: Draft, view: View) -> Draft:
        return draft


def test_cycles_without_a_draft_lose_no_context() -> None:
    """Each draft equals the reference's, also behind positions that no draft had asked for."""
    target, prompt = tiny_target("qwen3"), LUCKY["qwen3", False][1]
    state, config = weights("qwen3", False)
    drafter = bound(target, "qwen3")
    drafts: list[tuple[int, list[int]]] = []
    inner = drafter.draft

    def spying(seen: View, n_slots: int) -> Draft:
        draft = inner(seen, n_slots)
        drafts.append((seen.position, draft.tokens.tolist()))
        return draft

    drafter.draft = spying  # type: ignore[method-assign]
    method = Method(drafter, Alternating(block_size=TRAINED, block_mode="draft"))
    method.bind(target)
    trace = decode(target, method, prompt, sampler(), 20)
    assert trace.tokens == plain(target, 20, prompt=prompt).tokens
    assert len(drafts) > 3
    for position, tokens in drafts:
        ids = [*prompt, *trace.tokens][: position + 1]
        assert tokens == ref.reference_draft(target.model, state, config, ids, TRAINED)


# --- block modes -------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("kind", "tied"), CASES, ids=IDS)
def test_both_block_modes_equal_plain_decoding(kind: str, tied: bool, temperature: float) -> None:
    target, choose = tiny_target(kind, tied=tied), sampler(temperature)
    wanted = plain(target, 16, choose).tokens
    drafter = bound(target, kind, tied)
    for size in range(2, TRAINED + 1):
        draft = run(target, drafter, size, 16, choose, "draft")
        verify = run(target, drafter, size, 16, choose, "verify")
        assert draft.tokens == verify.tokens == wanted
        assert set(draft.drafted) == {size - 1}
        assert set(verify.drafted) == {TRAINED - 1}
        assert set(draft.verified) == set(verify.verified) == {size}


def test_the_modes_give_different_drafts() -> None:
    """The masks behind a slot are seen by it, so a cut block is not a small block."""
    target, ids = tiny_target(), text()
    features = ref.reference_features(target.model, ids.tolist(), LAYERS)
    drafter = bound(target, "llama")
    differ = 0
    for anchor in range(2, 20):
        seen = view(target, ids, anchor, features[:anchor])
        drafter.start(seen, capacity=64)
        small = drafter.draft(seen, 3)
        cut = drafter.draft(seen, TRAINED).cut(2)
        assert small.tokens.shape == cut.tokens.shape == (2,)
        differ += not torch.equal(small.tokens, cut.tokens)
    assert differ > 0


# --- drafter of another target -----------------------------------------------------------------


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_a_drafter_that_is_never_right_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """The output stays the target's; the warning comes after 256 cycles, over prompts."""
    target = tiny_target("llama", seed=4)
    drafter = bound(target, "llama")
    wanted = plain(target, 150).tokens
    trace = run(target, drafter, 2, 150)
    assert sum(trace.committed) / len(trace.committed) < 1.2
    assert trace.tokens == wanted
    assert not warnings(caplog)
    assert run(target, drafter, 2, 150).tokens == wanted
    run(target, drafter, 2, 20)
    assert len(warnings(caplog)) == 1
    assert "is test a drafter of this target?" in warnings(caplog)[0]


@pytest.mark.parametrize("n_tokens", [1, 2])
def test_a_drafter_that_is_often_right_is_not_suspected(
    n_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Three committed tokens now and then, one in the other cycles: tau 1.25 over 400 cycles."""
    target, ids = tiny_target(), text()
    features = ref.reference_features(target.model, ids.tolist(), LAYERS)
    drafter = bound(target, "llama")
    for cycle in range(400):
        seen = view(target, ids, 4, features[:4])
        drafter.start(seen, capacity=64)
        drafter.draft(seen, 3)
        n = 3 if cycle % 8 == 0 else n_tokens
        drafter.observe(Verdict([0] * n, ids[:1], features[:n], range(1, n)))
    assert not warnings(caplog)


def test_cycles_without_a_draft_are_not_held_against_the_drafter(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = tiny_target()
    drafter = bound(target, "llama")
    for _ in range(2):
        run(target, drafter, 1, 150)
    assert not warnings(caplog)
