"""SpecBlock drafter (arXiv 2605.07243): one forward fills a block of slots, a few of them a tree.

The first forward of a cycle also reads what was committed since the last: the first block behind
the anchor is that of the newest position, and it stays in the cache for good. Further forwards hold
all blocks that continue it side by side.

Letters: n rows of one pass, N blocks of it, K slots of a block, D width, G key/value heads, d head
width, W draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from blockpilot.base.errors import UserError
from blockpilot.decoding.native.stack import CAUSAL, MOST_ROWS, Rope, Stack, Tree, linear
from blockpilot.decoding.protocols import TargetModel
from blockpilot.decoding.types import Branches, Draft, Verdict, View
from blockpilot.drafters.forms.checkpoints import (
    fill_network,
    fingerprint_of,
    read_checkpoint,
    settle,
    size_of,
)
from blockpilot.drafters.forms.config import ConfigReader, check_layers
from blockpilot.drafters.forms.eagle3 import default_layers
from blockpilot.drafters.layers import native_stack, new_shape
from blockpilot.drafters.specblock_learner import SpecBlockLearner
from blockpilot.drafters.specblock_net import (
    N_CLASSES,
    N_LAYERS,
    NEAR,
    SpecBlockConfig,
    SpecBlockNetwork,
)
from blockpilot.drafters.specblock_tree import FIRST_OFFERS, Slot, SpecBlockTree, n_offered


class SpecBlockDrafter:
    """Block-iterative drafter of one target that proposes a tree of few forwards.

    `checkpoint` is a hub repository, a folder, `bundled:<name>`, or `random`. A cycle of b slots
    proposes the best b - 1 tokens of a tree of at most `blocks` blocks on a path. `alternatives`
    are the tokens that a slot offers by the class which the rank head gives it, with the published
    exceptions for the first slot and for sure ones; one number is for all slots and classes, and
    the rank head is not asked ([1] with one block is a chain). With `adapt` it learns from the
    prompts that it decodes, in stages that let it: over how many tokens an update has to pay for
    itself. `block_size` is the size for a policy without one. `ignore_keys` are keys of its
    config.json that are read past at the user's risk, nested ones with a dot.
    """

    name = "specblock"
    has_marginals = False
    network: SpecBlockNetwork  # once bound

    def __init__(
        self,
        *,
        checkpoint: str | None,
        ignore_keys: Sequence[str],
        blocks: int,
        alternatives: Sequence[int],
        adapt: int | None,
        block_size: int,
    ) -> None:
        if blocks < 1:
            raise UserError(f"drafter.blocks={blocks}: allowed are numbers >= 1")
        if block_size < 2:
            raise UserError(f"drafter.block_size={block_size}: allowed are numbers >= 2")
        if len(alternatives) not in (1, N_CLASSES) or min(alternatives) < 0:
            raise UserError(
                f"drafter.alternatives={list(alternatives)}: allowed are one number >= 0 of each "
                f"of the {N_CLASSES} classes, or one of all"
            )
        if len(alternatives) == 1 and alternatives[0] < 1:
            raise UserError("drafter.alternatives=[0]: allowed are numbers >= 1 where it is one")
        self.checkpoint, self.ignore_keys = checkpoint, ignore_keys
        self.blocks, self.alternatives, self.adapt = blocks, tuple(alternatives), adapt
        self._learner: SpecBlockLearner | None = None
        self._learns = False
        self.fingerprint: str | None = None
        self.shape: str | None = None
        self.trained_block_size: int | None = block_size
        self.feature_layers: tuple[int, ...] = ()

    def bind(self, target: TargetModel) -> None:
        """Load the drafter and check that it belongs to this target (UserError)."""
        if self.checkpoint is None:
            raise UserError(
                f"drafter.checkpoint=null: no SpecBlock drafter of {target.name} is known; name "
                "one, or train one with python -m blockpilot.distill drafter=specblock"
            )
        if not hasattr(self, "network"):
            self.network = load_specblock(self.checkpoint, target, self.ignore_keys)
            offers = "+".join(map(str, self.alternatives))
            tree = f"blocks={self.blocks},alternatives={offers}"
            published = self.network.config.published()
            made_of = fingerprint_of(self.checkpoint, self.network, published, self.ignore_keys)
            self.fingerprint = f"{made_of},{tree}"
            self.shape = f"{size_of(self.network)}, {tree}"
            if self.adapt is not None:
                self.fingerprint += f",adapt={self.adapt}"
                self._learner = SpecBlockLearner(self.network, target, self.adapt)
        check_specblock(self.network.config, target, self.checkpoint)
        settle(self.network, target)
        network, shape = self.network, self.network.config.layers
        self.feature_layers = network.config.target_layer_ids
        self._stacks: list[Stack] = []
        if target.engine == "native":  # one each, for there is a shift between them
            self._stacks = [native_stack([layer], network.norm, shape) for layer in network.stack]
        self._embed: Any = target.embed
        most = max(self.alternatives)
        if len(self.alternatives) > 1:
            most = max(most, FIRST_OFFERS)
        self._n_best = min(most, network.config.draft_vocab_size)

    @property
    def updates(self) -> int | None:
        """How often it learnt; None where it never does."""
        return None if self._learner is None else self._learner.updates

    def learn(self, saved: Mapping[str, Tensor] | None) -> None:
        """From now on learn from what is decoded, anew or as from a snapshot."""
        if self._learner is None:
            return
        self._learns = True
        if saved is None:
            self._learner.forget()
        else:
            self._learner.restore(saved)

    def snapshot(self) -> dict[str, Tensor]:
        """All that it learnt."""
        assert self._learner is not None
        return self._learner.snapshot()

    def start(self, view: View, capacity: int) -> None:
        """Room for keys and values of K slots of `capacity` positions, also of a tree."""
        assert view.new_features is not None
        if self._learner is not None and self._learns:
            self._learner.begin(view)
        like, shape = view.new_features, self.network.config.layers
        n_slots = self.network.config.slots
        self._slab = like.new_empty(
            *(N_LAYERS, 2, shape.num_key_value_heads),
            *(capacity * n_slots, shape.head_dim),
        )
        places = torch.arange(capacity + self.blocks * n_slots, device=like.device)
        self._rope = Rope(*self.network.rope(places, like.dtype))
        self._length = 0  # positions whose first blocks are in the cache
        self._unread = [view.new_features], [torch.cat([view.prompt_ids[1:], view.anchor])]
        self._read()

    def draft(self, view: View, n_slots: int) -> Draft:
        """The best `n_slots - 1` of the proposals, fewer where there are not so many; one host
        sync a forward, for what the slots offer."""
        self._read()
        n = n_slots - 1
        tree = self._grow(n)
        chosen = tree.best(n)
        number = {0: 0} | {node: i for i, node in enumerate(chosen, start=1)}
        parents = [number[tree.nodes[node].parent] for node in chosen]
        tokens = [tree.nodes[node].token for node in chosen]
        a_chain = parents == list(range(len(parents)))
        proposed = torch.tensor(tokens, device=view.anchor.device)
        return Draft(proposed, parents=None if a_chain else parents)

    def observe(self, verdict: Verdict) -> None:
        """Keep the committed positions for the next draft, also of a cycle that asked for none."""
        assert verdict.features is not None
        features, tokens = self._unread
        features.append(verdict.features)
        tokens.append(torch.tensor(verdict.tokens, device=verdict.features.device))
        if self._learner is not None and self._learns:
            self._learner.observe(verdict)

    def _read(self) -> None:
        """First blocks of the positions whose features became known; keep the last one's states."""
        network, n_slots = self.network, self.network.config.slots
        if not self._unread[0]:
            return
        features, tokens = (torch.cat(each) for each in self._unread)
        self._unread = [], []
        condition = self._linear(features, network.fc)
        anchors = self._length + 1 + torch.arange(len(tokens), device=tokens.device)
        states = self._pass(condition, tokens, anchors, self._length * n_slots, CAUSAL)
        self._length += len(tokens)
        self._last = states[-1:]

    def _grow(self, n: int) -> SpecBlockTree:
        """A tree of which the best `n` nodes are wanted, generation by generation of blocks."""
        tree, n_slots = SpecBlockTree(), self.network.config.slots
        base = (self._length - 1) * n_slots
        parents = list(range(-1, n_slots - 1))  # of the rows behind the base
        states, roots, anchors = self._last, [0], [self._length]  # of all blocks so far
        first = 0  # block of the newest generation
        for left in reversed(range(self.blocks)):
            newest = range(first, len(states))
            # As they are now: blocks of one generation may raise each other's roots.
            scores = tree.scores(roots[first:])
            made = zip(newest, roots[first:], scores, self._offers(states[first:]), strict=True)
            endings = [ending for each in made for ending in tree.add(*each)]
            if not left or not (endings := tree.hopeful(endings, n)):
                break
            first, start = len(states), base + len(parents)
            for each in endings:
                row = len(parents)
                parents += [each.block * n_slots + each.slot, *range(row, row + n_slots - 1)]
                roots.append(each.node)
                anchors.append(anchors[each.block] + each.slot + 1)
            begun = [
                (each.block, each.slot, tree.nodes[each.node].token, anchor)
                for each, anchor in zip(endings, anchors[first:], strict=True)
            ]
            block, slot, tokens, behind = torch.tensor(begun, device=states.device).T
            sight = Tree(base, parents)
            after = self._pass(states[block, slot], tokens, behind, start, sight)
            states = torch.cat([states, after])
        return tree

    def _offers(self, states: Tensor) -> list[list[Slot]]:
        """What the slots of blocks [N, K, D] offer; one host sync."""
        network = self.network
        normed = network.norm(states)
        logits = self._linear(normed, network.lm_head).float()
        top = logits.topk(self._n_best, dim=-1)
        tokens = network.target_ids(top.indices)
        logprobs = top.values - logits.logsumexp(dim=-1, keepdim=True)
        # float64 holds a token's number and a float32 exactly, so that all come in one transfer.
        parts = [tokens.double(), logprobs.double()]
        if ranked := len(self.alternatives) > 1:
            classes = network.rank_head(normed, logits).argmax(dim=-1, keepdim=True)
            parts.append(classes.double().expand_as(logprobs))
        found = []
        for block in torch.stack(parts, dim=2).tolist():  # [K][2 or 3][n_best]
            slots = []
            for place, (ids, scores, *of_class) in enumerate(block):
                offered = self.alternatives[int(of_class[0][0]) if ranked else 0]
                if ranked:
                    offered = n_offered(place, math.exp(scores[0]), offered)
                slots.append(Slot([int(token) for token in ids], scores, offered))
            found.append(slots)
        return found

    def _linear(self, x: Tensor, module: nn.Linear) -> Tensor:
        """A linear layer without a bias, by the engine's product."""
        if not self._stacks or x.numel() > MOST_ROWS * x.shape[-1]:
            return module(x)
        return linear(x, module.weight).to(x.dtype)

    def _pass(
        self,
        condition: Tensor,  # [N, D]
        tokens: Tensor,  # [N]
        anchors: Tensor,  # [N] positions of the tokens
        start: int,
        sight: str | Tree,
    ) -> Tensor:
        """States [N, K, D] of blocks whose keys and values go to `start...` of the cache."""
        network = self.network
        x = network.inputs(condition, self._embed(tokens))
        n = x.shape[0] * x.shape[1]
        self._make_room(start + n)
        slots = torch.arange(x.shape[1], device=x.device)
        turns = self._rope.at(anchors[:, None] + slots)  # [N, K, d]
        if self._stacks and n <= MOST_ROWS:
            flat = Rope(turns.cos.flatten(0, 1), turns.sin.flatten(0, 1))
            for number, stack in enumerate(self._stacks):
                x = network.shifted(x) if number else x
                slab = self._slab[number : number + 1]
                made = stack.forward(x.flatten(0, 1), slab, start, flat, sight, n_out=0)
                x = made.last.view_as(x).to(x.dtype)
            return x
        mask = _mask(sight, start, n, x.device)

        def attend(number: int, *projected: Tensor) -> Tensor:
            rows, keys, values = (each.transpose(0, 1).flatten(1, 2) for each in projected)
            held = self._slab[number, :, :, : start + n]
            held[0, :, start:], held[1, :, start:] = keys, values
            attended = F.scaled_dot_product_attention(
                *(rows[None], held[None, 0], held[None, 1]),
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=True,
            )
            return attended[0].unflatten(1, x.shape[:2]).transpose(0, 1)

        return network.run(x, turns.cos, turns.sin, attend)

    def _make_room(self, rows: int) -> None:
        """Let the cache hold so many rows: trees of three generations of blocks can take more."""
        if rows > self._slab.shape[3]:
            more = self._slab.new_empty(*self._slab.shape[:3], rows, self._slab.shape[4])
            more[:, :, :, : self._slab.shape[3]] = self._slab
            self._slab = more


