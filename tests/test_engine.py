"""The compiled engine gives the tokens of the eager one; only traced: inductor takes minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_kit import PROMPT, plain, sampler, tiny_target
from stages_kit import performed, sweep_arguments, write_prompts
from test_law import DRAFTERS, POLICIES, bound_methods

from blockpilot.decoding import compiled
from blockpilot.decoding.compiled import CompiledTarget, StaticCache
from blockpilot.decoding.loop import decode
from blockpilot.decoding.target import Target
from blockpilot.sweep import __main__ as sweep
from blockpilot.sweep import decoded
from blockpilot.sweep.decoded import DecodedSweep

BUDGET = 12


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr("test_law.SIZES", (1, 5))  # tracing one width takes seconds


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.stem)
@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda p: p.stem)
def test_same_tokens_as_plain_eager_decoding(drafter: Path, policy: Path, kind: str) -> None:
    if drafter.stem == "prompt_lookup":
        pytest.skip("drafts of every length: a graph for each")
    eager = tiny_target(kind)
    wanted = {t: plain(eager, BUDGET, sampler(t)).tokens for t in (0.0, 1.0)}
    target = CompiledTarget(eager)
    target.stop_ids = frozenset()
    for name, method in bound_methods(drafter, policy, target):
        for temperature, tokens in wanted.items():
            trace = decode(target, method, PROMPT, sampler(temperature), BUDGET)
            assert trace.tokens == tokens, (name, temperature)
    if policy.stem == "fixed":
        assert target.compile_s > 0, "else nothing was compiled"


def test_a_shape_is_compiled_once() -> None:
    target = CompiledTarget(tiny_target())
    target.stop_ids = frozenset()
    texts, graphs = [], []
    for seed in range(3):
        texts.append(tuple(plain(target, 10, sampler(1.0, seed)).tokens))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(set(texts)) == 3
    assert graphs[0] == graphs[1] == graphs[2], "one width, one bucket, whatever the prompt"


def test_a_model_has_one_tap_whoever_opens_it() -> None:
    """A forgotten one would keep every state, and be traced by a compiled engine at every step."""
    first = tiny_target(seed=92)
    second = Target(first.model, first.tokenizer)
    for target in (first, second):
        target.capture((1,))
        assert len(target.layers[1]._forward_hooks) == 1
    second.capture(())
    assert not first.layers[1]._forward_hooks


def test_the_cache_of_a_bucket_is_reused_and_emptied() -> None:
    target = CompiledTarget(tiny_target())
    first = target.new_cache(100)
    target.forward(torch.tensor(PROMPT), first, n_logits=1)
    assert first.length == len(PROMPT)
    assert target.new_cache(256) is first
    assert first.length == 0
    assert target.new_cache(257).capacity == 512
    with pytest.raises(ValueError, match="rollback to 3 positions, but the cache holds 0"):
        first.rollback(3)


@torch.no_grad()
def test_compact_keeps_the_chosen_positions() -> None:
    target = CompiledTarget(tiny_target())
    ids = torch.tensor([5, 17, 3, 42, 8, 9, 30])
    cache: Any = target.new_cache(20)
    target.forward(ids, cache, n_logits=1)
    kept = [layer.keys[:, :, [0, 1, 2, 4, 6]].clone() for layer in cache.layers]
    cache.compact(2, torch.tensor([0, 2, 4]))
    assert cache.length == 5
    for layer, keys in zip(cache.layers, kept, strict=True):
        assert torch.equal(layer.keys[:, :, :5], keys)
        assert layer.cumulative_length == 5
    assert isinstance(cache, StaticCache)


def test_no_row_holds_the_seconds_of_a_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer prompt than the warm-up's has a larger cache, for which code is compiled anew."""
    file = write_prompts(tmp_path / "prompts.jsonl", ["one"])
    spent: list[float] = []
    kept: list[float] = []

    def watched(target: Any, *rest: Any, **more: Any) -> Any:
        before = target.compile_s
        trace = decode(target, *rest, **more)
        spent.append(target.compile_s - before)
        return trace

    def measured(self: Any, turn: Any, name: str, budget: int) -> Any:
        trace = real(self, turn, name, budget)
        kept.append(spent[-1])
        return trace

    real = DecodedSweep._decoded
    monkeypatch.setattr(decoded, "decode", watched)
    monkeypatch.setattr(DecodedSweep, "_decoded", measured)
    monkeypatch.setattr(DecodedSweep, "_warm_up", lambda self, prompts: None)
    performed(sweep.run, "sweep", *sweep_arguments(tmp_path, file, "engine=compiled"))
    assert len(kept) == 4, "plain and three sizes"
    assert kept == [0.0] * 4
    assert len(spent) > 4, "else nothing was compiled"


def test_a_sweep_with_the_compiled_engine_has_the_same_rows(tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "prompts.jsonl", ["one", ["two", "and then"]])
    frames = {}
    for name in ("eager", "compiled"):
        given = sweep_arguments(tmp_path, file, f"engine={name}", f"run_id={name}")
        frames[name] = performed(sweep.run, "sweep", *given)
        assert set(frames[name]["engine"]) == {name}
    for column in ("output_sha256", "method", "turn"):
        assert frames["eager"][column].equals(frames["compiled"][column])
    pairs = zip(frames["eager"]["committed"], frames["compiled"]["committed"], strict=True)
    assert all(list(a) == list(b) for a, b in pairs)
