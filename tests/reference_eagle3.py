"""A slow EAGLE-3 head and tree, written from the method's description: no cache, loops, float64.

Letters: C known rows, D width, K draft vocabulary, F width of features, N rows of one path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from reference import rms_norm, rope
from torch import Tensor

Weights = Mapping[str, Tensor]


def outputs(
    weights: Weights,
    config: Mapping[str, Any],
    features: Sequence[Tensor],  # each [D]
    embeddings: Sequence[Tensor],  # each [D]
) -> list[Tensor]:
    """The layer's output [D] for every row of one causal sequence."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    d, eps = config["head_dim"], config["rms_norm_eps"]
    rows = []
    for feature, embedding in zip(features, embeddings, strict=True):
        read = rms_norm(embedding, weights["midlayer.input_layernorm.weight"], eps)
        known = rms_norm(feature, weights["midlayer.hidden_norm.weight"], eps)
        rows.append(torch.cat([read, known]))
    x = torch.stack(rows)  # [N, 2 D]
    places = torch.arange(len(rows))
    q, k, v = (x @ weights[f"midlayer.self_attn.{part}_proj.weight"].T for part in "qkv")
    found = []
    for row, feature in enumerate(features):
        mixed = []
        for head in range(heads):
            group = head // (heads // groups)
            keys = rope(k[: row + 1, group * d :][:, :d], places[: row + 1], config["rope_theta"])
            here = places[row : row + 1]
            query = rope(q[here, head * d :][:, :d], here, config["rope_theta"])
            scores = (keys @ query[0]) / math.sqrt(d)
            mixed.append(scores.softmax(dim=0) @ v[: row + 1, group * d :][:, :d])
        state = feature + weights["midlayer.self_attn.o_proj.weight"] @ torch.cat(mixed)
        inner = rms_norm(state, weights["midlayer.post_attention_layernorm.weight"], eps)
        gate = weights["midlayer.mlp.gate_proj.weight"] @ inner
        up = weights["midlayer.mlp.up_proj.weight"] @ inner
        down = weights["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
        found.append(state + down)
    return found


@dataclass
class Node:
    """One proposal: its token, the sum of log-probabilities to it and what led there."""

    token: int
    score: float
    parent: Node | None

    def path(self) -> list[int]:
        return [*(self.parent.path() if self.parent else []), self.token]


def tree(
    weights: Weights,
    config: Mapping[str, Any],
    embedding: Tensor,  # [V, D] of the target
    ids: Sequence[int],  # known tokens, the anchor last
    features: Tensor,  # [C, F] of all positions before the anchor
    depth: int,
    top_k: int,
    n_tokens: int,
) -> list[Node]:
    """The best `n_tokens` proposals in the order in which they were made."""
    fused = [weights["fc.weight"] @ row for row in features]
    embeddings = [embedding[token] for token in ids[1:]]

    def best(path: Sequence[int]) -> list[tuple[float, int]]:
        """Log-probability and target id of the top_k tokens after known rows and a path."""
        rows, read = list(fused), list(embeddings)
        for token in path:  # a row's output stands in for the next position's features
            rows.append(outputs(weights, config, rows, read)[-1])
            read.append(embedding[token])
        last = outputs(weights, config, rows, read)[-1]
        normed = rms_norm(last, weights["norm.weight"], config["rms_norm_eps"])
        logprobs = (weights["lm_head.weight"] @ normed).log_softmax(dim=0)
        top = sorted(range(len(logprobs)), key=lambda i: -float(logprobs[i]))[:top_k]
        return [(float(logprobs[i]), i + int(weights["d2t"][i])) for i in top]

    frontier = [Node(token, gain, None) for gain, token in best([])]
    made = list(frontier)
    for _ in range(depth):
        children = [
            Node(token, parent.score + gain, parent)
            for parent in frontier
            for gain, token in best(parent.path())
        ]
        made += children
        frontier = sorted(children, key=lambda node: -node.score)[:top_k]
    chosen = sorted(made, key=lambda node: -node.score)[:n_tokens]
    kept = {id(node) for node in chosen}
    return [node for node in made if id(node) in kept]