def _mask(sight: str | Tree, start: int, n: int, device: torch.device) -> Tensor | None:
    """Which of `start` + n rows the last n see [n, start + n]; None where a causal one is all."""
    if isinstance(sight, Tree):
        among = Branches([parent + 1 for parent in sight.parents], device).visible[-n:, 1:]
        return F.pad(among, (sight.base, 0), value=True)
    rows = torch.arange(start + n, device=device)
    return rows <= rows[start:, None] if start else None


def load_specblock(
    checkpoint: str, target: TargetModel, ignore_keys: Sequence[str] = ()
) -> SpecBlockNetwork:
    """The network of a checkpoint, in float32.

    Raises UserError when it is missing, unreachable, incomplete, of another target or says in a key
    outside `ignore_keys` what is not known.
    """
    if checkpoint == "random":
        ConfigReader({}, checkpoint, ignore_keys)
        return random_specblock(target)
    raw, weights = read_checkpoint(checkpoint)
    depth = target.config.num_hidden_layers
    config = SpecBlockConfig.parse(raw, checkpoint, depth, ignore_keys)
    check_specblock(config, target, checkpoint)
    network = SpecBlockNetwork(config)
    fill_network(network, weights, checkpoint)
    ids = network.target_ids(torch.arange(config.draft_vocab_size))
    if ids.min() < 0 or ids.max() >= target.embed_rows:
        raise UserError(f"drafter {checkpoint}: d2t leads outside the target's vocabulary")
    if ids.unique().tolist() != network.t2d.nonzero()[:, 0].tolist():
        raise UserError(f"drafter {checkpoint}: t2d does not hold the tokens that d2t leads to")
    return network


