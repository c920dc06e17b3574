"""The native engine: the kernels give the model's own numbers, and the same bits at every width."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from decoding_kit import PROMPT, plain, sampler, tiny_target
from test_law import DRAFTERS, POLICIES, bound_methods
from transformers import AutoModelForCausalLM

from blockpilot.base.errors import UserError
from blockpilot.decoding.checks import check_target
from blockpilot.decoding.engines import with_engine
from blockpilot.decoding.loop import decode
from blockpilot.decoding.native import compiler
from blockpilot.decoding.native.stack import MOST_ROWS, choose, linear
from blockpilot.decoding.native.target import NativeTarget
from blockpilot.decoding.target import Target
from blockpilot.decoding.types import Branches

pytestmark = pytest.mark.skipif(compiler.compiler() is None, reason="no C++ compiler")

BUDGET = 12


@pytest.fixture(autouse=True)
def three_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_law.SIZES", (1, 2, 5))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.stem)
@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda p: p.stem)
def test_same_tokens_as_plain_eager_decoding(drafter: Path, policy: Path) -> None:
    eager = tiny_target()
    wanted = {t: plain(eager, BUDGET, sampler(t)).tokens for t in (0.0, 1.0)}
    target = NativeTarget(eager)
    target.stop_ids = frozenset()
    for name, method in bound_methods(drafter, policy, target):
        for temperature, tokens in wanted.items():
            trace = decode(target, method, PROMPT, sampler(temperature), BUDGET)
            assert trace.tokens == tokens, (name, temperature)


KINDS = [("llama", False), ("llama", True), ("qwen2", False), ("qwen3", False)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize(("kind", "tied"), KINDS, ids=lambda v: str(v))
def test_logits_and_features_are_the_models_own(kind: str, tied: bool) -> None:
    eager = tiny_target(kind, tied=tied)
    native = NativeTarget(eager)
    check_target(native)  # against forwards without a cache, blocks and trees
    found = []
    for target in (eager, native):
        target.capture((2, 0, 2))
        cache = target.new_cache(40)
        with torch.inference_mode():
            target.forward(torch.tensor(PROMPT), cache, n_logits=1)
            found.append(target.forward(torch.tensor([5, 9, 37, 3, 8]), cache, n_logits=3))
    for name in ("logits", "features", "hidden"):
        wanted, got = (getattr(each, name) for each in found)
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-3)  # its norms are float32's


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_a_tokens_logits_are_the_same_bits_in_a_row_a_block_and_a_tree(dtype: torch.dtype) -> None:
    target = NativeTarget(tiny_target(dtype=dtype))
    target.capture((1,))
    cache = target.new_cache(64)
    target.forward(torch.tensor(PROMPT), cache, n_logits=1)
    ids = torch.arange(20, 33)
    rows = [target.forward(each[None], cache, n_logits=1) for each in ids]
    wanted = torch.cat([row.logits for row in rows])
    for n in (2, 3, 4, 5, 8, 13):
        cache.rollback(len(PROMPT))
        block = target.forward(ids[:n], cache, n_logits=n)
        assert torch.equal(block.logits, wanted[:n]), n
        assert block.features is not None
        assert torch.equal(block.features, torch.cat([row.features for row in rows[:n]])), n
    # The same text as every second node of a tree, beside a branch of other tokens.
    parents = [0, 0, *(node - 2 for node in range(3, 2 * len(ids) - 1))]
    tree = torch.cat([ids[:1], torch.stack([ids[1:], ids[1:] + 20], dim=1).flatten()])
    cache.rollback(len(PROMPT))
    branches = Branches(parents, torch.device("cpu"))
    found = target.forward(tree, cache, n_logits=len(tree), branches=branches)
    mine = [0, *range(1, len(tree), 2)]
    assert torch.equal(found.logits[mine], wanted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bfloat16_text_is_plain_decodings_whatever_the_method(temperature: float) -> None:
    """Elsewhere a block's rounding differs from one token's, and the texts part."""
    eager = tiny_target(dtype=torch.bfloat16)
    target = NativeTarget(eager)
    target.stop_ids = frozenset()
    for seed in range(4):
        wanted = plain(target, 40, sampler(temperature, seed)).tokens
        for drafter in DRAFTERS:
            for name, method in bound_methods(drafter, POLICIES[0], target):
                trace = decode(target, method, PROMPT, sampler(temperature, seed), 40)
                assert trace.tokens == wanted, (drafter.stem, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 7, 5), (2, 16, 33), (5, 96, 64), (11, 130, 19)], ids=str)
def test_a_product_of_few_rows_is_torchs(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    rows, width, out = shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, width, dtype=dtype, generator=generator)
    weight = torch.randn(out, width, dtype=dtype, generator=generator)
    bias = torch.randn(out, dtype=dtype, generator=generator)
    wanted = x.double() @ weight.double().T + bias.double()
    got = linear(x, weight, bias)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_kernels_choose_the_keyed_samplers_tokens(dtype: torch.dtype) -> None:
    for seed, temperature in enumerate((0.01, 0.7, 1.0, 3.0, 100.0)):
        for vocab in (3, 1003, 20_000):
            keyed = sampler(temperature, seed)
            generator = torch.Generator().manual_seed(seed)
            logits = 4 * torch.randn(24, vocab, dtype=dtype, generator=generator)
            logits[:8] = 0  # then the noise alone decides
            logits[8:12, 1:] = -torch.inf
            positions = torch.arange(24) + 1000 * seed
            wanted = keyed(logits, positions)
            found = choose(logits, positions, keyed.keys[0], temperature)
            assert torch.equal(found, wanted), (temperature, vocab)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_told(wrong: float) -> None:
    logits = torch.zeros(3, 50)
    logits[1, 49] = wrong
    found = choose(logits, torch.arange(3), sampler(1.0).keys[0], 1.0)
    assert found[1] == -1
    assert min(found[0], found[2]) >= 0
    logits[0] = -torch.inf
    assert choose(logits, torch.arange(3), sampler(1.0).keys[0], 1.0)[0] == -1


@torch.inference_mode()
def test_prefills_and_wide_forwards_are_the_models_own_code() -> None:
    eager = tiny_target(dtype=torch.float32)
    native = NativeTarget(eager)
    wide = torch.arange(MOST_ROWS + 1) % 60
    for ids in (torch.tensor(PROMPT), wide):
        found = []
        for target in (eager, native):
            cache = target.new_cache(200)
            if ids is wide:
                target.forward(torch.tensor(PROMPT), cache, n_logits=1)
            found.append(target.forward(ids, cache, n_logits=2).logits)
        assert torch.equal(*found)


def changed(**values: object) -> Target:
    """A tiny target whose configuration says something else."""
    target = tiny_target()
    target = Target(target.model, target.tokenizer)
    target.config = copy.deepcopy(target.config)
    for name, value in values.items():
        setattr(target.config, name, value)
    return target


def with_mlp_bias() -> Target:
    """A Llama whose feed-forward has biases, which the kernels do not read."""
    config = copy.deepcopy(tiny_target().model.config)
    config.mlp_bias = True
    return Target(AutoModelForCausalLM.from_config(config), tiny_target().tokenizer)


def test_a_target_that_the_kernels_would_misread_is_refused_by_trying_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever a configuration does not tell shows in the logits."""
    model = copy.deepcopy(tiny_target().model)
    model.config.rms_norm_eps = 100.0  # its norms were made with another
    odd = Target(model, tiny_target().tokenizer)
    with pytest.raises(UserError, match="llama: "):
        with_engine(odd, "native")
    assert with_engine(odd, "auto").engine == "eager"
    assert "engine eager, since the native one cannot be made" in caplog.text


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (
            lambda: tiny_target("olmo2"),
            "it knows models of llama, mistral, qwen2, qwen3, not olmo2",
        ),
        (lambda: tiny_target("mistral"), "it knows no sliding windows"),
        (lambda: changed(hidden_act="gelu"), "it knows the activation silu, not gelu"),
        (lambda: tiny_target(dtype=torch.float16), "it knows float32, bfloat16, float64, not flo"),
        (lambda: with_mlp_bias(), "it knows no mlp.down_proj.bias"),
    ],
    ids=["family", "window", "activation", "dtype", "bias"],
)
def test_a_target_that_the_kernels_do_not_know_is_refused_and_auto_stays_eager(
    target: Callable[[], Target], reason: str
) -> None:
    with pytest.raises(UserError, match=f"engine=native: {reason}"):
        with_engine(target(), "native")
    assert with_engine(target(), "auto").engine == "eager"
    assert with_engine(tiny_target(), "auto").engine == "native"


def test_without_a_compiler_auto_is_eager_and_native_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert with_engine(tiny_target(), "auto").engine == "eager"
    with pytest.raises(UserError, match="engine=native: no C\\+\\+ compiler is found"):
        NativeTarget(tiny_target())


def test_a_compiler_that_fails_is_told_in_one_line_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'kernels.cpp: no such luck' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("BLOCKPILOT_CACHE", str(tmp_path / "cache"))
    compiler.kernels.cache_clear()
    try:
        with pytest.raises(UserError, match=r"cannot compile the kernels \(kernels.cpp: no such"):
            compiler.kernels()
        assert with_engine(tiny_target(), "auto").engine == "eager"
        assert "engine eager, since the native one cannot be made" in caplog.text
    finally:
        compiler.kernels.cache_clear()
    assert not list((tmp_path / "cache").iterdir())


def test_the_kernels_are_compiled_once_for_a_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BLOCKPILOT_CACHE", str(tmp_path))
    caplog.set_level("INFO")
    for _ in range(2):
        compiler.kernels.cache_clear()
        compiler.kernels()
    assert caplog.text.count("compiled the kernels") == 1
    assert len(list(tmp_path.glob("kernels-*.so"))) == 1
