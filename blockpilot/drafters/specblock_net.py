"""The SpecBlock network: two layers that fill a block of K slots behind every position at once.

A published drafter (methods of arXiv 2605.07243). Of the published checkpoints neither the keys of
config.json nor the names of tensors are known here: both are this project's own, so published files
are refused by their first unknown key. Three readings are also our own: a row pairs the target's
features of position i with the token at i + 1, as EAGLE-3 does, for a draft has to see the anchor;
the three inputs of a slot have a norm each; and the rank head's top-1 probability is of the whole
draft vocabulary.

The first block at position i begins at token i + 1, its anchor: slot k stands at i + 1 + k and
predicts the token behind it. A later block continues behind the first M slots of the one before: it
reads the state of slot M - 1 and the token which that slot proposed, and that token is its anchor.

Letters: T rows, K slots of a block, D width, F width of the target's features, H query heads,
G key/value heads, d head width, V vocabulary rows of the target, W of the draft vocabulary,
A anchors, E later blocks, N blocks side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from blockpilot.drafters.forms.config import ConfigReader, check_layers
from blockpilot.drafters.layers import SwiGLU, merged, packed_attention, rotate, split_heads

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [N, H, K, d], keys and values [N, G, K, d]) -> what is attended [N, H, K, d]."""

N_LAYERS = 2
N_CLASSES = 4
RANK_BOUNDS = (1, 4, 10)
"""Highest rank of each class but the last, by the draft's rank of the target's token."""
NEAR = 20
"""Best tokens among which the rank head compares; a draft vocabulary has no fewer."""
_SHOWN = 10  # of them, whose log-probabilities it reads
_GAPS = (1, 2, 4)  # places whose logits it compares with the best one's
_INNER = 256  # width of the rank head
_STATISTICS = _SHOWN + len(_GAPS) + 2

_LAYER_NUMBERS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_SHAPE = ("head_dim", "rms_norm_eps", "max_position_embeddings")
_ARCHITECTURE = ["SpecBlockDraftModel"]


@dataclass(frozen=True)
class SpecBlockConfig:
    """The shape of a drafter.

    `target_layer_ids` are the target layers whose outputs it reads. Its width is the target's,
    whose embedding it uses.
    """

    layers: LlamaConfig
    slots: int
    draft_vocab_size: int
    target_layer_ids: tuple[int, ...]

    @classmethod
    def parse(
        cls, raw: Mapping[str, Any], where: str, depth: int, ignored: Sequence[str] = ()
    ) -> SpecBlockConfig:
        """Read a config.json for a target of `depth` layers; `ignored` keys count as absent.

        Raises UserError with the key that is missing, wrong or not known.
        """
        reader = ConfigReader(raw, where, ignored)
        reader.expect("architectures", _ARCHITECTURE)
        reader.expect("model_type", "llama")
        reader.expect("num_hidden_layers", N_LAYERS)
        shape = {key: reader.take(key) for key in (*_LAYER_NUMBERS, *_SHAPE)}
        shape["rope_parameters"] = reader.rope()
        reader.window(N_LAYERS)
        own = {key: reader.take(key) for key in ("num_slots", "draft_vocab_size")}
        named = reader.take("target_layer_ids")
        reader.refuse_unread()
        reader.whole(shape | own, (*_LAYER_NUMBERS, "head_dim", "num_slots"), least=1)
        reader.whole(own, ("draft_vocab_size",), least=NEAR)
        ids = reader.layer_ids("target_layer_ids", named)
        check_layers(ids, depth, where)
        return cls(
            LlamaConfig(**reader.layer_shape(shape), num_hidden_layers=N_LAYERS),
            slots=own["num_slots"],
            draft_vocab_size=own["draft_vocab_size"],
            target_layer_ids=ids,
        )

    def published(self) -> dict[str, Any]:
        """The config.json of a drafter that this project makes."""
        layers = self.layers.to_dict()
        return {
            "architectures": _ARCHITECTURE,
            "model_type": "llama",
            **{key: layers[key] for key in (*_LAYER_NUMBERS, *_SHAPE)},
            "num_hidden_layers": N_LAYERS,
            "num_slots": self.slots,
            "draft_vocab_size": self.draft_vocab_size,
            "target_layer_ids": list(self.target_layer_ids),
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "rope_parameters": layers["rope_parameters"],
            "dtype": "bfloat16",
        }


