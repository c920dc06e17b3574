"""Checkpoints that this project writes have the published form, and published configs are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from decoding_kit import VOCAB, tiny_target
from safetensors.torch import load_file

from blockpilot.base.errors import UserError
from blockpilot.drafters.dflash_load import load_network, new_config, random_network, save_network
from blockpilot.drafters.dflash_net import DFlashNetwork, default_layer_ids
from blockpilot.drafters.forms.dflash import DFlashConfig

PER_LAYER = (
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_what_is_saved_has_the_published_form_and_loads(kind: str, tmp_path: Path) -> None:
    target = tiny_target(kind)
    network = random_network(target)
    save_network(network, tmp_path / "new" / "drafter")
    folder = tmp_path / "new" / "drafter"
    assert sorted(f.name for f in folder.iterdir()) == ["config.json", "model.safetensors"]
    weights, config = folder / "model.safetensors", folder / "config.json"
    assert weights.stat().st_mode == config.stat().st_mode, "others may read both"
    stored = load_file(weights)
    depth = network.config.layers.num_hidden_layers
    assert set(stored) == {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        *(f"layers.{i}.{name}" for i in range(depth) for name in PER_LAYER),
    }
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    loaded = load_network(str(folder), target)
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, network.state_dict()[name].to(torch.bfloat16).float())
    same = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")
    for name in same:
        assert getattr(loaded.config, name) == getattr(network.config, name)
    assert loaded.config.layers.rope_parameters == network.config.layers.rope_parameters
    raw = json.loads((folder / "config.json").read_text())
    assert raw["architectures"] == ["DFlashDraftModel"]
    assert raw["model_type"] == "qwen3"
    assert set(raw["dflash_config"]) == {"mask_token_id", "target_layer_ids"}
    save_network(loaded, folder)  # over the old one
    assert all(
        torch.equal(tensor, stored[name])
        for name, tensor in load_file(folder / "model.safetensors").items()
    )


QWEN3_4B = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_the_config_of_the_published_qwen3_4b_drafter_is_understood() -> None:
    config = DFlashConfig.parse(QWEN3_4B, "z-lab/Qwen3-4B-DFlash-b16")
    assert (config.block_size, config.mask_token_id, config.num_target_layers) == (16, 151669, 36)
    assert config.target_layer_ids == default_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert config.layers.rope_parameters["rope_theta"] == 1e6
    with torch.device("meta"):
        network = DFlashNetwork(config)
    shapes = {name: list(tensor.shape) for name, tensor in network.state_dict().items()}
    assert shapes["fc.weight"] == [2560, 5 * 2560]
    assert shapes["layers.4.self_attn.q_proj.weight"] == [4096, 2560]
    assert shapes["layers.4.self_attn.k_proj.weight"] == [1024, 2560]
    assert shapes["layers.0.self_attn.q_norm.weight"] == [128]
    assert shapes["layers.0.mlp.down_proj.weight"] == [2560, 9728]
    again = DFlashConfig.parse(config.published(), "again")
    assert again.published() == config.published()


@pytest.mark.parametrize(
    ("depth", "n", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (36, 1, (18,)),
        (30, 3, (1, 14, 27)),
        (4, 1, (2,)),
        (28, 2, (1, 25)),
    ],
)
def test_default_layers_are_evenly_spaced(depth: int, n: int, ids: tuple[int, ...]) -> None:
    assert default_layer_ids(depth, n) == ids


def test_more_layers_than_a_target_has_room_for_are_refused() -> None:
    with pytest.raises(UserError, match=r"n_target_layers=2.*room for 1\.\.1"):
        new_config(
            tiny_target(), n_layers=1, n_target_layers=2, block_size=4, mask_token_id=VOCAB - 1
        )


@pytest.mark.parametrize("written_by", [4, 5])
def test_scaled_rotary_embeddings_are_kept(written_by: int) -> None:
    """As for Llama 3.1, in the forms that transformers 4 and 5 write."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    raw = {key: value for key, value in QWEN3_4B.items() if not key.startswith("rope_")}
    if written_by == 4:
        raw |= {"rope_scaling": scaling, "rope_theta": 500000.0}
    else:
        raw |= {"rope_parameters": {**scaling, "rope_theta": 500000.0}}
    config = DFlashConfig.parse(raw, "test")
    assert config.layers.rope_parameters == {**scaling, "rope_theta": 500000.0}
    again = DFlashConfig.parse(config.published(), "again")
    assert again.layers.rope_parameters == config.layers.rope_parameters
