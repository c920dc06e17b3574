"""EAGLE-3 drafter (code of SafeAILab/EAGLE): one autoregressive layer grows a tree of tokens.

Row t of the head reads the target's features of position t and the embedding of the token at t + 1;
its output predicts the token at t + 2 and stands in for the features of the position after it.

Letters: n rows of one pass, k tokens kept per level, D width, K draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from blockpilot.base.errors import UserError
from blockpilot.decoding.native.stack import CAUSAL, MOST_ROWS, Rope, Stack, Tree, linear
from blockpilot.decoding.protocols import TargetModel
from blockpilot.decoding.types import Draft, Verdict, View
from blockpilot.drafters.eagle3_net import Eagle3Network
from blockpilot.drafters.forms.checkpoints import (
    fill_network,
    fingerprint_of,
    read_checkpoint,
    settle,
    size_of,
)
from blockpilot.drafters.forms.config import ConfigReader, check_layers
from blockpilot.drafters.forms.eagle3 import Eagle3Config, default_layers, head_tensors
from blockpilot.drafters.layers import native_stack, new_shape


@dataclass(frozen=True)
class Level:
    """Proposals of one pass, in the order of their parents: flat tensors [m]."""

    scores: Tensor  # sums of log-probabilities from the root, float32
    tokens: Tensor  # target ids
    parents: Tensor  # places among the proposals of all levels, -1 for the anchor


class Eagle3Drafter:
    """Autoregressive head of one target that proposes a dynamic tree, greedily.

    `checkpoint` is a hub repository, a folder, `bundled:<name>`, or `random`. A cycle of b slots
    proposes the best b - 1 tokens of a tree that `depth` further passes grow, each keeping the
    `top_k` best; `top_k` 1 is a chain. `block_size` is the size for a policy without one.
    `ignore_keys` are keys of its config.json that are read past at the user's risk, nested ones
    with a dot.
    """

    name = "eagle3"
    has_marginals = False
    network: Eagle3Network  # once bound

    def __init__(
        self,
        *,
        checkpoint: str | None,
        ignore_keys: Sequence[str],
        depth: int,
        top_k: int,
        block_size: int,
    ) -> None:
        for key, value, least in (
            ("depth", depth, 0),
            ("top_k", top_k, 1),
            ("block_size", block_size, 2),
        ):
            if value < least:
                raise UserError(f"drafter.{key}={value}: allowed are numbers >= {least}")
        self.checkpoint, self.ignore_keys = checkpoint, ignore_keys
        self.depth, self.top_k = depth, top_k
        self.fingerprint: str | None = None
        self.shape: str | None = None
        self.trained_block_size: int | None = block_size
        self.feature_layers: tuple[int, ...] = ()

    def bind(self, target: TargetModel) -> None:
        """Load the head and check that it belongs to this target (UserError)."""
        if self.checkpoint is None:
            raise UserError(
                f"drafter.checkpoint=null: no EAGLE-3 head of {target.name} is known; name one, or "
                "train one with python -m blockpilot.distill drafter=eagle3"
            )
        if not hasattr(self, "network"):
            self.network = load_head(self.checkpoint, target, self.ignore_keys)
            tree = f"depth={self.depth},top_k={self.top_k}"
            identity = self.network.config.identity()
            head = fingerprint_of(self.checkpoint, self.network, identity, self.ignore_keys)
            self.fingerprint = f"{head},{tree}"
            self.shape = f"{size_of(self.network)}, {tree}"
        check_head(self.network.config, target, self.checkpoint)
        settle(self.network, target)
        self.feature_layers = self.network.config.target_layer_ids
        self._stack: Stack | None = None
        config = self.network.config
        # The kernels know one layer, whose residual stream begins with what it is given.
        known = config.layer.num_hidden_layers == 1 and not config.norm_before_residual
        if target.engine == "native" and known:
            shape = config.layer
            self._stack = native_stack([self.network.midlayer], self.network.norm, shape)
        self._target = target
        self._embed: Any = self.network.embed_tokens if config.embeds else target.embed

    def start(self, view: View, capacity: int) -> None:
        """Room for keys and values of `capacity` positions and of a tree behind them."""
        assert view.new_features is not None
        shape = self.network.config.layer
        rows = capacity + self.depth * self.top_k
        like = view.new_features
        n_layers = shape.num_hidden_layers
        self._slab = like.new_empty(n_layers, 2, shape.num_key_value_heads, rows, shape.head_dim)
        self._rope = Rope(*self.network.rope(torch.arange(rows, device=like.device), like.dtype))
        self._length = 0
        self._unread = [view.new_features], [torch.cat([view.prompt_ids[1:], view.anchor])]
        self._read()

    def draft(self, view: View, n_slots: int) -> Draft:
        """The best `n_slots - 1` of the proposals, fewer where there are not so many; one host
        sync, for the shape of the tree."""
        self._read()
        levels = self._grow(min(self.depth, n_slots - 2))
        tokens = torch.cat([level.tokens for level in levels])
        if self.top_k == 1:
            return Draft(tokens)
        scores = torch.cat([level.scores for level in levels])
        parents = torch.cat([level.parents for level in levels])
        # A child scores no more than its parent and comes later, so a stable order keeps parents.
        best = scores.sort(descending=True, stable=True).indices[: n_slots - 1].sort().values
        chosen, above = torch.stack([best, parents[best]]).tolist()
        node = {-1: 0} | {place: i for i, place in enumerate(chosen, start=1)}
        return Draft(tokens[best], parents=[node[place] for place in above])

    def observe(self, verdict: Verdict) -> None:
        """Keep the committed positions for the next draft, also of a cycle that asked for none."""
        assert verdict.features is not None
        self._unread[0].append(verdict.features)
        self._unread[1].append(torch.tensor(verdict.tokens, device=verdict.features.device))

    def _read(self) -> None:
        """Append the rows whose features and next tokens became known; keep the last output."""
        if not self._unread[0]:
            return
        features, tokens = (torch.cat(each) for each in self._unread)
        self._unread = [], []
        start, end = self._length, self._length + len(tokens)
        places = torch.arange(end, device=tokens.device)
        native = self._stack is not None and len(tokens) <= MOST_ROWS
        sight = CAUSAL if native else places <= places[start:, None]
        fused = self._linear(self.network.normed_features(features), self.network.fc)
        output = self._pass(fused, tokens, places[start:], start, sight)
        self._length, self._last = end, output[-1:]

    def _grow(self, n_passes: int) -> list[Level]:
        """Proposals behind the anchor, level by level."""
        scores, tokens = self._best(self._last)
        levels = [Level(scores[0], tokens[0], torch.full_like(tokens[0], -1))]
        scores, tokens = scores[0], tokens[0]  # [k] of the frontier
        k = len(tokens)
        at = torch.arange(k, device=tokens.device)  # its places among all proposals
        hidden = self._carried(self._last).expand(k, -1)
        native = self._stack is not None and k <= MOST_ROWS
        if native:  # what each row sees: its ancestors, or the slots of a mask
            parents = [-1] * k
        else:
            width = self._length + n_passes * k
            seen = torch.zeros(k, width, dtype=torch.bool, device=tokens.device)
            seen[:, : self._length] = True
        n_proposed = k
        for level in range(n_passes):
            position = torch.full_like(tokens, self._length + level)
            start = self._length + level * k
            sight: Tree | Tensor
            if native:
                sight = Tree(self._length, parents)
            else:
                seen[:, start : start + k].fill_diagonal_(True)
                sight = seen[:, : start + k]
            output = self._pass(hidden, tokens, position, start, sight)
            gains, children = self._best(output)
            totals, children = (scores[:, None] + gains).flatten(), children.flatten()
            above = at.repeat_interleave(gains.shape[1])
            levels.append(Level(totals, children, above))
            kept = totals.topk(k).indices
            parent = kept // gains.shape[1]
            scores, tokens, at = totals[kept], children[kept], kept + n_proposed
            hidden = self._carried(output[parent])
            if native:
                parents += [level * k + row for row in parent.tolist()]
            else:
                seen = seen[parent]
            n_proposed += len(totals)
        return levels

    def _best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and target ids [n, k] of the best next tokens of outputs [n, D]."""
        normed = self.network.norm(hidden)
        if self.network.config.own_head:
            logits = self._linear(normed, self.network.lm_head)
        else:
            logits = self._target.logits(normed)
        logprobs = logits.float().log_softmax(dim=-1)
        top = logprobs.topk(min(self.top_k, logprobs.shape[-1]), dim=-1)
        return top.values, self.network.target_ids(top.indices)

    def _carried(self, output: Tensor) -> Tensor:
        """What a step hands to the next of its output [..., D]."""
        return self.network.norm(output) if self.network.config.norm_output else output

    def _linear(self, x: Tensor, module: nn.Linear) -> Tensor:
        """A linear layer without a bias, by the engine's product."""
        if self._stack is None or len(x) > MOST_ROWS:
            return module(x)
        return linear(x, module.weight).to(x.dtype)

    def _pass(
        self,
        features: Tensor,  # [n, D]
        tokens: Tensor,  # [n]
        positions: Tensor,  # [n]
        start: int,
        sight: str | Tree | Tensor,
    ) -> Tensor:
        """Outputs [n, D] of rows whose keys and values go to `start...` of the cache.

        What they see is a mask [n, start + n] for torch, or told as the kernels want it.
        """
        layer, n = self.network.midlayer, len(tokens)
        x, rope = layer.read(self._embed(tokens), features), self._rope.at(positions)
        if not isinstance(sight, Tensor):
            assert self._stack is not None
            outputs = self._stack.forward(
                features, self._slab, start, rope, sight, n_out=0, attends=x
            )
            return outputs.last.to(features.dtype)
        state = layer.residual(features)
        for place, each in enumerate([layer, *self.network.plain_layers]):
            if place:
                x = each.input_layernorm(state)
            keys, values = each.self_attn.keys_values(x, rope.cos, rope.sin)
            held = self._slab[place, :, :, : start + n]
            held[0, :, start:], held[1, :, start:] = keys, values
            attended = F.scaled_dot_product_attention(
                each.self_attn.queries(x, rope.cos, rope.sin)[None],
                held[None, 0],
                held[None, 1],
                attn_mask=sight,
                enable_gqa=True,
            )
            state = each.finish(state, attended[0])
        return state


