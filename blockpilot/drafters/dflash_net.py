"""The DFlash network (arXiv 2602.06036): one block, bidirectional, with the context as keys/values.

It carries the published tensor names, so published checkpoints load as they are and trained ones
are saved in the same form. Embedding and LM head are the target's and not part of it.

Letters: C context positions, A blocks side by side, B slots of a block, D width, n target layers
read, H query heads, G key/value heads, d head width, R sequences, L layers of the drafter.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from blockpilot.drafters.forms.config import ConfigReader, check_layers
from blockpilot.drafters.layers import SwiGLU, merged, packed_attention, rotate, split_heads

_SHAPE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_NUMBERS = (*_SHAPE_KEYS, "vocab_size", "num_target_layers")
_OWN_KEYS = ("block_size", "mask_token_id", "target_layer_ids")  # nested, in old files at the top

# What relatives of the network do otherwise, with the values at which they do the same.
_BUILT: dict[str, tuple[Any, ...]] = {
    "is_causal": (False,),
    "causal": (False,),
    "causal_head": (False,),
    "use_swa": (False,),
    "swa_window_size": (),
    "attention_sink_bias": (False,),
    "input_embedding_scale": (1,),
    "output_multiplier": (1,),
    "final_logit_softcapping": (),
    "sample_from_anchor": (False,),
    "shift_label": (False,),
    "markov_rank": (0,),
    "projector_type": (),
}


@dataclass(frozen=True)
class DFlashConfig:
    """A drafter's identity: the shape of its layers and what it reads from which target."""

    layers: Qwen3Config
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str, ignored: Sequence[str] = ()) -> DFlashConfig:
        """From a published config.json: nested `dflash_config`, older `draft_config`, or flat.

        `ignored` are keys that count as absent. Raises UserError with the key that is missing, out
        of range, or of a network that is not built.
        """
        reader = ConfigReader(raw, where, ignored)
        reader.expect("architectures", ["DFlashDraftModel"])  # DeepSpec's is marked by nothing else
        reader.expect("model_type", "qwen3")
        own = {key: reader.take(*_places(key)) for key in _OWN_KEYS}
        for key, built in _BUILT.items():
            reader.expect(_places(key), *built)
        keys = (*_NUMBERS, "head_dim", "rms_norm_eps", "max_position_embeddings")
        shape = {key: reader.take(key) for key in keys}
        shape["rope_parameters"] = reader.rope()
        reader.window(shape["num_hidden_layers"])
        reader.refuse_unread()
        reader.whole(shape, _NUMBERS, least=1)
        reader.whole(own, ["block_size"], least=2)
        reader.whole(own, ["mask_token_id"], least=None)  # the target's rows bound it
        if "rope_theta" not in shape["rope_parameters"]:
            reader.refuse("config.json lacks the key rope_theta")
        depth = shape.pop("num_target_layers")
        ids = reader.layer_ids("target_layer_ids", own["target_layer_ids"])
        if any(b <= a for a, b in itertools.pairwise(ids)):
            reader.refuse(f"target_layer_ids={list(ids)} must be increasing")
        check_layers(ids, depth, where)
        layers = Qwen3Config(**reader.layer_shape(shape))
        return cls(layers, own["block_size"], own["mask_token_id"], ids, depth)

    def published(self) -> dict[str, Any]:
        """The config.json of the published form."""
        layers = self.layers.to_dict()
        keep = (*_SHAPE_KEYS, "head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings")
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **{key: layers[key] for key in keep},
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "rope_parameters": layers["rope_parameters"],
            "rope_theta": layers["rope_parameters"]["rope_theta"],
            "dtype": "bfloat16",
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
        }


def _places(key: str) -> tuple[str, ...]:
    return f"dflash_config.{key}", f"draft_config.{key}", key


