"""Responses of the target: what the decode loop would say, with features, shard by shard."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from decoding_kit import KINDS, tiny_target, with_stops
from stages_kit import distill_arguments, distill_prompts, performed, response_settings
from torch import Tensor

from blockpilot.decoding.answers import answer
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.target import Target
from blockpilot.distill import __main__ as distill
from blockpilot.distill import prompts as prompting
from blockpilot.distill import responses
from blockpilot.distill.corpus import Corpus, Example
from blockpilot.distill.prompts import requests, self_written
from blockpilot.distill.responses import (
    Request,
    ResponseSettings,
    batches,
    shard_file,
    write_responses,
)
from blockpilot.distill.states import states_of
from blockpilot.drafters.none import NoDrafter
from blockpilot.policies.fixed import FixedPolicy
from blockpilot.prompts.base import DISTILL, Prompt

LAYERS = (1, 2)
BUDGET = 16


def asked(lengths: Sequence[int]) -> list[Request]:
    """Prompts of chosen lengths with ids of their own."""
    made = []
    for number, length in enumerate(lengths):
        ids = [(7 * number + 3 * place) % 50 + 5 for place in range(length)]
        made.append(Request(Prompt(f"s/{number}", "s", (f"text {number}",), DISTILL), ids))
    return made


def limited(limit: int | None) -> Any:
    """What the choice of prompts reads of a stage's configuration."""
    return SimpleNamespace(
        model=SimpleNamespace(thinking=None, template_date="2025-01-01"),
        decoding=SimpleNamespace(max_new_tokens=BUDGET),
        new_drafter=SimpleNamespace(block_size=2),
        responses=SimpleNamespace(limit=limit, limit_of={}),
    )


def settings(temperature: float, layers: tuple[int, ...] = LAYERS) -> ResponseSettings:
    return response_settings(temperature, 3, BUDGET, layers, 8)


def respond(
    target: Target, batch: Sequence[Request], temperature: float
) -> tuple[list[list[int]], list[Tensor]]:
    """Tokens and features of a batch's answers."""
    hashes = [request.prompt.hash for request in batch]
    sampler = KeyedSampler(temperature=temperature, seed=3, prompt_hashes=hashes)
    answers = answer(target, [request.ids for request in batch], sampler, BUDGET, LAYERS)
    for each in answers:
        assert (each.stop_reason == "stop") == (each.tokens[-1] in target.stop_ids)
    return [a.tokens for a in answers], [a.features for a in answers if a.features is not None]


def decoded(target: Target, request: Request, temperature: float) -> list[int]:
    """Plain decoding by the loop."""
    method = Method(NoDrafter(), FixedPolicy(block_size=1, block_mode="draft"))
    method.bind(target)
    sampler = KeyedSampler(temperature=temperature, seed=3, prompt_hashes=[request.prompt.hash])
    return decode(target, method, request.ids, sampler, BUDGET).tokens


def stopping(kind: str) -> Target:
    """A target with enough stop ids for answers of several lengths."""
    return with_stops(tiny_target(kind), *range(0, 61, 9))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_response_is_what_the_decode_loop_gives(kind: str, temperature: float) -> None:
    """Whatever the padding beside it, and also behind a sliding window."""
    target = stopping(kind)
    batch = asked([1, 3, 9, 9, 14, 30])
    answers, _ = respond(target, batch, temperature)
    assert answers == [decoded(target, request, temperature) for request in batch]
    lengths = {len(tokens) for tokens in answers}
    assert len(lengths) > 1, "no answer ended before the budget"


def test_the_head_of_a_batch_reads_rows_that_lie_together() -> None:
    """A CPU multiplies each row of a strided view with its own copy of the matrix."""
    target = stopping("qwen3")
    seen: list[Tensor] = []
    hook = target._head.register_forward_pre_hook(lambda head, read: seen.append(read[0]))
    respond(target, asked([2, 5, 11]), 0.0)
    hook.remove()
    assert seen[0].shape[:2] == (3, 1)
    assert all(each.is_contiguous() for each in seen)


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_of_one_direct_forward_over_all_but_the_last_token(kind: str) -> None:
    target = stopping(kind)
    batch = asked([2, 5, 11])
    answers, features = respond(target, batch, 1.0)
    for request, tokens, found in zip(batch, answers, features, strict=True):
        ids = torch.tensor([*request.ids, *tokens])
        with torch.no_grad():
            output = target.model(ids[None, :-1], output_hidden_states=True)
        wanted = torch.cat([output.hidden_states[layer + 1][0] for layer in LAYERS], dim=-1)
        torch.testing.assert_close(found, wanted)
        computed, hidden = states_of(target, Example("s", ids, len(request.ids), None), LAYERS)
        torch.testing.assert_close(computed, wanted)
        torch.testing.assert_close(hidden, output.hidden_states[-1][0, len(request.ids) - 1 :])


