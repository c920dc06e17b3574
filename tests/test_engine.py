"""The compiled engine gives the tokens of the eager one; only traced: inductor takes minutes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_kit import KINDS, PROMPT, plain, sampler, tiny_target
from stages_kit import performed, sweep_arguments, write_prompts
from test_law import DRAFTERS, POLICIES, bound_methods
from test_tree_verify import RandomTrees, decoded_trees
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from blockpilot.decoding import compiled
from blockpilot.decoding.compiled import CompiledTarget, StaticCache, StaticFunction
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.target import Target
from blockpilot.decoding.types import Block, Draft, View
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.policies.fixed import FixedPolicy
from blockpilot.policies.tree import TreePolicy
from blockpilot.sweep import __main__ as sweep
from blockpilot.sweep import decoded
from blockpilot.sweep.decoded import DecodedSweep

BUDGET = 12


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr("test_law.SIZES", (1, 5))  # tracing one width takes seconds
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


def compiled_target(kind: str = "llama") -> CompiledTarget:
    target = CompiledTarget(tiny_target(kind))
    target.stop_ids = frozenset()
    return target


def bound(target: Target, policy: Any) -> Method:
    return Method(DFlashDrafter(checkpoint="random", ignore_keys=[], head=None), policy).bind(
        target
    )


def tree_policy(nodes: int) -> TreePolicy:
    return TreePolicy(nodes=nodes, cost=None, fit=None, online=False)


def cases() -> list[Any]:
    """Every drafter with chains, the block drafter with trees and copies too, on one kind; masks
    of a window once, those of trees stand below. An engine sees shapes, not who decides them."""
    drafters = [each for each in DRAFTERS if each.stem != "prompt_lookup"]  # a graph per length
    wanted = {"dflash": ("fixed", "tree", "copy")}
    pairs = [
        (drafter, policy, "llama")
        for drafter in drafters
        for policy in POLICIES
        if policy.stem in wanted.get(drafter.stem, ("fixed",))
    ]
    windowed = [(*pair, "mistral") for *pair, _ in pairs if names(*pair) == "none-fixed"]
    return [pytest.param(*case, id=f"{names(*case[:2])}-{case[2]}") for case in pairs + windowed]


def names(drafter: Path, policy: Path) -> str:
    return f"{drafter.stem}-{policy.stem}"


@pytest.mark.parametrize(("drafter", "policy", "kind"), cases())
def test_same_tokens_as_plain_eager_decoding(drafter: Path, policy: Path, kind: str) -> None:
    eager = tiny_target(kind)
    wanted = {t: plain(eager, BUDGET, sampler(t)).tokens for t in (0.0, 1.0)}
    target = compiled_target(kind)
    for name, method in bound_methods(drafter, policy, target):
        for temperature, tokens in wanted.items():
            trace = decode(target, method, PROMPT, sampler(temperature), BUDGET)
            assert trace.tokens == tokens, (name, temperature)
    if policy.stem == "fixed":
        assert target.compile_s > 0, "else nothing was compiled"


class Replays:
    """A backend that treats outputs as CUDA graphs do: the next run of any graph overwrites them.

    It also demands what they demand: that only tensors with fixed addresses are changed in place,
    and that every run is marked as a step of its own.
    """

    def __init__(self) -> None:
        self.n_graphs = self.n_steps = self.n_runs = 0
        self._returned: list[Tensor] = []

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: Sequence[object], **more: Any
    ) -> Callable[..., list[object]]:
        assert more == {"options": {"triton.cudagraphs": True}}
        self.n_graphs += 1

        def run(*args: object) -> list[object]:
            self.n_runs += 1
            assert self.n_steps == self.n_runs
            for tensor in self._returned:
                tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
            tensors = [each for each in args if isinstance(each, Tensor)]
            movable = [each for each in tensors if not hasattr(each, "_dynamo_static_input_type")]
            before = [each.clone() for each in movable]
            found = [each.clone() if isinstance(each, Tensor) else each for each in graph(*args)]
            assert all(torch.equal(*pair) for pair in zip(movable, before, strict=True))
            self._returned = [each for each in found if isinstance(each, Tensor)]
            return found

        return run

    def mark_step(self) -> None:
        self.n_steps += 1


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    backend = Replays()
    monkeypatch.setattr(compiled, "BACKEND", backend)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", backend.mark_step)
    return backend


def test_graphs_give_plain_decodings_tokens_and_are_as_few_as_widths(replays: Replays) -> None:
    target = compiled_target()
    target.graphs = True
    policies = [FixedPolicy(block_size=size, block_mode="draft") for size in (2, 3, 5)]
    # The tree's draft is the trained block, which none of the three is.
    methods = [bound(target, policy) for policy in (*policies, tree_policy(7))]
    for prompt in (PROMPT, PROMPT[::-1] * 3, [7]):
        for temperature in (0.0, 1.0):
            choose = sampler(temperature)
            tokens = plain(tiny_target(), BUDGET, choose, prompt).tokens
            for method in methods:
                assert decode(target, method, prompt, choose, BUDGET).tokens == tokens
    n_moves = 1  # of the cache, behind a tree whose accepted nodes do not lie side by side
    assert 0 <= replays.n_graphs - 2 * len(methods) <= n_moves


def test_what_a_graph_returned_stays(replays: Replays) -> None:
    target = compiled_target()
    target.graphs = True
    target.capture((1,))
    with torch.inference_mode():
        cache = target.new_cache(20)
        target.forward(torch.tensor(PROMPT), cache, n_logits=1)
        first = target.forward(torch.tensor([3, 4]), cache, n_logits=2)
        target.forward(torch.tensor([5, 6]), cache, n_logits=2)
    for tensor in (first.logits, first.hidden, first.features):
        assert tensor is not None
        assert tensor.isfinite().all()


def test_code_that_is_no_single_graph_is_compiled_in_parts() -> None:
    def broken(x: Tensor) -> Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return 2 * y

    function = StaticFunction(compiled_target(), broken)
    for value in (1.0, 2.0):
        assert function("pair", torch.full((2,), value)).tolist() == [2 * value + 2] * 2


class Resting(FixedPolicy):
    """Asks for a draft in every fourth cycle only."""

    def block(self, view: View) -> Block:
        self.n_cycles = getattr(self, "n_cycles", 0) + 1
        return Block(1, 1) if self.n_cycles % 4 else self.fixed_block


def test_the_compiled_drafter_proposes_what_the_eager_one_does() -> None:
    """Also where more positions became known than a block has slots."""
    found: dict[str, list[Tensor | None]] = {"eager": [], "compiled": []}
    for target in (tiny_target(), compiled_target()):
        method = bound(target, Resting(block_size=3, block_mode="draft"))
        logits = found[target.engine]

        def keep(draft: Draft, view: View, kept: list[Tensor | None] = logits) -> Draft:
            kept.append(draft.logits)
            return draft

        method.policy.next = keep  # type: ignore[method-assign]
        for prompt in (PROMPT, PROMPT[::-1] * 3):
            decode(target, method, prompt, sampler(1.0), 20)
    assert len(found["eager"]) == len(found["compiled"]) > 5
    for eager, other in zip(found["eager"], found["compiled"], strict=True):
        torch.testing.assert_close(eager, other)


@pytest.mark.parametrize("kind", KINDS)
def test_trees_of_any_shape_share_a_graph(kind: str) -> None:
    gold = plain(tiny_target(kind), 18, sampler(1.0)).tokens
    target = compiled_target(kind)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    trace = decoded_trees(target, RandomTrees(gold, 9), 1.0)
    assert trace.tokens == gold
    assert max(trace.committed) > 1
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert graphs == 2, "the forward and the move of what was accepted"


@pytest.mark.parametrize("named", [None, default_cache_dir(), "/mine"])
def test_compiled_code_is_kept_where_the_cache_lies(
    named: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Torch writes its own folder, under /tmp, into the variable when it is imported."""
    monkeypatch.setenv("BLOCKPILOT_CACHE", str(tmp_path))
    if named is None:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    else:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", named)
    compiled_target()
    wanted = named if named == "/mine" else str(tmp_path / "inductor")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == wanted


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
    target = compiled_target()
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
    target = compiled_target()
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
