"""config.json of published drafters, as test inputs, and how to shrink them to a tiny target."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from decoding_kit import VOCAB

from blockpilot.drafters.forms.dflash import PathShape, Sight

Raw = dict[str, Any]
MASK = VOCAB - 1
WEIGHTS = Path(__file__).parents[1] / "blockpilot" / "drafters" / "weights"

QWEN3_8B: Raw = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
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
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LAYERS = [1, 9, 17, 25, 33]
OWN: Raw = {"mask_token_id": 151669, "target_layer_ids": LAYERS}
NESTED = ("dflash_config", "transformer_layer_config")
SIZES: Raw = {
    "block_size": 5,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "layer_types": ["full_attention"] * 2,
    "mask_token_id": MASK,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 4,
    "target_layer_ids": [0, 2],
    "vocab_size": VOCAB,
}


def dflash(own: Raw | None = None, **more: Any) -> Raw:
    """The form of z-lab, with more keys in `dflash_config` and at the top."""
    top: Raw = {"architectures": ["DFlashDraftModel"], "block_size": 16}
    return copy.deepcopy(QWEN3_8B | top | {"dflash_config": OWN | (own or {})} | more)


def without(raw: Raw, *keys: str) -> Raw:
    return {key: value for key, value in raw.items() if key not in keys}


def shipped(name: str) -> Raw:
    raw: Raw = json.loads((WEIGHTS / name / "config.json").read_text())
    return raw


ROPE = {"rope_theta": 1000000.0, "rope_type": "default"}
READ = {
    "z-lab": dflash(auto_map={"AutoModel": "dflash.DFlashDraftModel"}),
    "z-lab, block size nested": without(
        dflash({"block_size": 16}, rope_parameters=ROPE), "block_size", "rope_theta", "rope_scaling"
    ),
    "neutral keys": dflash(
        {"causal_head": False, "input_embedding_scale": 1.0, "final_logit_softcapping": None},
        is_causal=False,
    ),
    "shipped": shipped("smollm2-135m-dflash-b8"),
}
SPARK = {
    "confidence_head_with_markov": True,
    "enable_confidence_head": True,
    "markov_head_type": "vanilla",
    "markov_rank": 256,
    "num_anchors": 512,
}
SLIDING = {
    "layer_types": ["sliding_attention"] * 5,
    "sliding_window": 2048,
    "use_sliding_window": True,
}
DFLASH2 = dflash(
    {
        "block_size": 16,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "final_logit_softcapping": 20.0,
        "output_multiplier": 0.196,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
    architectures=["DFlash2DraftModel"],
    is_causal=False,
    pad_token_id=200018,
    transformers_version="5.15.0",
    **SLIDING,
)
SPECULATORS: Raw = {
    "architectures": ["DFlashDraftModel"],
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "block_size": 8,
    "draft_vocab_size": 32000,
    "mask_token_id": 151669,
    "speculators_config": {"algorithm": "dflash"},
    "speculators_model_type": "dflash",
    "transformer_layer_config": without(QWEN3_8B, "num_target_layers"),
}
DOMINO = {
    "projector_type": "domino",
    "pure_draft_prefix_len": 1,
    "emb_dim": 256,
    "gru_hidden_dim": 1024,
    "shift_label": True,
}
# By form: what is published, and what the description of the network says beside the layers.
BLOCK_FORMS: dict[str, tuple[Raw, Raw]] = {
    "z-lab": (dflash(), {"trained_slots": 16, "plain": True}),
    "z-lab, sliding": (
        dflash(**SLIDING | {"layer_types": ["sliding_attention"] * 4 + ["full_attention"]}),
        {"sights": (Sight(2048, causal=True),) * 4 + (Sight(),)},
    ),
    "z-lab, sliding, not causal": (
        dflash(is_causal=False, **SLIDING),
        {"sights": (Sight(2048),) * 5},
    ),
    "Gemma 4": (
        dflash({"input_embedding_scale": 73.3, "final_logit_softcapping": 30.0}),
        {"embedding_scale": 73.3, "output_multiplier": 1.0, "final_logit_softcapping": 30.0},
    ),
    "DFlash2": (
        DFLASH2,
        {
            "sights": (Sight(2048),) * 5,
            "convolution": (2, 16),
            "path": PathShape("selector", 256, top_k=16),
            "output_multiplier": 0.196,
        },
    ),
    "JetSpec": (dflash({"causal_head": True}), {"sights": (Sight(causal=True),) * 5}),
    "Domino": (
        dflash(DOMINO, emb_dim=256),
        {
            "shift": True,
            "trained_slots": 17,
            "path": PathShape("domino", 256, state=1024, skipped=1),
        },
    ),
    "Domino, filling": (
        dflash(
            without(DOMINO, "shift_label", "pure_draft_prefix_len"),
            architectures=["DominoDraftModel"],
        ),
        {"shift": False, "path": PathShape("domino", 256, state=1024)},
    ),
    "SpecForge dspark": (
        dflash({"projector_type": "dspark", **SPARK}),
        {"shift": True, "path": PathShape("vanilla", 256), "embeds": False},
    ),
    "DeepSpec dspark": (
        without(dflash(architectures=["Qwen3DSparkModel"], **OWN, **SPARK), "dflash_config"),
        {
            "shift": True,
            "path": PathShape("vanilla", 256),
            "embeds": True,
            "draft_vocab_size": 151936,
        },
    ),
    "DeepSpec dspark, gated": (
        without(
            dflash(
                architectures=["Qwen3DSparkModel"],
                **OWN,
                **SPARK | {"markov_head_type": "gated", "enable_confidence_head": False},
            ),
            "dflash_config",
        ),
        {"path": PathShape("gated", 256)},
    ),
    "DeepSpec dspark, rnn": (
        without(
            dflash(
                architectures=["Qwen3DSparkModel"], **OWN, **SPARK | {"markov_head_type": "rnn"}
            ),
            "dflash_config",
        ),
        {"path": PathShape("rnn", 256)},
    ),
    "DeepSpec dflash": (
        without(dflash(architectures=["Qwen3DSparkModel"], markov_rank=0, **OWN), "dflash_config"),
        {"shift": True, "path": None, "embeds": True, "trained_slots": 17},
    ),
    "speculators dflash": (
        SPECULATORS,
        {"target_layer_ids": (1, 9, 17, 25, 33), "draft_vocab_size": 32000, "shift": False},
    ),
    "speculators dflash, sliding": (
        SPECULATORS
        | {
            "sample_from_anchor": True,
            "transformer_layer_config": without(QWEN3_8B, "num_target_layers") | SLIDING,
        },
        {"sights": (Sight(2048, causal=True, from_anchor=True),) * 5, "shift": True},
    ),
    "speculators dflash2": (
        without(SPECULATORS, "draft_vocab_size") | {"speculators_model_type": "dflash2"},
        {
            "convolution": (2, 16),
            "path": PathShape("selector", 256, top_k=16),
            "draft_vocab_size": None,
        },
    ),
    "speculators dspark": (
        SPECULATORS
        | {"speculators_model_type": "dspark", "sliding_window_non_causal": True}
        | SPARK,
        {"path": PathShape("vanilla", 256), "shift": True, "draft_vocab_size": 32000},
    ),
}
# With the key that says so.
NOT_BUILT: dict[str, tuple[Raw, str]] = {
    "SpecForge dspark, another attention": (
        dflash({"projector_type": "dspark", "attention_mode": "x", **SPARK}),
        "dflash_config.attention_mode",
    ),
    "JetSpec of a narrower target": (
        dflash({"causal_head": True, "target_hidden_size": 2048}),
        "dflash_config.target_hidden_size",
    ),
    "DFlash2 with fewer tokens to choose": (
        DFLASH2 | {"selector_vocab_size": 32000},
        "selector_vocab_size",
    ),
    "another projector": (
        dflash({"projector_type": "x"}),
        "dflash_config.projector_type",
    ),
    "a Markov head without its form": (dflash(SPARK), "dflash_config.markov_rank"),
    "another base": (dflash(model_type="llama"), "model_type"),
    "another network": (dflash(architectures=["X"]), "architectures"),
}

EAGLE3 = without(QWEN3_8B, "dtype", "layer_types", "num_target_layers") | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 32000,
    "max_window_layers": 36,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
}
SPECULATORS_HEAD: Raw = {
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": 32000,
    "speculators_model_type": "eagle3",
    "norm_before_residual": True,
    "transformer_layer_config": without(QWEN3_8B, "num_target_layers", "layer_types")
    | {"num_hidden_layers": 1},
}
# By form: what is published, and what the description of the network says.
HEAD_FORMS: dict[str, tuple[Raw, Raw]] = {
    "EAGLE-3": (EAGLE3, {"plain": True}),
    "speculators": (
        SPECULATORS_HEAD | {"eagle_aux_hidden_state_layer_ids": [2, 3, 1], "norm_output": True},
        {
            "form": "speculators eagle3",
            "target_layer_ids": (1, 2, 0),
            "norm_queries": True,
            "norm_before_residual": True,
            "norm_output": True,
        },
    ),
    "DeepSpec": (
        EAGLE3
        | {
            "architectures": ["Qwen3Eagle3Model"],
            "model_type": "qwen3",
            "target_layer_ids": [0, 1, 2],
            "draft_vocab_size": None,
            "num_target_layers": 4,
        },
        {"form": "DeepSpec", "target_layer_ids": (0, 1, 2), "norm_queries": True},
    ),
    "norms of queries": (EAGLE3 | {"model_type": "qwen3"}, {"norm_queries": True}),
    "nvidia": (EAGLE3 | {"norm_before_fc": True}, {"norm_before_fc": True}),
    "norms of taps": (EAGLE3 | {"use_aux_norm": True}, {"fc_norm": True}),
    "two layers": (EAGLE3 | {"num_hidden_layers": 2}, {"own_head": True}),
    "the target's head": (EAGLE3 | {"draft_vocab_size": None}, {"own_head": False}),
}
HEADS_NOT_BUILT: dict[str, tuple[Raw, str]] = {
    "norm_output": (EAGLE3 | {"norm_output": False}, "norm_output"),
    "last state alone": (
        EAGLE3 | {"eagle_config": {"use_aux_hidden_state": False}},
        "eagle_config.use_aux_hidden_state",
    ),
    "peagle": (EAGLE3 | {"parallel_drafting": True}, "parallel_drafting"),
    "speculators peagle": (
        SPECULATORS_HEAD | {"speculators_model_type": "peagle"},
        "speculators_model_type",
    ),
}


def shrunk(raw: Raw, **sizes: Any) -> Raw:
    """The same keys for a tiny target: sizes are replaced where the file has them."""
    small = SIZES | sizes
    return {
        key: shrunk(value, **sizes) if key in NESTED else small.get(key, value)
        for key, value in raw.items()
    }
