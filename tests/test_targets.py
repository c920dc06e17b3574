"""Families of causal LM as targets: what loads keeps the laws, the rest is refused at load."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from decoding_kit import PROMPT, plain, sampler, tiny_target
from stages_kit import composed
from transformers import AutoConfig, AutoModelForCausalLM

from blockpilot.app.target import load_target
from blockpilot.base.errors import UserError
from blockpilot.decoding.answers import answer
from blockpilot.decoding.checks import check_target
from blockpilot.decoding.loading import byte_tokenizer
from blockpilot.decoding.loop import check_prompt
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.target import Target

ROOT = Path(__file__).parents[1]
LOADING = (
    *("apertus", "arcee", "bitnet", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2"),
    *("gemma3_text", "glm", "glm4", "gpt_neox", "gpt_oss", "granite", "granitemoe", "helium"),
    *("llama", "minimax_m2", "mistral", "mixtral", "nanochat", "olmo2", "olmo3", "phi", "phi3"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
)
REFUSED = {
    "qwen3_next": "recurrent state",
    "qwen3_5_text": "recurrent state",
    "jamba": "recurrent state",
    "mamba": "recurrent state",
    "lfm2": "layers of conv",
    "minimax": "layers of linear_attention",
    "gpt2": "do not lie in `layers`",
    "bloom": "do not lie in `layers`",
}
YARN = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


def script() -> ModuleType:
    """scripts/targets.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("targets", ROOT / "scripts/targets.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TARGETS = script()


@pytest.mark.parametrize("family", LOADING)
def test_a_family_that_loads_keeps_the_laws(family: str) -> None:
    """Plain equals `generate`, a drafter equals plain, a replay equals decoding, in float64."""
    assert TARGETS.broken_law(TARGETS.tiny_model(family)) is None


def test_the_laws_of_families_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TARGETS.tiny_model("llama")
    monkeypatch.setattr(model, "generate", lambda ids, **_: torch.cat([ids, ids], dim=1))
    assert TARGETS.broken_law(model) == "plain decoding differs from generate"


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_the_loop_cannot_decode_is_refused_in_one_line(family: str) -> None:
    with pytest.raises(UserError) as caught:
        TARGETS.broken_law(TARGETS.tiny_model(family))
    assert REFUSED[family] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_table_of_families_says_what_the_tests_say() -> None:
    """conf/model/README.md is the script's output."""
    table = (ROOT / "conf/model/README.md").read_text()
    _, loads, _, refused, _ = table.split("\n## ")
    names = loads.split("\n")[2].split(", ")
    assert set(LOADING) <= set(names)
    for family in REFUSED:
        assert family not in names
        assert family in refused.replace(",", " ").replace(":", " ").split()


def test_a_refusal_at_load_comes_before_any_prompt_and_names_the_model(tmp_path: Path) -> None:
    model = TARGETS.tiny_model("gpt2")
    model.float().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    cfg = composed("generate", "run_id=x", "device=cpu", f"model.repo={tmp_path}")
    with pytest.raises(UserError, match=f"^model {tmp_path.name}: its decoder layers"):
        load_target(cfg)


def test_logits_that_are_not_the_heads_output_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("qwen3", seed=3)
    forward = target.model.forward

    def other(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    monkeypatch.setattr(target.model, "forward", other)
    with pytest.raises(UserError, match="not its LM head's output"):
        check_target(target)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_cache_that_is_not_rolled_back_is_refused(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    target = tiny_target("qwen3", seed=4, dtype=dtype)
    check_target(target)
    cache = target.new_cache(16)
    monkeypatch.setattr(type(cache), "rollback", lambda self, keep: None)
    with pytest.raises(UserError, match=r"forget what is rolled back|cannot run it"):
        check_target(target)


# --- one logits for all uses -------------------------------------------------------------------


@pytest.mark.parametrize("family", ["granite", "cohere", "gemma2"])
def test_stored_logits_are_the_models_own(family: str) -> None:
    """Scaled and capped behind the head: in a replay's record as while decoding."""
    model = TARGETS.tiny_model(family)
    target = Target(model, byte_tokenizer())
    assert (target.logit_shape.scale, target.logit_shape.cap) != (1.0, None)
    target.stop_ids = frozenset()
    with torch.inference_mode():
        wanted = model(torch.tensor([PROMPT])).logits[0, -1]
    (said,) = answer(target, [PROMPT], KeyedSampler(prompt_hashes=["prompt"]), 3)
    torch.testing.assert_close(said.prefill_logits, wanted, atol=1e-9, rtol=1e-9)
    trace = plain(target, 3, sampler())
    assert trace.tokens == said.tokens
    rows = target.logits(said.hidden)
    assert rows.argmax(dim=-1).tolist() == said.tokens


def test_a_drafters_marginals_are_scaled_as_the_targets_logits_are() -> None:
    model = TARGETS.tiny_model("granite")
    target = Target(model, byte_tokenizer())
    raw = torch.randn(3, target.config.hidden_size, dtype=torch.float64)
    head = model.get_output_embeddings().weight
    torch.testing.assert_close(target.logits(raw), raw @ head.T / model.config.logits_scaling)
    torch.testing.assert_close(raw @ target.head_rows.T, target.logits(raw))


# --- positions ---------------------------------------------------------------------------------


def rotary_target(**rope: Any) -> Target:
    """A tiny Llama-like target with these rotary parameters and a context of 64."""
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=61,
        max_position_embeddings=64,
        rope_parameters=rope,
    )
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(config, dtype=torch.float64), byte_tokenizer())


@pytest.mark.parametrize(
    "rope",
    [
        YARN | {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_a_prompt_that_can_pass_the_length_where_angles_change_is_skipped(rope: Any) -> None:
    """Keys in the cache would keep the old angles, and every later logit would be wrong."""
    target = rotary_target(**rope)
    check_target(target)
    last = target.hard_end
    assert last is not None
    assert last <= 64
    assert check_prompt(target, [1] * (last - 8), 4, 5) is None
    problem = check_prompt(target, [1] * (last - 8), 4, 6)
    assert problem is not None
    assert f"can pass position {last}" in problem
    with torch.inference_mode():  # up to there a cache and no cache agree, past it they do not
        ids = torch.randint(61, (last + 4,), generator=torch.Generator().manual_seed(0))
        apart = []
        for length in (last, last + 4):
            cache = target.new_cache(80)
            target.forward(ids[: last - 4], cache, n_logits=1)
            cached = target.forward(ids[last - 4 : length], cache, n_logits=1).logits
            whole = target.model(ids[None, :length], use_cache=False).logits[0, -1:]
            apart.append(float((cached - whole).abs().max()))
    assert apart[0] < 1e-9 < 1e-6 < apart[1]


def test_angles_that_never_change_set_no_limit() -> None:
    assert rotary_target(**YARN, rope_type="yarn").hard_end is None
    assert tiny_target().hard_end is None


@pytest.mark.parametrize("token", [61, -1])
def test_a_token_without_an_embedding_is_named(token: int) -> None:
    problem = check_prompt(tiny_target(), [1, token, 2], 4, 1)
    assert problem == f"token {token} has no embedding; the target's are 0..60"