def test_a_corpus_gives_back_what_the_shards_hold(tmp_path: Path) -> None:
    target = with_stops(tiny_target(), *range(0, 61, 4))
    shards = [asked([4, 6, 2, 9]), asked([3, 3, 8, 5, 7])]
    stored = []
    for index, batch in enumerate(shards):
        answers, features = respond(target, batch, 1.0)
        written = write_responses(target, batch, tmp_path, index, settings(1.0))
        assert written == sum(map(len, answers))
        assert write_responses(target, batch, tmp_path, index, settings(1.0)) == 0
        stored += list(zip(batch, answers, features, strict=True))
    corpus = Corpus([shard_file(tmp_path, index) for index in range(2)])
    assert any(len(tokens) == 1 for _, tokens, _ in stored), "an answer that is no example"
    kept = [each for each in stored if len(each[1]) > 1]
    assert len(corpus) == len(kept) < len(stored)
    for index, (request, tokens, found) in enumerate(kept):
        example = corpus[index]
        assert example.ids.tolist() == [*request.ids, *tokens]
        assert example.prompt_length == len(request.ids)
        assert example.features is not None
        assert example.hidden is not None
        assert torch.equal(example.features, found)
        computed = states_of(target, replace(example, features=None), LAYERS)[1]
        torch.testing.assert_close(example.hidden, computed)
    said = [tokens for _, tokens, _ in kept]
    assert corpus.response_tokens == sum(map(len, said))
    assert corpus.counts() == {"s": (len(kept), corpus.response_tokens)}
    assert corpus.response_vocabulary(61).tolist() == sorted({t for a in said for t in a})


def test_without_stored_features_a_corpus_has_none(tmp_path: Path) -> None:
    write_responses(stopping("llama"), asked([4, 6]), tmp_path, 0, settings(0.0, layers=()))
    assert [file.suffix for file in tmp_path.iterdir()] == [".parquet"]
    assert Corpus([shard_file(tmp_path, 0)])[0].features is None


def test_any_prefix_of_the_requests_is_the_same_and_batches_lose_none() -> None:
    prompts = [Prompt(f"s/{n}", "s", (f"text {'x' * n}",), DISTILL) for n in range(50)]
    target = tiny_target()
    few = requests(limited(20), target, prompts, DISTILL)["s"]
    assert few == requests(limited(None), target, prompts[::-1], DISTILL)["s"][:20]
    for ready in (few, few[:7]):
        made = batches(ready, 3)
        assert [len(batch) for batch in made[:-1]] == [3] * (len(made) - 1)
        assert sorted(r.prompt.id for b in made for r in b) == sorted(r.prompt.id for r in ready)


def test_interrupted_answers_continue_with_the_next_missing_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "whole", tmp_path / "parts"]
    for folder in folders:
        folder.mkdir()
    given = [
        distill_arguments(folder, distill_prompts(folder), "training.steps=0") for folder in folders
    ]
    real, answered, room = responses.answer, [], [99]

    def limited(target: Target, batch: Sequence[list[int]], *rest: Any) -> Any:
        if room[0] == 0:
            raise KeyboardInterrupt
        room[0] -= 1
        answered.append(len(batch))
        return real(target, batch, *rest)

    monkeypatch.setattr(responses, "answer", limited)
    performed(distill.run, "distill", *given[0])
    assert answered == [3, 3, 1, 2]
    for _ in range(3):  # each try answers one batch more
        room[0] = 1
        with pytest.raises(KeyboardInterrupt):
            performed(distill.run, "distill", *given[1])
    room[0] = 99
    performed(distill.run, "distill", *given[1])
    assert answered == [3, 3, 1, 2] * 2, "no batch was answered twice"
    files = [
        {
            file.relative_to(folder): file.read_bytes()
            for file in (folder / "distill/run/responses").rglob("*")
            if file.is_file()
        }
        for folder in folders
    ]
    assert files[0] == files[1]
    assert len(files[0]) == 2 * 4 + 2


def chatting() -> Target:
    """A target with turns that end soon."""
    target = Target(tiny_target(padded_rows=239).model, tiny_target().tokenizer)
    target.stop_ids = frozenset(range(0, 300, 8))
    target.tokenizer.chat_template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    )
    return target


def test_prompts_that_the_target_writes_itself_continue_an_empty_user_turn() -> None:
    target = chatting()
    try:
        written, other_batches, other_seed = (
            list(chain.from_iterable(self_written(target, "own", "", numbers, size, 64, seed)))
            for numbers, size, seed in ((range(3), 4, 0), (range(2), 6, 0), (range(3), 4, 1))
        )
        assert written == other_batches
        assert written != other_seed
        second = self_written(target, "own", "", range(1, 2), 6, 64, 0)
        assert written[-len(second[0]) :] == second[0], "as another rank would write it"
        assert len(set(written)) == len(written) > 4
        assert all(text.strip() == text != "" for text in written)
        head = target.tokenizer("<user>", add_special_tokens=False)["input_ids"]
        sampler = KeyedSampler(temperature=1.0, seed=0, prompt_hashes=["own/0"])
        method = Method(NoDrafter(), FixedPolicy(block_size=1, block_mode="draft"))
        method.bind(target)
        tokens = decode(target, method, head, sampler, 64).tokens
        assert tokens[-1] in target.stop_ids
        text = target.tokenizer.decode(tokens[:-1], skip_special_tokens=True)
        assert text.strip() in written
        begun = self_written(target, "own", "Say", range(2), 6, 64, 0)[0]
        assert begun
        assert all(text.startswith("Say") and len(text) > 3 for text in begun)
    finally:
        target.tokenizer.chat_template = None


def test_a_prompt_past_the_context_is_left_out_before_it_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would be refused when the finished drafter is measured."""
    asked: list[list[int]] = []

    def refuses_the_first(target: Target, ids: list[int], budget: int, widest: int) -> str | None:
        asked.append(ids)
        return "too long" if ids == asked[0] else None

    monkeypatch.setattr(prompting, "check_prompt", refuses_the_first)
    given = distill_arguments(tmp_path, distill_prompts(tmp_path), "training.steps=0")
    with caplog.at_level(logging.WARNING):
        performed(distill.run, "distill", *given)
    assert "local: 1 prompts left out, too long for the target" in caplog.text
    rows = [row for file in tmp_path.rglob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert rows
    assert asked[0] not in [row["prompt_ids"] for row in rows]
