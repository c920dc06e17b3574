"""What the layers of drafters have in common.

Letters: T positions, D width, d head width, C context positions, A blocks side by side, B slots of
a block, H query heads, G key/value heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import rotate_half

from blockpilot.decoding.native.stack import Stack
from blockpilot.drafters.forms.config import static_rope

_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


class SwiGLU(nn.Module):
    """Gated feed-forward under the published tensor names."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., heads, T, d] with cos, sin [..., 1, T, d]."""
    return x * cos + rotate_half(x) * sin


def split_heads(x: Tensor, d: int) -> Tensor:
    """[..., T, heads * d] -> [..., heads, T, d]"""
    return x.unflatten(-1, (-1, d)).transpose(-2, -3)


def merged(x: Tensor) -> Tensor:
    """[..., heads, T, d] -> [..., T, heads * d]"""
    return x.transpose(-2, -3).flatten(-2)


def packed_attention(
    queries: Tensor,  # [A, H, B, d]
    context_kv: Sequence[Tensor],  # keys and values, each [G, C, d]
    block_kv: Sequence[Tensor],  # each [A, G, n, d]
    hidden_from: Tensor,  # [A, C] or [A, B, C] True where a block, or a slot, must not look
    hidden_in_block: Tensor | None = None,  # [B, n] or [A, B, n]; None: a slot sees all
) -> Tensor:
    """Attention output [A, H, B, d] of blocks that share a context."""
    a, h, b, d = queries.shape
    g, c = context_kv[0].shape[:2]
    q = (queries * d**-0.5).reshape(a, g, h // g * b, d)  # heads of a group lie side by side
    to_context = torch.einsum("agqd,gcd->agqc", q, context_kv[0])
    if hidden_from.dim() == 2:
        hidden_from = hidden_from[:, None, None, :]
    else:
        hidden_from = hidden_from.repeat(1, h // g, 1)[:, None]
    to_context = to_context.masked_fill(hidden_from, float("-inf"))
    to_block = q @ block_kv[0].transpose(-1, -2)
    if hidden_in_block is not None:
        if hidden_in_block.dim() == 2:
            hidden_in_block = hidden_in_block[None]
        by_head = hidden_in_block.repeat(1, h // g, 1)[:, None]  # [A or 1, 1, H / G * B, n]
        to_block = to_block.masked_fill(by_head, float("-inf"))
    weights = torch.cat([to_context, to_block], dim=-1).softmax(dim=-1).to(q.dtype)
    attended = torch.einsum("agqc,gcd->agqd", weights[..., :c], context_kv[1])
    attended = attended + weights[..., c:] @ block_kv[1]
    return attended.reshape(a, h, b, d)


def native_stack(layers: Sequence[nn.Module], norm: nn.Module, shape: Any) -> Stack:
    """A drafter's layers and final norm for the kernels, where they are now."""
    return Stack(
        layers,
        norm,
        heads=shape.num_attention_heads,
        kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        eps=shape.rms_norm_eps,
        scale=shape.head_dim**-0.5,
    )


def new_shape(target: Any) -> dict[str, Any]:
    """Configuration values of a new drafter's layers: as wide as its target's configuration says.

    Not every target has them all under these names; mixtures of experts, for one, may say no width
    of a dense feed-forward.
    """
    width, heads = target.hidden_size, target.num_attention_heads
    return {
        "hidden_size": width,
        "intermediate_size": _one(target, "intermediate_size") or 4 * width,
        "num_attention_heads": heads,
        "num_key_value_heads": _one(target, "num_key_value_heads") or heads,
        "head_dim": _one(target, "head_dim") or width // heads,
        "rms_norm_eps": _one(target, "rms_norm_eps") or 1e-6,
        "rope_parameters": static_rope(_one(target, "rope_parameters")) or _PLAIN_ROPE,
        "max_position_embeddings": _one(target, "max_position_embeddings") or 1 << 20,
        "vocab_size": target.vocab_size,
    }


def _one(target: Any, name: str) -> Any:
    """A value of a configuration; None where it has none, or one that varies by layer."""
    try:
        return getattr(target, name, None)
    except RuntimeError:
        return None