def check_specblock(config: SpecBlockConfig, target: TargetModel, where: str) -> None:
    """Refuse a drafter of another target by the first mismatch (UserError)."""
    target_config: Any = target.config
    check_layers(config.target_layer_ids, target_config.num_hidden_layers, where)
    for key in ("vocab_size", "hidden_size"):
        own, wanted = getattr(config.layers, key), getattr(target_config, key)
        if own != wanted:
            raise UserError(
                f"drafter {where}: {key}={own}, the target has {wanted}; it was trained for "
                "another target"
            )


def new_specblock(target: TargetModel, vocabulary: Tensor, slots: int) -> SpecBlockNetwork:
    """A network as wide as its target with random weights, over target ids [W] in increasing order.

    Raises UserError for a target that it cannot belong to and for too few ids.
    """
    target_config: Any = target.config
    config = SpecBlockConfig(
        LlamaConfig(**new_shape(target_config), num_hidden_layers=N_LAYERS),
        slots=slots,
        draft_vocab_size=len(vocabulary),
        target_layer_ids=default_layers(target_config.num_hidden_layers, "new"),
    )
    if len(vocabulary) < NEAR:
        raise UserError(f"draft vocabulary of {len(vocabulary)} tokens: allowed are >= {NEAR}")
    network = SpecBlockNetwork(config)
    network.choose_vocabulary(vocabulary)
    return network


def random_specblock(target: TargetModel) -> SpecBlockNetwork:
    """Four slots over every other token: random, for offline tests and cost curves."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return new_specblock(target, torch.arange(0, target.config.vocab_size, 2)[:32000], slots=4)
