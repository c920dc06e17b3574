"""A slow SpecBlock drafter, written from the method's description: no cache, loops, row by row.

Positions are 0-based. A block is told by the position i of the features that it goes back to and by
a path of continuations (M, token): the M slots, counted from 1, that are kept of the block before,
and the token read behind them.

Letters: D width, F width of features, K slots, W draft vocabulary.
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
Path = Sequence[tuple[int, int]]


@dataclass
class Row:
    """One slot of one block, and the numbers of the rows that it sees, itself among them."""

    x: Tensor  # [D]
    position: int
    sees: list[int]
    before: int  # row that the shift pairs it with


def attended(weights: Weights, config: Mapping[str, Any], rows: list[Row], layer: str) -> None:
    """Run one layer over all rows, in place."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    d, eps, theta = config["head_dim"], config["rms_norm_eps"], config["rope_theta"]
    normed = torch.stack(
        [rms_norm(row.x, weights[f"{layer}.input_layernorm.weight"], eps) for row in rows]
    )
    q, k, v = (normed @ weights[f"{layer}.self_attn.{part}_proj.weight"].T for part in "qkv")
    places = torch.tensor([row.position for row in rows])
    made = []
    for number, row in enumerate(rows):
        mixed = []
        for head in range(heads):
            group = head // (heads // groups)
            keys = rope(k[row.sees, group * d : (group + 1) * d], places[row.sees], theta)
            query = rope(q[[number], head * d : (head + 1) * d], places[[number]], theta)
            share = ((keys @ query[0]) / math.sqrt(d)).softmax(dim=0)
            mixed.append(share @ v[row.sees, group * d : (group + 1) * d])
        x = row.x + weights[f"{layer}.self_attn.o_proj.weight"] @ torch.cat(mixed)
        inner = rms_norm(x, weights[f"{layer}.post_attention_layernorm.weight"], eps)
        gate = weights[f"{layer}.mlp.gate_proj.weight"] @ inner
        up = weights[f"{layer}.mlp.up_proj.weight"] @ inner
        down = weights[f"{layer}.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
        made.append(x + down)
    for row, x in zip(rows, made, strict=True):
        row.x = x


def slot_input(
    weights: Weights, config: Mapping[str, Any], condition: Tensor, embedding: Tensor, slot: int
) -> Tensor:
    eps = config["rms_norm_eps"]
    parts = [
        rms_norm(condition, weights["condition_norm.weight"], eps),
        rms_norm(embedding, weights["embedding_norm.weight"], eps),
        rms_norm(weights["queries"][slot], weights["query_norm.weight"], eps),
    ]
    return weights["slot_proj.weight"] @ torch.cat(parts)


def blocks(
    weights: Weights,
    config: Mapping[str, Any],
    embedding: Tensor,  # [V, D] of the target
    ids: Sequence[int],  # known tokens, up to the anchor at i + 1 at least
    features: Sequence[Tensor],  # each [F], of positions 0..i at least
    i: int,
    path: Path = (),
) -> list[Tensor]:
    """States [K, D] before the norm of the first block at position i and of those on a path."""
    n_slots = config["num_slots"]
    rows: list[Row] = []

    def add(condition: Tensor, token: int, position: int, seen: list[int]) -> list[int]:
        """The rows of a block whose slot 0 stands at `position`."""
        first = len(rows)
        for slot in range(n_slots):
            x = slot_input(weights, config, condition, embedding[token], slot)
            own = list(range(first, first + slot + 1))
            rows.append(Row(x, position + slot, seen + own, max(first + slot - 1, first)))
        return list(range(first, len(rows)))

    for j in range(i + 1):
        condition = weights["fc.weight"] @ features[j]
        newest = add(condition, ids[j + 1], j + 1, list(range(j * n_slots)))
    earlier = list(range(i * n_slots))
    position, kept = i + 1, list[int]()
    made = [newest]
    for depth, (m, token) in enumerate(path, start=1):
        # The state of the slot that is continued: of everything before, computed anew.
        condition = blocks(weights, config, embedding, ids, features, i, path[: depth - 1])[-1]
        kept = kept + made[-1][:m]
        position += m
        made.append(add(condition[m - 1], token, position, earlier + kept))
    attended(weights, config, rows, "layers.0")
    shifted = [weights["shift.weight"] @ torch.cat([row.x, rows[row.before].x]) for row in rows]
    for row, x in zip(rows, shifted, strict=True):
        row.x = x
    attended(weights, config, rows, "layers.1")
    return [torch.stack([rows[number].x for number in block]) for block in made]


def draft_logits(weights: Weights, config: Mapping[str, Any], state: Tensor) -> Tensor:
    """Logits [W] of a state [D]."""
    normed = rms_norm(state, weights["norm.weight"], config["rms_norm_eps"])
    return weights["lm_head.weight"] @ normed


def rank_class(weights: Weights, config: Mapping[str, Any], state: Tensor) -> int:
    """The class that the rank head gives a slot."""
    normed = rms_norm(state, weights["norm.weight"], config["rms_norm_eps"])
    logits = weights["lm_head.weight"] @ normed
    ranked = sorted(logits.tolist(), reverse=True)
    near = ranked[:20]
    total = sum(math.exp(value - near[0]) for value in near)
    near_logprobs = [value - near[0] - math.log(total) for value in near]
    whole = sum(math.exp(value - ranked[0]) for value in ranked)
    statistics = near_logprobs[:10]
    statistics += [ranked[0] - ranked[1], ranked[0] - ranked[2], ranked[0] - ranked[4]]
    statistics += [1 / whole, -sum(math.exp(value) * value for value in near_logprobs)]
    x = torch.cat([normed, torch.tensor(statistics, dtype=normed.dtype)])
    inner = weights["rank_head.inner.weight"] @ x
    return int((weights["rank_head.outer.weight"] @ (inner * torch.sigmoid(inner))).argmax())


def offers(
    weights: Weights, config: Mapping[str, Any], block: Tensor, table: Sequence[int]
) -> list[tuple[int, list[tuple[int, float]]]]:
    """Of each slot of a block [K, D] how many tokens it offers, and all tokens, the best first."""
    found = []
    for slot, state in enumerate(block):
        logprobs = draft_logits(weights, config, state).log_softmax(dim=0)
        order = sorted(range(len(logprobs)), key=lambda i: -float(logprobs[i]))
        tokens = [(i + int(weights["d2t"][i]), float(logprobs[i])) for i in order]
        p = math.exp(tokens[0][1])
        if len(table) == 1:
            n = table[0]
        elif slot == 0:
            n = 3 if p >= 0.9 else 5 if p >= 0.8 else 8 if p >= 0.6 else 10
        else:
            n = table[rank_class(weights, config, state)]
            n = min(n, 2 if p >= 0.95 else 3 if p >= 0.85 else n)
        found.append((n, tokens))
    return found


def tree(
    weights: Weights,
    config: Mapping[str, Any],
    embedding: Tensor,
    ids: Sequence[int],  # the anchor last
    features: Sequence[Tensor],  # of all positions before the anchor
    n_blocks: int,
    table: Sequence[int],
    n_tokens: int,
) -> dict[tuple[int, ...], float]:
    """The best `n_tokens` paths of tokens behind the anchor, with their scores; nothing is saved:
    every block that may begin does."""
    i, last = len(ids) - 2, config["num_slots"] - 1
    scores: dict[tuple[int, ...], float] = {}
    begun: list[tuple[Path, tuple[int, ...]]] = [((), ())]  # continuations and the tokens so far
    scores_of_root = {(): 0.0}
    for _ in range(n_blocks):
        following: list[tuple[Path, tuple[int, ...]]] = []
        for path, root in begun:
            block = blocks(weights, config, embedding, ids, features, i, path)[-1]
            chain, score = root, scores_of_root[root]
            for slot, (n, tokens) in enumerate(offers(weights, config, block, table)):
                for token, logprob in tokens[: max(n, 1)]:
                    node = (*chain, token)
                    scores[node] = max(scores.get(node, -math.inf), score + logprob)
                    if n > 1 or (n == 1 and slot == last):
                        following.append(((*path, (slot + 1, token)), node))
                chain, score = (*chain, tokens[0][0]), score + tokens[0][1]
        begun = following
        scores_of_root = scores | {(): 0.0}
    order = sorted(scores, key=lambda node: -scores[node])[:n_tokens]
    return {node: scores[node] for node in order}