def load_head(
    checkpoint: str, target: TargetModel, ignore_keys: Sequence[str] = ()
) -> Eagle3Network:
    """The network of a published head, in float32.

    Raises UserError when it is missing, unreachable, incomplete, of another target or says in a key
    outside `ignore_keys` what is not built.
    """
    if checkpoint == "random":
        ConfigReader({}, checkpoint, ignore_keys)
        return random_head(target)
    raw, found = read_checkpoint(checkpoint, pickles=True)
    weights = head_tensors(found, checkpoint)
    depth = target.config.num_hidden_layers
    config = Eagle3Config.parse(raw, weights, checkpoint, depth, ignore_keys)
    check_head(config, target, checkpoint)
    network = Eagle3Network(config)
    fill_head(network, weights, checkpoint, min(config.layer.vocab_size, target.embed_rows))
    return network


def fill_head(
    network: Eagle3Network, weights: Mapping[str, Tensor], checkpoint: str, n_ids: int
) -> None:
    """Load the tensors of a head, and the tables of its vocabulary that follow from others.

    Raises UserError where they are not the network's, or lead past the target's `n_ids` tokens.
    """
    config, weights = network.config, dict(weights)
    rows, size = config.draft_vocab_size, config.layer.vocab_size
    if "d2t" not in weights and rows == size:  # the whole vocabulary
        weights["d2t"] = torch.zeros(rows, dtype=torch.int64)
    if "d2t" in weights and weights["d2t"].shape == (rows,):  # else told with the other shapes
        ids = torch.arange(rows) + weights["d2t"]
        if ids.min() < 0 or ids.max() >= n_ids:
            raise UserError(f"drafter {checkpoint}: d2t leads outside the target's vocabulary")
        known = torch.zeros(size, dtype=torch.bool).index_fill(0, ids, True)
        weights.setdefault("t2d", known)
    fill_network(network, weights, checkpoint)


