"""The EAGLE-3 network: one decoder layer over the target's features, with a head of its own.

It carries the published tensor names, so published heads load as they are and trained ones are
saved in the same form (code of SafeAILab/EAGLE; methods of arXiv 2503.01840).

Letters: T rows, D width of the head, H query heads, G key/value heads, d head width, V vocabulary
rows of the target, K of the draft vocabulary, F width of the target's features, C context rows,
A anchors, S steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from blockpilot.drafters.forms.eagle3 import Eagle3Config
from blockpilot.drafters.layers import SwiGLU, merged, packed_attention, rotate, split_heads


class Eagle3Attention(nn.Module):
    """Projections of what is read, `width` wide: [embedding ; feature] has 2 D, a state D."""

    def __init__(self, config: Eagle3Config, width: int) -> None:
        super().__init__()
        shape = config.layer
        self.d = shape.head_dim
        n_q, n_kv = shape.num_attention_heads, shape.num_key_value_heads
        self.q_proj = nn.Linear(width, n_q * self.d, bias=False)
        self.k_proj = nn.Linear(width, n_kv * self.d, bias=False)
        self.v_proj = nn.Linear(width, n_kv * self.d, bias=False)
        self.o_proj = nn.Linear(n_q * self.d, shape.hidden_size, bias=False)
        self.norms = config.norm_queries
        if self.norms:
            self.q_norm = nn.RMSNorm(self.d, eps=shape.rms_norm_eps)
            self.k_norm = nn.RMSNorm(self.d, eps=shape.rms_norm_eps)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [..., G, T, d] of x [..., T, width]."""
        keys = split_heads(self.k_proj(x), self.d)
        keys = rotate(self.k_norm(keys) if self.norms else keys, cos, sin)
        return keys, split_heads(self.v_proj(x), self.d)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated queries [..., H, T, d] of x [..., T, width]."""
        queries = split_heads(self.q_proj(x), self.d)
        return rotate(self.q_norm(queries) if self.norms else queries, cos, sin)


class PlainLayer(nn.Module):
    """A pre-norm decoder layer; how its queries meet the keys is the caller's business."""

    def __init__(self, config: Eagle3Config, width: int) -> None:
        super().__init__()
        shape = config.layer
        self.self_attn = Eagle3Attention(config, width)
        self.mlp = SwiGLU(shape.hidden_size, shape.intermediate_size)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Everything after the attention proper, of a residual stream [..., T, D]."""
        x = residual + self.self_attn.o_proj(merged(attended))
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Layer(PlainLayer):
    """The first layer, which reads token embeddings beside features."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, 2 * config.layer.hidden_size)
        shape = config.layer
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def read(self, embedding: Tensor, feature: Tensor) -> Tensor:
        """What attention sees [..., T, 2 D] of token embeddings and features [..., T, D]."""
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(feature)], dim=-1)

    def residual(self, feature: Tensor) -> Tensor:
        """Where the residual stream begins."""
        return self.hidden_norm(feature) if self.norm_before_residual else feature


class Eagle3Network(nn.Module):
    """Fusion of the features, layer, norm and head, under the published tensor names."""

    d2t: Tensor  # [K] int64: target id of draft id i is i + d2t[i]
    t2d: Tensor  # [V] bool: target ids that the draft vocabulary holds

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        shape = config.layer
        self.config = config
        width, eps = shape.hidden_size, shape.rms_norm_eps
        n_taps = len(config.target_layer_ids)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.feature_width, eps=eps)
        if config.fc_norm:
            each = config.feature_width // n_taps
            self.fc_norm = nn.ModuleList(nn.RMSNorm(each, eps=eps) for _ in range(n_taps))
        self.fc = nn.Linear(config.feature_width, width, bias=False)
        self.midlayer = Eagle3Layer(config)
        # Their published names count the first layer, which is the midlayer.
        self.layers = nn.ModuleDict(
            {str(place): PlainLayer(config, width) for place in range(1, shape.num_hidden_layers)}
        )
        self.norm = nn.RMSNorm(width, eps=eps)
        if config.own_head:
            self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        if config.embeds:
            self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool))
        self.rotary = LlamaRotaryEmbedding(shape)

    def normed_features(self, features: Tensor) -> Tensor:
        """What `fc` reads of the target's features [..., T, F]."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            norms = zip(self.fc_norm, parts, strict=True)
            features = torch.cat([norm(part) for norm, part in norms], dim=-1)
        return features

    @property
    def plain_layers(self) -> list[PlainLayer]:
        """The layers behind the first, with their type."""
        return cast("list[PlainLayer]", list(self.layers.values()))

    def choose_vocabulary(self, ids: Tensor) -> None:
        """Make target ids [K], increasing, the draft vocabulary."""
        self.d2t.copy_(ids - torch.arange(len(ids)))
        self.t2d.zero_()
        self.t2d[ids] = True

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids, any shape."""
        return draft_ids + self.d2t[draft_ids]

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin [T, d] at positions [T]."""
        like = torch.empty(0, dtype=dtype, device=positions.device)
        cos, sin = self.rotary(like, positions[None])
        return cos[0], sin[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., K] over the draft vocabulary of layer outputs [..., D]."""
        return self.lm_head(self.norm(hidden))

    def forward(
        self,
        features: Tensor,  # [C, F] of the target
        embeddings: Tensor,  # [C, D] of the tokens after them
        anchors: Tensor,  # [A] absolute positions, increasing, at most C
        read: Tensor,  # [A, S, D] embeddings of the tokens from each anchor on
    ) -> Tensor:
        """Normed outputs [A, S, D] of S unrolled steps behind many anchors, for training."""
        return self.unroll(features, embeddings, anchors, read.shape[1], lambda s, _: read[:, s])

    def unroll(
        self,
        features: Tensor,
        embeddings: Tensor,
        anchors: Tensor,
        n_steps: int,
        next_embedding: Callable[[int, Tensor], Tensor],
    ) -> Tensor:
        """`forward` with tokens that may depend on the steps before.

        `next_embedding(s, output)` gives the embeddings [A, D] of the tokens at anchor + s; for
        s > 0 `output` [A, D] is the normed one of step s - 1. A step sees the context rows before
        its anchor and the earlier steps of its own.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        fused = self.fc(features)
        places = torch.arange(features.shape[0], device=anchors.device)
        context = attention.keys_values(
            layer.read(embeddings, fused), *self.rope(places, fused.dtype)
        )
        hidden_from = places[None, :] >= anchors[:, None]  # [A, C]
        state = fused[anchors - 1]
        own: list[tuple[Tensor, Tensor]] = []
        outputs: list[Tensor] = []
        for step in range(n_steps):
            last = outputs[-1] if outputs else state
            x = layer.read(next_embedding(step, last), state)[:, None]  # [A, 1, 2 D]
            rope = self.rope(anchors - 1 + step, fused.dtype)
            cos, sin = (each[:, None, None, :] for each in rope)
            keys, values = attention.keys_values(x, cos, sin)  # [A, G, 1, d]
            if step == 0:  # that row is one of the context's
                keys, values = keys[:, :, :0], values[:, :, :0]
            own.append((keys, values))
            block = torch.cat([k for k, _ in own], dim=2), torch.cat([v for _, v in own], dim=2)
            queries = attention.queries(x, cos, sin)
            attended = packed_attention(queries, context, block, hidden_from)
            state = layer.finish(state[:, None], attended)[:, 0]
            outputs.append(self.norm(state))
        return torch.stack(outputs, dim=1)