def default_layer_ids(num_target_layers: int, n: int) -> tuple[int, ...]:
    """n target layers evenly spaced from 1 to L - 3; for n = 1 the middle one, never the last."""
    if n == 1:
        return (min(num_target_layers // 2, num_target_layers - 2),)
    step = (num_target_layers - 4) / (n - 1)
    return tuple(round(1 + i * step) for i in range(n))


class DFlashAttention(nn.Module):
    """Queries from the block; keys and values from the context and the block, same weights."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        width, self.d = config.hidden_size, config.head_dim
        self.n_q, self.n_kv = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(width, self.n_q * self.d, bias=False)
        self.k_proj = nn.Linear(width, self.n_kv * self.d, bias=False)
        self.v_proj = nn.Linear(width, self.n_kv * self.d, bias=False)
        self.o_proj = nn.Linear(self.n_q * self.d, width, bias=False)
        self.q_norm = nn.RMSNorm(self.d, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.d, eps=config.rms_norm_eps)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [..., G, T, d] of context or block states x [..., T, D]."""
        keys = rotate(self.k_norm(split_heads(self.k_proj(x), self.d)), cos, sin)
        return keys, split_heads(self.v_proj(x), self.d)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated queries [..., H, T, d] of block states x [..., T, D]."""
        return rotate(self.q_norm(split_heads(self.q_proj(x), self.d)), cos, sin)

    def merge(self, attended: Tensor) -> Tensor:
        """[..., H, T, d] -> [..., T, D]"""
        return self.o_proj(merged(attended))


class DFlashLayer(nn.Module):
    """Pre-norm layer; how its queries meet the keys is the caller's business."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Everything after the attention proper: x [..., T, D], attended [..., H, T, d]."""
        x = x + self.self_attn.merge(attended)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashNetwork(nn.Module):
    """Context projection, layers and final norm, under the published tensor names."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        shape = config.layers
        self.config = config
        self.layers = nn.ModuleList(DFlashLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        read = len(config.target_layer_ids) * shape.hidden_size
        self.fc = nn.Linear(read, shape.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(shape)

    @property
    def stack(self) -> list[DFlashLayer]:
        """The layers, with their type."""
        return cast("list[DFlashLayer]", list(self.layers))

    def context(self, features: Tensor) -> Tensor:
        """H_context [..., C, D] of target features [..., C, n * D]."""
        return self.hidden_norm(self.fc(features))

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin [T, d] at positions [T]."""
        like = torch.empty(0, dtype=dtype, device=positions.device)
        cos, sin = self.rotary(like, positions[None])
        return cos[0], sin[0]

    def read(
        self,
        features: Tensor,  # [R, C, n * D]
        slab: Tensor | Sequence[tuple[Tensor, Tensor]],  # [L, 2, R, G, capacity, d], or its parts
        start: int,
        cos: Tensor,  # [C, d] of the positions
        sin: Tensor,
    ) -> None:
        """Keys and values of context positions from `start` on, into the slab of a cache."""
        context, end = self.context(features), start + features.shape[1]
        for layer, (keys, values) in zip(self.stack, slab, strict=True):
            keys[:, :, start:end], values[:, :, start:end] = layer.self_attn.keys_values(
                context, cos, sin
            )

    def block(self, x: Tensor, slab: Tensor, start: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Final hidden states [R, B - 1, D] of one block per sequence, without the anchor's.

        x [R, B, D] stands behind `start` positions of the slab of a cache, which hold the context;
        cos and sin [B, d] are of its own positions. The slab keeps nothing of it that counts.
        """
        end = start + x.shape[1]
        for layer, held in zip(self.stack, slab, strict=True):
            attention = layer.self_attn
            normed = layer.input_layernorm(x)
            held[0, :, :, start:end], held[1, :, :, start:end] = attention.keys_values(
                normed, cos, sin
            )
            attended = F.scaled_dot_product_attention(
                attention.queries(normed, cos, sin),
                held[0, :, :, :end],
                held[1, :, :, :end],
                enable_gqa=True,
            )
            x = layer.finish(x, attended)
        return self.norm(x[:, 1:])

    def forward(
        self,
        features: Tensor,  # [C, n * D]
        blocks: Tensor,  # [A, B, D] input embeddings
        anchors: Tensor,  # [A] absolute positions
    ) -> Tensor:
        """Final hidden states [A, B, D] of many blocks over one context, for training.

        Block a sees the context strictly before its anchor and itself. Scores against the shared
        context are one product for all blocks; the block's own keys are appended to them.
        """
        n_blocks, n_slots = blocks.shape[:2]
        context = self.context(features)
        places = torch.arange(features.shape[0], device=anchors.device)
        context_rope = self.rope(places, context.dtype)
        slots = anchors[:, None] + torch.arange(n_slots, device=anchors.device)  # [A, B]
        cos, sin = self.rope(slots.flatten(), context.dtype)
        block_rope = (cos.view(n_blocks, 1, n_slots, -1), sin.view(n_blocks, 1, n_slots, -1))
        hidden_from = places[None, :] >= anchors[:, None]  # [A, C]
        x = blocks
        for layer in self.stack:
            attention = layer.self_attn
            normed = layer.input_layernorm(x)
            context_kv = attention.keys_values(context, *context_rope)
            block_kv = attention.keys_values(normed, *block_rope)
            queries = attention.queries(normed, *block_rope)
            x = layer.finish(x, packed_attention(queries, context_kv, block_kv, hidden_from))
        return self.norm(x)
