"""Published forms of EAGLE-3 heads: read whole, and under the output law."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forms_kit as forms
import pytest
import torch
from decoding_kit import PROMPT, VOCAB, plain, sampler, tiny_target
from safetensors.torch import save_file
from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.decoding.loop import Method, decode
from blockpilot.decoding.native import compiler
from blockpilot.decoding.native.target import NativeTarget
from blockpilot.drafters.__main__ import described
from blockpilot.drafters.eagle3 import Eagle3Drafter
from blockpilot.drafters.eagle3_net import Eagle3Network
from blockpilot.drafters.forms.eagle3 import Eagle3Config, head_tensors
from blockpilot.policies.fixed import FixedPolicy

ROWS = 31


def tiny(name: str) -> dict[str, Any]:
    """A form's config.json for a tiny target."""
    published = forms.HEAD_FORMS[name][0]
    n_layers = published.get("num_hidden_layers", 1)
    rows = ROWS if published.get("draft_vocab_size") else None
    raw = forms.shrunk(published, num_hidden_layers=n_layers, draft_vocab_size=rows)
    return raw | ({"target_layer_ids": [0, 1, 2]} if name == "DeepSpec" else {})


def shapes(raw: dict[str, Any], n_taps: int = 3) -> dict[str, Tensor]:
    """The tensors that a config.json is read beside."""
    layers = raw.get("transformer_layer_config", raw)
    width, rows = layers["hidden_size"], raw.get("draft_vocab_size")
    heads = layers["num_attention_heads"] * layers["head_dim"]
    with torch.device("meta"):
        found = {
            "fc.weight": torch.empty(width, n_taps * width),
            "midlayer.self_attn.q_proj.weight": torch.empty(heads, 2 * width),
        }
        if rows is not None or raw.get("architectures") == ["Qwen3Eagle3Model"]:
            found["lm_head.weight"] = torch.empty(rows or layers["vocab_size"], width)
        if raw.get("architectures") == ["Qwen3Eagle3Model"]:
            found["embed_tokens.weight"] = torch.empty(layers["vocab_size"], width)
    return found


def write(name: str, folder: Path) -> str:
    """A checkpoint of a form with random weights, its layers counted from `layers.0`."""
    raw = tiny(name)
    network = Eagle3Network(Eagle3Config.parse(raw, shapes(raw), name, 4))
    draw = torch.Generator().manual_seed(3)
    weights = {}
    for key, tensor in network.state_dict().items():
        if tensor.is_floating_point():
            scale = 0.3 if tensor.dim() > 1 else 0.2
            tensor.copy_(scale * torch.randn(tensor.shape, generator=draw) + (tensor.dim() == 1))
        elif key == "d2t" and len(tensor) < VOCAB:
            tensor.copy_(torch.arange(len(tensor)) * (VOCAB // ROWS - 1))
        elif key in ("d2t", "t2d"):
            continue  # follow from the whole vocabulary
        weights[key.replace("midlayer.", "layers.0.")] = tensor.contiguous()
    weights.pop("t2d", None)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(weights, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("name", forms.HEAD_FORMS)
def test_a_published_head_is_read_whole(name: str) -> None:
    raw, said = tiny(name), forms.HEAD_FORMS[name][1]
    config = Eagle3Config.parse(raw, shapes(raw), name, 4)
    for field, value in said.items():
        assert getattr(config, field) == value, field
    assert config.layer.num_hidden_layers == (2 if name == "two layers" else 1)
    assert json.dumps(config.identity())
    with pytest.raises(UserError, match="fancy=1, which is not known here"):
        Eagle3Config.parse({**raw, "fancy": 1}, shapes(raw), name, 4)


def test_heads_that_differ_are_told_apart() -> None:
    found = {
        json.dumps(Eagle3Config.parse(tiny(name), shapes(tiny(name)), name, 4).identity())
        for name in forms.HEAD_FORMS
    }
    assert len(found) == len(forms.HEAD_FORMS)


@pytest.mark.parametrize("name", forms.HEAD_FORMS)
def test_a_head_is_under_the_law(name: str, tmp_path: Path) -> None:
    folder = write(name, tmp_path / "head")
    target: Any = tiny_target()
    for engine in ("eager", "native"):
        if engine == "native":
            if compiler.compiler() is None:
                continue
            target = NativeTarget(target)
            target.stop_ids = frozenset()
        proposed = []
        for top_k, temperature in ((3, 1.0), (1, 0.0)):
            drafter = Eagle3Drafter(
                checkpoint=folder, ignore_keys=[], depth=3, top_k=top_k, block_size=7
            )
            method = Method(drafter, FixedPolicy(block_size=7, block_mode="draft"))
            method.bind(target)
            choose = sampler(temperature)
            trace = decode(target, method, PROMPT, choose, 16)
            assert trace.tokens == plain(tiny_target(), 16, choose).tokens
            proposed.append(trace.committed)
        assert all(proposed)
    assert dict(described(folder))["use"].startswith("drafter=eagle3")


def test_older_names_of_tensors_are_understood() -> None:
    one = torch.ones(1)
    named = {
        "model.layers.0.hidden_norm.weight": one,
        "layers.2.hidden_norm.weight": one,
        "layers.1.mlp.up_proj.weight": one,
        "aux_norm_mid.weight": one,
        "midlayer.self_attn.rotary_emb.inv_freq": one,
    }
    assert set(head_tensors(named, "x")) == {
        "midlayer.hidden_norm.weight",
        "layers.2.input_layernorm.weight",
        "layers.1.mlp.up_proj.weight",
        "fc_norm.1.weight",
    }
    with pytest.raises(UserError, match="two tensors are midlayer"):
        head_tensors({"layers.0.a": one, "midlayer.a": one}, "x")
