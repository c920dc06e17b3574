"""The DFlash network (arXiv 2602.06036): one block, bidirectional, with the context as keys/values.

It carries the published tensor names, so published checkpoints load as they are and trained ones
are saved in the same form. Embedding and LM head are the target's and not part of it.

Letters: C context positions, A blocks side by side, B slots of a block, D width, n target layers
read, H query heads, G key/value heads, d head width, R sequences, L layers of the drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from blockpilot.drafters.forms.dflash import DFlashConfig, Sight
from blockpilot.drafters.layers import SwiGLU, merged, packed_attention, rotate, split_heads
from blockpilot.drafters.path_head import PathHead, PathHeadConfig, new_path_head
from blockpilot.drafters.path_state import PathState, new_path_state


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


class BlockConvolution(nn.Module):
    """DFlash2's dynamic convolution along a block, before and after what it surrounds.

    y_t becomes the sum over k of (base[side, k] + delta_t[side, k]) * y_{t-k}, where delta is a
    projection of the slot's normed state whose values g channels share; nothing lies before the
    block (z-lab/dflash, `DFlash2DraftModel`).
    """

    def __init__(self, width: int, n_taps: int, group: int) -> None:
        super().__init__()
        self.shape = 2, n_taps, width // group
        self.group = group
        self.base_kernel = nn.Parameter(torch.zeros(2, n_taps, width))
        self.kernel_projection = nn.Linear(width, 2 * n_taps * (width // group), bias=False)

    def kernels(self, normed: Tensor) -> Tensor:
        """Weights [..., B, 2, K, D] of states [..., B, D]."""
        delta = self.kernel_projection(normed).unflatten(-1, self.shape)
        return self.base_kernel + delta.repeat_interleave(self.group, dim=-1)

    @staticmethod
    def convolve(y: Tensor, kernels: Tensor, side: int) -> Tensor:
        """y [..., B, D] with `kernels`; side 0 is before, 1 after."""
        found = torch.zeros_like(y)
        for tap in range(kernels.shape[-2]):
            earlier = F.pad(y, (0, 0, tap, 0))[..., : y.shape[-2], :]
            found = found + kernels[..., side, tap, :] * earlier
        return found


class DFlashLayer(nn.Module):
    """Pre-norm layer; how its queries meet the keys is the caller's business."""

    def __init__(self, config: Qwen3Config, convolution: tuple[int, int] | None = None) -> None:
        super().__init__()
        width = config.hidden_size
        self.self_attn = DFlashAttention(config)
        self.mlp = SwiGLU(width, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.convolves = convolution is not None
        if convolution is not None:
            self.attention_conv = BlockConvolution(width, *convolution)
            self.mlp_conv = BlockConvolution(width, *convolution)

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """What attention reads of x [..., T, D], and the kernels that `finish` wants."""
        normed = self.input_layernorm(x)
        if not self.convolves:
            return normed, None
        kernels = self.attention_conv.kernels(normed)
        return self.attention_conv.convolve(normed, kernels, 0), kernels

    def finish(self, x: Tensor, attended: Tensor, kernels: Tensor | None = None) -> Tensor:
        """Everything after the attention proper: x [..., T, D], attended [..., H, T, d]."""
        merged_heads = self.self_attn.merge(attended)
        if kernels is None:
            x = x + merged_heads
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.attention_conv.convolve(merged_heads, kernels, 1)
        normed = self.post_attention_layernorm(x)
        kernels = self.mlp_conv.kernels(normed)
        inner = self.mlp(self.mlp_conv.convolve(normed, kernels, 0))
        return x + self.mlp_conv.convolve(inner, kernels, 1)


class DFlashNetwork(nn.Module):
    """Context projection, layers and final norm, under the published tensor names, and what a form
    has besides: an embedding, an LM head, a part `path` that reads the tokens chosen before.
    """

    d2t: Tensor  # [rows of the LM head] int64: target id of draft id i is i + d2t[i]

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        shape = config.layers
        width, vocabulary = shape.hidden_size, shape.vocab_size
        self.config = config
        self.layers = nn.ModuleList(
            DFlashLayer(shape, config.convolution) for _ in range(shape.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(width, eps=shape.rms_norm_eps)
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps=shape.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(shape)
        if config.embeds:
            self.embed_tokens = nn.Embedding(vocabulary, width)
        rows = config.draft_vocab_size or vocabulary
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(width, rows, bias=False)
            if rows != vocabulary:
                self.register_buffer("d2t", torch.zeros(rows, dtype=torch.int64))
        self.path: PathHead | PathState | None = None
        if config.path is not None and config.path.kind == "selector":
            own = config.path
            selector = PathHeadConfig(own.kind, own.rank, width, vocabulary, own.top_k, None)
            self.path = new_path_head(selector)
        elif config.path is not None:
            self.path = new_path_state(config.path, width, vocabulary, rows)

    @property
    def stack(self) -> list[DFlashLayer]:
        """The layers, with their type."""
        return cast("list[DFlashLayer]", list(self.layers))

    @property
    def first(self) -> int:
        """The first slot of a block that drafts."""
        return 0 if self.config.shift else 1

    @cached_property
    def sights(self) -> list[Sight]:
        """What each layer sees."""
        return list(self.config.sights or [Sight()] * len(self.layers))

    def context(self, features: Tensor) -> Tensor:
        """H_context [..., C, D] of target features [..., C, n * D]."""
        return self.hidden_norm(self.fc(features))

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin [T, d] at positions [T]."""
        like = torch.empty(0, dtype=dtype, device=positions.device)
        cos, sin = self.rotary(like, positions[None])
        return cos[0], sin[0]

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target ids of ids of the LM head's rows, any shape."""
        return draft_ids + self.d2t[draft_ids] if hasattr(self, "d2t") else draft_ids

    def over_vocabulary(self, logits: Tensor) -> Tensor:
        """Logits [..., V] of those [..., rows] of an LM head that knows a part of it."""
        if not hasattr(self, "d2t"):
            return logits
        rows = torch.arange(len(self.d2t), device=logits.device)
        lowest = torch.finfo(logits.dtype).min  # not -inf: nothing times it is no number
        whole = logits.new_full((*logits.shape[:-1], self.config.layers.vocab_size), lowest)
        return whole.index_copy_(-1, self.target_ids(rows), logits)

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
        """Final hidden states [R, S, D] of the drafting slots of one block per sequence.

        x [R, B, D] stands behind `start` positions of the slab of a cache, which hold the context;
        cos and sin [B, d] are of its own positions. The slab keeps nothing of it that counts.
        """
        end = start + x.shape[1]
        at, places = x.new_tensor([start], dtype=torch.int64), torch.arange(start, device=x.device)
        seen: dict[Sight, Tensor | None] = {Sight(): None}
        for sight in self.sights:
            if sight not in seen:
                of_context, of_block = hidden_from(sight, at, places, x.shape[1])
                seen[sight] = ~torch.cat([of_context[0], of_block], dim=1)
        for layer, held, sight in zip(self.stack, slab, self.sights, strict=True):
            attention = layer.self_attn
            entered, kernels = layer.enter(x)
            held[0, :, :, start:end], held[1, :, :, start:end] = attention.keys_values(
                entered, cos, sin
            )
            attended = F.scaled_dot_product_attention(
                attention.queries(entered, cos, sin),
                held[0, :, :, :end],
                held[1, :, :, :end],
                attn_mask=seen[sight],
                enable_gqa=True,
            )
            x = layer.finish(x, attended, kernels)
        return self.norm(x[:, self.first :])

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
        masks: dict[Sight, tuple[Tensor, Tensor | None]] = {
            Sight(): (places[None, :] >= anchors[:, None], None)  # [A, C]
        }
        for sight in self.sights:
            if sight not in masks:
                masks[sight] = hidden_from(sight, anchors, places, n_slots)
        x = blocks
        for layer, sight in zip(self.stack, self.sights, strict=True):
            attention = layer.self_attn
            entered, kernels = layer.enter(x)
            context_kv = attention.keys_values(context, *context_rope)
            block_kv = attention.keys_values(entered, *block_rope)
            queries = attention.queries(entered, *block_rope)
            attended = packed_attention(queries, context_kv, block_kv, *masks[sight])
            x = layer.finish(x, attended, kernels)
        return self.norm(x)


def hidden_from(
    sight: Sight, anchors: Tensor, places: Tensor, n_slots: int
) -> tuple[Tensor, Tensor]:
    """Where slots must not look: context at `places` [C], [A, B, C], and their block, [B, B]."""
    slots = torch.arange(n_slots, device=anchors.device)
    behind = slots[:, None] - slots  # [B, B] how far before a slot the other lies
    in_block = behind < 0 if sight.causal else torch.zeros_like(behind, dtype=torch.bool)
    in_context = (places >= anchors[:, None])[:, None, :].expand(-1, n_slots, -1)
    if sight.window is not None:
        if sight.from_anchor:
            away = (anchors[:, None] - places)[:, None, :] > sight.window
        else:
            away = (anchors[:, None] + slots)[..., None] - places >= sight.window
            in_block = in_block | (behind.abs() >= sight.window)
        in_context = in_context | away
    return in_context, in_block