class SpecBlockAttention(nn.Module):
    """Projections of a layer; how its queries meet the keys is the caller's business."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, self.d = config.hidden_size, config.head_dim
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(width, n * self.d, bias=False) for n in (heads, groups, groups)
        )
        self.o_proj = nn.Linear(heads * self.d, width, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [..., H, T, d] and keys, and values [..., G, T, d] of x [..., T, D]."""
        q, k, v = (split_heads(each(x), self.d) for each in (self.q_proj, self.k_proj, self.v_proj))
        return rotate(q, cos, sin), rotate(k, cos, sin), v


class SpecBlockLayer(nn.Module):
    """A pre-norm layer of the Llama family."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = SpecBlockAttention(config)
        self.mlp = SwiGLU(width, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Everything after the attention proper: x [..., T, D], attended [..., H, T, d]."""
        x = x + self.self_attn.o_proj(merged(attended))
        return x + self.mlp(self.post_attention_layernorm(x))


class RankHead(nn.Module):
    """How far down a slot's list the target's token stands: a class of four."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width + _STATISTICS, _INNER, bias=False)
        self.outer = nn.Linear(_INNER, N_CLASSES, bias=False)

    def forward(self, normed: Tensor, logits: Tensor) -> Tensor:
        """Class logits [..., 4] of normed states [..., D] and draft logits [..., W].

        Nothing is learnt through what it reads, so that the draft is as if it were not there.
        """
        return self.outer(F.silu(self.inner(rank_features(normed, logits))))


def rank_features(normed: Tensor, logits: Tensor) -> Tensor:
    """What the rank head reads [..., D + 15], detached: states, the log-probabilities of the ten
    best tokens among the twenty best, how far the second, third and fifth lie behind the best, its
    probability, and the entropy among the twenty."""
    logits = logits.detach()
    top = logits.topk(NEAR, dim=-1).values
    logprobs = top.log_softmax(dim=-1)
    best = top[..., :1]
    parts = [
        logprobs[..., :_SHOWN],
        best - top[..., list(_GAPS)],
        (best - logits.logsumexp(dim=-1, keepdim=True)).exp(),
        -(logprobs.exp() * logprobs).sum(dim=-1, keepdim=True),
    ]
    return torch.cat([normed.detach(), *(each.to(normed.dtype) for each in parts)], dim=-1)


class SpecBlockNetwork(nn.Module):
    """Inputs of the slots, two layers with a shift between them, norm, LM head and rank head."""

    d2t: Tensor  # [W] int64: target id of draft id i is i + d2t[i]
    t2d: Tensor  # [V] bool: target ids that the draft vocabulary holds

    def __init__(self, config: SpecBlockConfig) -> None:
        super().__init__()
        shape = config.layers
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.condition_norm = nn.RMSNorm(width, eps=eps)
        self.embedding_norm = nn.RMSNorm(width, eps=eps)
        self.query_norm = nn.RMSNorm(width, eps=eps)
        self.queries = nn.Parameter(0.02 * torch.randn(config.slots, width))
        self.slot_proj = nn.Linear(3 * width, width, bias=False)
        self.layers = nn.ModuleList(SpecBlockLayer(shape) for _ in range(N_LAYERS))
        self.shift = nn.Linear(2 * width, width, bias=False)
        self.norm = nn.RMSNorm(width, eps=eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.rank_head = RankHead(width)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool))
        self.rotary = LlamaRotaryEmbedding(shape)

    @property
    def stack(self) -> list[SpecBlockLayer]:
        """The layers, with their type."""
        return cast("list[SpecBlockLayer]", list(self.layers))

    def choose_vocabulary(self, ids: Tensor) -> None:
        """Make target ids [W], increasing, the draft vocabulary."""
        self.d2t.copy_(ids - torch.arange(len(ids)))
        self.t2d.zero_().index_fill_(0, ids, True)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids, any shape."""
        return draft_ids + self.d2t[draft_ids]

    def draft_index(self) -> Tensor:
        """Draft ids [V] of target ids; 0 also for those that have none."""
        index = torch.zeros(len(self.t2d), dtype=torch.int64, device=self.t2d.device)
        rows = torch.arange(len(self.d2t), device=self.t2d.device)
        return index.index_copy_(0, self.target_ids(rows), rows)

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin [..., d] at positions [...]."""
        like = torch.empty(0, dtype=dtype, device=positions.device)
        cos, sin = self.rotary(like, positions.reshape(1, -1))
        return cos.view(*positions.shape, -1), sin.view(*positions.shape, -1)

    def inputs(self, condition: Tensor, embedding: Tensor) -> Tensor:
        """Slots [..., K, D] behind tokens with embeddings [..., D].

        `condition` [..., D] are projected features, or the state of the slot that is continued. The
        projection of the three is taken apart, for only one of them differs from slot to slot.
        """
        width = condition.shape[-1]
        read = torch.cat([self.condition_norm(condition), self.embedding_norm(embedding)], dim=-1)
        of_position = F.linear(read, self.slot_proj.weight[:, : 2 * width])
        of_slot = F.linear(self.query_norm(self.queries), self.slot_proj.weight[:, 2 * width :])
        return of_position[..., None, :] + of_slot

    def shifted(self, x: Tensor) -> Tensor:
        """Slots [..., K, D] told of the slot before them; the first pairs with itself."""
        before = torch.cat([x[..., :1, :], x[..., :-1, :]], dim=-2)
        return self.shift(torch.cat([x, before], dim=-1))

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """States [N, K, D] before the norm of slots x [N, K, D], with cos and sin [N, K, d]."""
        turns = cos[:, None], sin[:, None]
        for number, layer in enumerate(self.stack):
            if number:
                x = self.shifted(x)
            projected = layer.self_attn.project(layer.input_layernorm(x), *turns)
            x = layer.finish(x, attend(number, *projected))
        return x

    def first_blocks(
        self, features: Tensor, embeddings: Tensor
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The first block of every position: states [T, K, D] before the norm, and keys and values
        [G, T, K, d] of each layer.

        `features` [T, F] are the target's, `embeddings` [T, D] those of the tokens after them. A
        slot sees all slots of earlier positions and those up to its own: in this order of rows it
        is a causal mask.
        """
        x = self.inputs(self.fc(features), embeddings)
        places = torch.arange(1, x.shape[0] + 1, device=x.device)[:, None]
        held: list[tuple[Tensor, Tensor]] = []

        def attend(number: int, *projected: Tensor) -> Tensor:
            rows, keys, values = (each.transpose(0, 1) for each in projected)  # [., T, K, d]
            held.append((keys, values))
            q, k, v = (each.flatten(1, 2)[None] for each in (rows, keys, values))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return attended[0].unflatten(1, rows.shape[1:3]).transpose(0, 1)

        slots = places + torch.arange(x.shape[1], device=x.device)
        return self.run(x, *self.rope(slots, x.dtype), attend), held

    def forward(
        self,
        features: Tensor,  # [T, F] of the target
        embeddings: Tensor,  # [T, D] of the tokens after them
        anchors: Tensor,  # [A] absolute positions, at most T
        continued: Tensor,  # [A, E] slots, from 1, that each later block keeps of the one before
        read: Tensor,  # [A, E, D] embeddings of the tokens which those slots stand for
    ) -> Tensor:
        """Normed states [A, E + 1, K, D] of blocks rolled out behind anchors, for training.

        A later block sees the first blocks of earlier positions, the kept slots of the blocks
        before it at its own, and its own slots up to each.
        """
        first, context = self.first_blocks(features, embeddings)
        n_slots = first.shape[1]
        rows = torch.arange(first.shape[0], device=anchors.device)
        hidden_from = (rows >= anchors[:, None] - 1).repeat_interleave(n_slots, dim=1)
        slots = torch.arange(n_slots, device=anchors.device)
        # Keys and values of each layer of the blocks so far: [A, G, K, d] each.
        own = [
            [(k[:, anchors - 1].transpose(0, 1), v[:, anchors - 1].transpose(0, 1))]
            for k, v in context
        ]
        states, start = [first[anchors - 1]], anchors
        hidden_slots: list[Tensor] = []  # [A, 1, K] of each block before: what is not kept
        for block, kept in enumerate(continued.unbind(dim=1)):
            start = start + kept
            hidden_slots.append((slots >= kept[:, None])[:, None])
            each = torch.arange(len(anchors), device=anchors.device)
            x = self.inputs(states[-1][each, kept - 1], read[:, block])
            after = (slots > slots[:, None]).expand(len(anchors), -1, -1)
            unseen = torch.cat([*(part.expand_as(after) for part in hidden_slots), after], dim=-1)

            def attend(
                number: int, queries: Tensor, keys: Tensor, values: Tensor, unseen: Tensor = unseen
            ) -> Tensor:
                own[number].append((keys, values))
                block_kv = [torch.cat(parts, dim=2) for parts in zip(*own[number], strict=True)]
                context_kv = [part.flatten(1, 2) for part in context[number]]
                return packed_attention(queries, context_kv, block_kv, hidden_from, unseen)

            turns = self.rope(start[:, None] + slots, x.dtype)
            states.append(self.run(x, *turns, attend))
        return self.norm(torch.stack(states, dim=1))
