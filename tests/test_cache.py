"""The preallocated cache: rollback and compaction keep exactly what they say."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from decoding_kit import KINDS, tiny_target
from torch import Tensor

from blockpilot.decoding.cache import SlabCache
from blockpilot.decoding.target import Target

PACKAGE = Path(__file__).parents[1] / "blockpilot"
IDS = torch.tensor([5, 17, 3, 42, 8, 30, 31, 32, 33, 34, 35, 36])


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def forward(target: Target, ids: Tensor, cache: SlabCache) -> Tensor:
    """Logits [n, V] of all fed positions."""
    return target.forward(ids, cache, n_logits=len(ids)).logits


def fresh(target: Target, ids: Tensor) -> Tensor:
    return forward(target, ids, target.new_cache(len(ids)))


def pointers(cache: SlabCache) -> list[int]:
    return [slab.data_ptr() for layer in cache.layers for slab in (layer.keys, layer.values)]


def state(cache: SlabCache) -> list[Tensor]:
    """Copies of the whole slabs, keys and values of every layer."""
    return [slab.clone() for layer in cache.layers for slab in (layer.keys, layer.values)]


# --- rollback ----------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [0, 1, 4, 7, 8])
def test_after_a_rollback_the_cache_never_saw_the_rest(
    kind: str, attention: str, keep: int
) -> None:
    """Mistral's window of 6 is shorter than the text: a rollback must bring old keys back."""
    target = tiny_target(kind, attention=attention)
    cache = target.new_cache(32)
    forward(target, IDS[:8], cache)
    cache.rollback(keep)
    assert cache.length == cache.get_seq_length() == keep
    other = torch.cat([IDS[:keep], IDS.flip(0)[:5]])
    got = forward(target, other[keep:], cache)
    assert cache.length == keep + 5
    torch.testing.assert_close(got, fresh(target, other)[keep:], atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_several_sequences_lie_beside_each_other(kind: str) -> None:
    """As batched answers and replays need it; a batch of one is not another case."""
    target = tiny_target(kind)
    rows = torch.stack([IDS, IDS.flip(0), IDS.roll(3)])
    cache = SlabCache(4, len(IDS))
    target.model(input_ids=rows[:, :8], cache=cache)
    cache.rollback(6)
    got = target.model(input_ids=rows[:, 6:], cache=cache).logits
    for row, ids in zip(got, rows, strict=True):
        torch.testing.assert_close(row, fresh(target, ids)[6:], atol=1e-12, rtol=1e-9)


def test_rollbacks_can_follow_each_other() -> None:
    target = tiny_target()
    cache = target.new_cache(32)
    forward(target, IDS, cache)
    for keep in (9, 9, 5, 2):
        cache.rollback(keep)
    got = forward(target, IDS[2:], cache)
    torch.testing.assert_close(got, fresh(target, IDS)[2:], atol=1e-12, rtol=1e-9)


def test_a_rollback_moves_no_memory() -> None:
    """O(1): the same buffers with the same content, one integer per layer apart."""
    target = tiny_target()
    cache = target.new_cache(32)
    forward(target, IDS, cache)
    places, before = pointers(cache), state(cache)
    cache.rollback(3)
    assert pointers(cache) == places
    assert all(torch.equal(a, b) for a, b in zip(before, state(cache), strict=True))


@pytest.mark.parametrize("keep", [-1, 13, 100])
def test_a_rollback_to_what_is_not_there_is_refused(keep: int) -> None:
    """In particular -1, which once meant 'all but the last' to a crop."""
    target = tiny_target()
    cache = target.new_cache(32)
    forward(target, IDS, cache)
    with pytest.raises(ValueError, match=f"rollback to {keep} positions, but the cache holds 12"):
        cache.rollback(keep)
    assert cache.length == 12


def test_there_is_one_way_to_roll_back() -> None:
    """No crop of transformers, and only our cache sets a layer's length."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "crop":
                pytest.fail(f"{file.name}:{node.lineno} crops a cache")
            stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if stored and node.attr == "length" and file.name != "cache.py":
                pytest.fail(f"{file.name}:{node.lineno} sets a cache's length")


# --- compaction --------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [[0, 2, 5], [1], [3, 4, 5], [0, 1, 2, 3, 4, 5], []])
def test_compact_moves_keys_and_values_of_the_kept(index: list[int]) -> None:
    target = tiny_target()
    cache = target.new_cache(32)
    forward(target, IDS, cache)
    before = state(cache)
    places = pointers(cache)
    start = 6
    cache.compact(start, torch.tensor(index, dtype=torch.int64))
    end = start + len(index)
    assert cache.length == end
    assert pointers(cache) == places
    for old, new in zip(before, state(cache), strict=True):
        assert torch.equal(new[:, :, :start], old[:, :, :start])
        assert torch.equal(new[:, :, start:end], old[:, :, [start + i for i in index]])


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_compact_equals_a_forward_without_the_dropped(kind: str, attention: str) -> None:
    """Two branches after a prompt of 4, fed side by side as a tree, the second one kept.

    The tree's nodes see the prompt and their own ancestors and stand at prompt + depth, so what is
    kept after compaction is what a plain forward over prompt + branch would have cached.
    """
    target = tiny_target(kind, attention=attention)
    prompt, first, second = IDS[:4], IDS[4:7], IDS[8:11]
    cache = target.new_cache(32)
    forward(target, prompt, cache)
    nodes = torch.stack([first, second], dim=1).flatten()  # depth by depth
    seen = torch.zeros(6, 10, dtype=torch.bool)
    seen[:, :4] = True
    for node in range(6):
        seen[node, [4 + other for other in range(node % 2, node + 1, 2)]] = True
    bias = torch.zeros(6, 10, dtype=torch.float64).masked_fill(~seen, float("-inf"))
    target.model(
        input_ids=nodes[None],
        attention_mask=bias[None, None],
        position_ids=torch.tensor([[4, 4, 5, 5, 6, 6]]),
        cache=cache,
    )
    assert cache.length == 10
    cache.compact(4, torch.tensor([1, 3, 5]))
    got = forward(target, IDS[:2], cache)
    want = fresh(target, torch.cat([prompt, second, IDS[:2]]))[-2:]
    # The eager kernel's softmax computes in float32, whatever the weights are in.
    atol = 1e-12 if attention == "sdpa" else 1e-5
    torch.testing.assert_close(got, want, atol=atol, rtol=1e-9 if attention == "sdpa" else 1e-4)


# --- capacity ----------------------------------------------------------------------------------


def test_a_cache_can_be_filled_to_its_capacity() -> None:
    target = tiny_target()
    cache = target.new_cache(len(IDS))
    forward(target, IDS[:5], cache)
    places = pointers(cache)
    got = forward(target, IDS[5:], cache)
    assert cache.length == cache.capacity == len(IDS)
    assert pointers(cache) == places  # nothing grew
    torch.testing.assert_close(got, fresh(target, IDS)[5:], atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("n_over", [1, 2, 5])
@pytest.mark.parametrize("free", [0, 1, 3])
def test_a_position_past_the_capacity_is_an_error(free: int, n_over: int) -> None:
    """Also one token into a full cache, which a slice assignment would drop without a word."""
    target = tiny_target()
    cache = target.new_cache(6 + free)
    forward(target, IDS[:6], cache)
    with pytest.raises(ValueError, match=f"capacity of {6 + free}"):
        forward(target, IDS[: free + n_over], cache)
    assert cache.length == 6


def test_prompts_do_not_share_a_cache() -> None:
    target = tiny_target()
    one, two = target.new_cache(16), target.new_cache(16)
    forward(target, IDS[:4], one)
    forward(target, IDS[4:8], two)
    got = forward(target, IDS[4:6], one)
    torch.testing.assert_close(got, fresh(target, IDS[:6])[4:], atol=1e-12, rtol=1e-9)
