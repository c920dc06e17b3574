"""The EAGLE-3 network: one decoder layer over the target's features, with a head of its own.

It carries the published tensor names, so published heads load as they are and trained ones are
saved in the same form (code of SafeAILab/EAGLE; methods of arXiv 2503.01840).

Letters: T rows, D width of the head, H query heads, G key/value heads, d head width, V vocabulary
rows of the target, K of the draft vocabulary, F width of the target's features, C context rows,
A anchors, S steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from blockpilot.base.errors import UserError
from blockpilot.drafters.forms.config import ConfigReader, check_layers
from blockpilot.drafters.layers import SwiGLU, merged, packed_attention, rotate, split_heads

log = logging.getLogger(__name__)

_NUMBERS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
# What relatives of the network do otherwise, with the values at which they do the same. Trainers
# mean different things by norm_output, so it is refused at every value.
_BUILT: dict[str, tuple[Any, ...]] = {
    "architectures": (["LlamaForCausalLMEagle3"], ["LlamaForCausalLM"]),
    "model_type": ("llama",),
    "num_hidden_layers": (1,),
    "norm_before_residual": (False,),
    "norm_before_fc": (False,),
    "fc_norm": (False,),
    "use_aux_norm": (False,),
    "parallel_drafting": (False,),
    "eagle_config.use_aux_hidden_state": (True,),
}
_NESTED = "eagle_config.eagle_aux_hidden_state_layer_ids"  # of layers
_TOP = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")  # of what enters them


@dataclass(frozen=True)
class Eagle3Config:
    """The shape of a head.

    `target_layer_ids` are the target layers whose outputs it reads, in the order of their places
    in `feature_width`, which is that of the concatenated features. `embeds` says that the head has
    an embedding of its own; the target's serves otherwise.
    """

    layer: LlamaConfig
    draft_vocab_size: int
    feature_width: int
    embeds: bool
    target_layer_ids: tuple[int, ...]

    @classmethod
    def parse(
        cls,
        raw: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        where: str,
        depth: int,
        ignored: Sequence[str] = (),
    ) -> Eagle3Config:
        """From a published config.json; what it does not say reliably is read off the weights.

        `depth` is the target's number of layers, `ignored` are keys that count as absent. Raises
        UserError with the key or the tensor that is missing, wrong or of a head that is not built.
        """
        reader = ConfigReader(raw, where, ignored)
        for key, built in _BUILT.items():
            reader.expect(key, *built)
        keys = (*_NUMBERS, "rms_norm_eps", "max_position_embeddings")
        shape = {key: reader.take(key) for key in keys}
        shape["rope_parameters"] = reader.rope()
        reader.window(1)
        # hidden_size / heads in some configs, while the weights were trained with another.
        reader.take("head_dim")
        declared = reader.take("draft_vocab_size", "truncated_vocab_size")
        named = _named_layers(reader)
        reader.refuse_unread()
        reader.whole(shape, _NUMBERS, least=1)
        for key in ("fc.weight", "lm_head.weight", "midlayer.self_attn.q_proj.weight"):
            if key not in weights:
                reader.refuse(f"tensor {key} is missing")
            if weights[key].dim() != 2:
                reader.refuse(f"tensor {key} has shape {list(weights[key].shape)}, a matrix is due")
        rows = weights["lm_head.weight"].shape[0]
        if declared not in (None, rows):
            reader.refuse(f"draft_vocab_size={declared}, but lm_head.weight has {rows} rows")
        if not named:
            named = default_layers(depth, where)
            layers = ", ".join(map(str, named))
            log.warning("%s names no target layers: it is taken to read %s", where, layers)
        check_layers(named, depth, where)
        heads = shape["num_attention_heads"]
        shape["head_dim"] = weights["midlayer.self_attn.q_proj.weight"].shape[0] // heads
        return cls(
            LlamaConfig(**reader.layer_shape(shape), num_hidden_layers=1),
            draft_vocab_size=rows,
            feature_width=weights["fc.weight"].shape[1],
            embeds="embed_tokens.weight" in weights,
            target_layer_ids=named,
        )

    def published(self) -> dict[str, Any]:
        """The config.json of the published form."""
        layer = self.layer.to_dict()
        keep = (*_NUMBERS, "head_dim", "rms_norm_eps", "max_position_embeddings")
        ids = list(self.target_layer_ids)
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **{key: layer[key] for key in keep},
            "num_hidden_layers": 1,
            "draft_vocab_size": self.draft_vocab_size,
            # Engines read the one or the other.
            "eagle_aux_hidden_state_layer_ids": [i + 1 for i in ids],
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": ids,
            },
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "rope_parameters": layer["rope_parameters"],
            "rope_theta": layer["rope_parameters"]["rope_theta"],
            "dtype": "bfloat16",
        }


def _named_layers(reader: ConfigReader) -> tuple[int, ...]:
    """Target layers that a config.json names in one way or several that agree; () for none."""
    found: dict[str, tuple[int, ...]] = {}
    for key in (_NESTED, *_TOP):
        value = reader.take(key)
        if value is not None:
            ids = reader.layer_ids(key, value)
            if key != _NESTED and min(ids) == 0:
                reader.refuse(f"{key}={value}: 0 is the embeddings, not built; allowed are >= 1")
            found[key] = ids if key == _NESTED else tuple(i - 1 for i in ids)
    if len(set(found.values())) > 1:
        meanings = ", ".join(f"{key} means layers {list(ids)}" for key, ids in found.items())
        reader.refuse(f"{meanings}: make them agree")
    return next(iter(found.values()), ())


def default_layers(num_target_layers: int, where: str) -> tuple[int, ...]:
    """Target layers whose outputs enter layers 2, L // 2 and L - 3, what heads read usually.

    Raises UserError for a target that is too shallow for it.
    """
    if num_target_layers < 4:
        raise UserError(
            f"drafter {where}: a target of {num_target_layers} layers has no three for EAGLE-3 to "
            "read; it takes 4"
        )
    return (1, num_target_layers // 2 - 1, num_target_layers - 4)


class Eagle3Attention(nn.Module):
    """Projections of [embedding ; feature], 2 D wide."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, self.d = config.hidden_size, config.head_dim
        n_q, n_kv = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(2 * width, n_q * self.d, bias=False)
        self.k_proj = nn.Linear(2 * width, n_kv * self.d, bias=False)
        self.v_proj = nn.Linear(2 * width, n_kv * self.d, bias=False)
        self.o_proj = nn.Linear(n_q * self.d, width, bias=False)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [..., G, T, d] of x [..., T, 2 D]."""
        keys = rotate(split_heads(self.k_proj(x), self.d), cos, sin)
        return keys, split_heads(self.v_proj(x), self.d)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated queries [..., H, T, d] of x [..., T, 2 D]."""
        return rotate(split_heads(self.q_proj(x), self.d), cos, sin)


class Eagle3Layer(nn.Module):
    """The one layer; how its queries meet the keys is the caller's business."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Eagle3Attention(config)
        self.mlp = SwiGLU(width, config.intermediate_size)
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)

    def read(self, embedding: Tensor, feature: Tensor) -> Tensor:
        """What attention sees [..., T, 2 D] of token embeddings and features [..., T, D]."""
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(feature)], dim=-1)

    def finish(self, feature: Tensor, attended: Tensor) -> Tensor:
        """Everything after the attention proper; the residual stream is the feature's."""
        x = feature + self.self_attn.o_proj(merged(attended))
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Network(nn.Module):
    """Fusion of the features, layer, norm and head, under the published tensor names."""

    d2t: Tensor  # [K] int64: target id of draft id i is i + d2t[i]
    t2d: Tensor  # [V] bool: target ids that the draft vocabulary holds

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        shape = config.layer
        self.config = config
        self.fc = nn.Linear(config.feature_width, shape.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(shape)
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, config.draft_vocab_size, bias=False)
        if config.embeds:
            self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool))
        self.rotary = LlamaRotaryEmbedding(shape)

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
