"""Prompt lookup by hand and in the loop; the output law finds it by globbing."""

from __future__ import annotations

import random

import pytest
from decoding_kit import plain, sampler, tiny_target

from blockpilot.base.errors import UserError
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.text import IndexedText
from blockpilot.drafters.prompt_lookup import PromptLookupDrafter
from blockpilot.policies.fixed import FixedPolicy


def followers(text: list[int], max_ngram: int) -> list[int]:
    """Grown token by token, as decoding does."""
    indexed = IndexedText(max_ngram)
    for token in text:
        indexed.extend([token])
    return indexed.copy(len(text)).tokens


def test_the_longest_ending_wins_then_the_latest_place() -> None:
    assert followers([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 3) == [9, 2, 3, 8, 1, 2, 3]
    assert followers([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2) == [8, 1, 2, 3]
    assert followers([5, 5], 3) == [5]
    assert followers([1, 2, 3], 3) == []
    assert followers([7], 3) == []


def test_a_text_that_repeats_the_prompt_is_drafted_right() -> None:
    """The target's own text, shown to it once more as a prompt, is what a lookup finds."""
    target = tiny_target()
    prompt = [5, 17, 3]
    for _ in range(3):
        prompt += plain(target, 12, prompt=prompt).tokens
    wanted = plain(target, 24, prompt=prompt)
    policy = FixedPolicy(block_size=None, block_mode="draft")
    method = Method(PromptLookupDrafter(max_ngram=3, block_size=6), policy)
    method.bind(target)
    trace = decode(target, method, prompt, sampler(), 24)
    assert trace.tokens == wanted.tokens
    assert max(trace.drafted) <= 5
    assert [v - 1 for v in trace.verified] == trace.drafted
    assert policy.block_size == 6
    assert all(c <= v for c, v in zip(trace.committed, trace.verified, strict=True))


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(UserError, match=r"drafter.max_ngram=0: allowed are numbers >= 1"):
        PromptLookupDrafter(max_ngram=0, block_size=8)
    with pytest.raises(UserError, match=r"drafter.block_size=1: allowed are numbers >= 2"):
        PromptLookupDrafter(max_ngram=3, block_size=1)


def test_an_index_finds_what_a_search_finds() -> None:
    def searched(text: list[int], max_ngram: int) -> list[int]:
        for n in range(min(max_ngram, len(text) - 1), 0, -1):
            for start in range(len(text) - n - 1, -1, -1):
                if text[start : start + n] == text[-n:]:
                    return text[start + n :]
        return []

    draw = random.Random(0)
    for _ in range(200):
        text = [draw.randrange(3) for _ in range(draw.randrange(1, 30))]
        max_ngram = draw.randrange(1, 6)
        assert followers(text, max_ngram) == searched(text, max_ngram), (text, max_ngram)
