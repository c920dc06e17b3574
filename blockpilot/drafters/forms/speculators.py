"""The form of speculators, in which the layers' keys are nested: read and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from blockpilot.base.errors import UserError

_LAYERS = "transformer_layer_config"
_ABOUT = ("speculators_config", "speculators_version")  # say nothing of the network


def lifted(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The same with the layers' keys at the top, less what says nothing of the network.

    Raises UserError where the layers are no mapping, or where both levels have a key with different
    values. `architectures` and `model_type` at the top name the speculator, those below the layers:
    the layers' `model_type` stays.
    """
    layers = raw.get(_LAYERS)
    if not isinstance(layers, Mapping):
        raise UserError(f"drafter {where}: {_LAYERS}={layers} must hold the keys of the layers")
    top = {key: value for key, value in raw.items() if key not in (_LAYERS, *_ABOUT)}
    top.pop("model_type", None)
    inner = {key: value for key, value in layers.items() if key != "architectures"}
    for key in inner.keys() & top.keys():
        if None not in (inner[key], top[key]) and inner[key] != top[key]:
            raise UserError(
                f"drafter {where}: config.json says {key}={top[key]}, but "
                f"{_LAYERS}.{key}={inner[key]}: make them agree"
            )
    return {**inner, **{key: value for key, value in top.items() if value is not None}}


# Of our own config.json: what describes the layers, what only z-lab's or EAGLE's readers want.
_LAYER_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "hidden_act",
    "attention_bias",
    "tie_word_embeddings",
    "rope_parameters",
    "rope_theta",
)


def exported(
    raw: Mapping[str, Any], weights: Mapping[str, Tensor], target: str, architectures: list[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors in speculators' form of a drafter saved here, DFlash or EAGLE-3.

    `target` is the repository of the model that it drafts for, `architectures` its config's.
    Layers are counted from the embeddings there, so ids are one higher.
    """
    kind = "dflash" if "dflash_config" in raw else "eagle3"
    drafts = raw["block_size"] - 1 if kind == "dflash" else 3  # a reader may ask for other numbers
    config: dict[str, Any] = {
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
            "verifier": {"name_or_path": target, "architectures": architectures},
        },
        _LAYERS: {key: raw[key] for key in _LAYER_KEYS},
        "tie_word_embeddings": False,
        "dtype": raw["dtype"],
    }
    if kind == "dflash":
        own = raw["dflash_config"]
        config |= {
            "architectures": ["DFlashDraftModel"],
            "aux_hidden_state_layer_ids": [i + 1 for i in own["target_layer_ids"]],
            "block_size": raw["block_size"],
            "draft_vocab_size": raw["vocab_size"],
            "mask_token_id": own["mask_token_id"],
            "sample_from_anchor": False,
        }
        return config, dict(weights)
    config |= {
        "architectures": ["Eagle3DraftModel"],
        "eagle_aux_hidden_state_layer_ids": raw["eagle_aux_hidden_state_layer_ids"],
        "draft_vocab_size": raw["draft_vocab_size"],
        "norm_before_residual": False,
        "norm_before_fc": False,
    }
    renamed = {
        "layers.0." + key.removeprefix("midlayer.") if key.startswith("midlayer.") else key: tensor
        for key, tensor in weights.items()
    }
    return config, renamed