def check_head(config: Eagle3Config, target: TargetModel, where: str) -> None:
    """Refuse a head of another target by the first mismatch (UserError)."""
    target_config, ids = target.config, config.target_layer_ids
    check_layers(ids, target_config.num_hidden_layers, where)
    if config.layer.vocab_size != target_config.vocab_size:
        raise UserError(
            f"drafter {where}: vocab_size={config.layer.vocab_size}, the target has "
            f"{target_config.vocab_size}; it was trained for another target"
        )
    if config.feature_width != len(ids) * target_config.hidden_size:
        raise UserError(
            f"drafter {where}: fc reads {config.feature_width} features, {len(ids)} target layers "
            f"{list(ids)} have {len(ids)} x {target_config.hidden_size}; it was trained for other "
            "layers or another target"
        )
    if not config.embeds and config.layer.hidden_size != target_config.hidden_size:
        raise UserError(
            f"drafter {where}: hidden_size={config.layer.hidden_size}, the target has "
            f"{target_config.hidden_size}, and the head has no embedding of its own"
        )


def new_head(target: TargetModel, vocabulary: Tensor) -> Eagle3Network:
    """A head as wide as its target with random weights, over target ids [K] in increasing order."""
    target_config: Any = target.config
    layer = LlamaConfig(**new_shape(target_config), num_hidden_layers=1)
    ids = default_layers(target_config.num_hidden_layers, "new")
    width = len(ids) * target_config.hidden_size
    config = Eagle3Config(layer, len(vocabulary), width, embeds=False, target_layer_ids=ids)
    check_head(config, target, "new")
    network = Eagle3Network(config)
    network.choose_vocabulary(vocabulary)
    return network


def random_head(target: TargetModel) -> Eagle3Network:
    """A head over every other token: random, for offline tests and cost curves."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return new_head(target, torch.arange(0, target.config.vocab_size, 2)[:32000])
