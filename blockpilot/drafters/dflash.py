"""DFlash drafter (arXiv 2602.06036): one forward fills a whole block of masked tokens.

Letters: C context positions, B slots of the block, D width, V vocabulary, G key/value heads,
d head width, R sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.decoding.compiled import CompiledTarget
from blockpilot.decoding.native.stack import CAUSAL, MOST_ROWS, WHOLE, Rope, Stack, linear
from blockpilot.decoding.paths import greedy_chain, within
from blockpilot.decoding.protocols import TargetModel
from blockpilot.decoding.target import LogitShape
from blockpilot.decoding.types import Draft, Shortlist, Verdict, View
from blockpilot.drafters.dflash_net import DFlashNetwork, default_layer_ids
from blockpilot.drafters.dflash_static import StaticBlocks
from blockpilot.drafters.forms.checkpoints import (
    fill_network,
    fingerprint_of,
    read_checkpoint,
    save_checkpoint,
    settle,
    size_of,
)
from blockpilot.drafters.forms.config import ConfigReader, check_layers
from blockpilot.drafters.forms.dflash import DFlashConfig, Sight
from blockpilot.drafters.forms.dflash_tensors import network_tensors
from blockpilot.drafters.layers import native_stack, new_shape
from blockpilot.drafters.path_head import PathHead, load_path_head
from blockpilot.drafters.path_state import PathState

log = logging.getLogger(__name__)

_WEAK_TAU = 1.2


class DFlashDrafter:
    """Block-diffusion drafter of one target.

    `checkpoint` is a hub repository, a folder, `bundled:<name>` for weights shipped with the
    package, or `random` for a network of the published shape with random weights (offline tests).
    `ignore_keys` are keys of its config.json that are read past at the user's risk, nested ones
    with a dot. `head` is a path head of this drafter, named like a checkpoint: a draft is then the
    chain along it, and trees grow on its scores. Drafts are greedy at every temperature.
    """

    name = "dflash"
    has_marginals = True
    network: DFlashNetwork  # once bound

    def __init__(
        self, *, checkpoint: str | None, ignore_keys: Sequence[str], head: str | None
    ) -> None:
        self.checkpoint, self.ignore_keys, self.head = checkpoint, ignore_keys, head
        self._head: PathHead | None = None
        self.fingerprint: str | None = None
        self.shape: str | None = None
        self.trained_block_size: int | None = None
        self.feature_layers: tuple[int, ...] = ()
        self._cycles = self._tokens = 0
        self._drafted = self._warned = False
        self._static: StaticBlocks | None = None

    def bind(self, target: TargetModel) -> None:
        """Load the network and check that it belongs to this target.

        Raises UserError naming the key or the mismatch, before anything is generated.
        """
        if self.checkpoint is None:
            raise UserError(
                f"drafter.checkpoint=null: no DFlash drafter of {target.name} is known; name one, "
                "or train one with python -m blockpilot.distill"
            )
        if not hasattr(self, "network"):
            self.network = load_network(self.checkpoint, target, self.ignore_keys)
            identity = self.network.config.identity()
            self.fingerprint = fingerprint_of(
                self.checkpoint, self.network, identity, self.ignore_keys
            )
            self.shape = size_of(self.network)
        network, config = self.network, self.network.config
        check_fits(config, target, self.checkpoint)
        if self.head is not None and self._head is None:
            self._load_head(self.head, target)
        settle(network, target)
        if isinstance(network.path, PathHead):
            self._head = network.path
        elif self._head is not None:
            settle(self._head, target)
        self.trained_block_size, self.feature_layers = config.trained_slots, config.target_layer_ids
        self._target = target
        self._logit_shape: LogitShape | None = None
        if config.output_multiplier is not None:
            self._logit_shape = LogitShape(config.output_multiplier, config.final_logit_softcapping)
        self._stack: Stack | None = None
        # The kernels know one sight for all layers, and no convolution.
        self._sight = {Sight(): WHOLE, Sight(causal=True): CAUSAL}.get(network.sights[0])
        same = len(set(network.sights)) == 1 and config.convolution is None
        if target.engine == "native" and same and self._sight is not None:
            self._stack = native_stack(network.stack, network.norm, config.layers)
        mask = torch.tensor([config.mask_token_id], device=target.device)
        self._mask_embedding = self._embed(mask)  # [1, D]
        # Graphs are made of the plain network alone.
        plain = config.plain and config.embedding_scale == target.embedding_scale
        if not isinstance(target, CompiledTarget) or not plain:
            self._static = None
        elif self._static is None or self._static.target is not target:
            self._static = StaticBlocks(self.network, target, self._mask_embedding)

    def _load_head(self, place: str, target: TargetModel) -> None:
        if not self.network.config.plain:
            form = self.network.config.form
            raise UserError(
                f"drafter.head={place}: {self.checkpoint} is a {form} drafter, heads are of "
                "plain z-lab ones"
            )
        self._head = load_path_head(place, target, self.network)
        # A network that was handed in has no fingerprint, whatever its head.
        if self.fingerprint is not None and self.shape is not None:
            found = fingerprint_of(place, self._head, self._head.config.published(), [])
            self.fingerprint += f",head={found}"
            self.shape += f", head of {size_of(self._head)}"

    def start(self, view: View, capacity: int) -> None:
        """Room for the keys and values of `capacity` positions, filled with the prompt's."""
        assert view.new_features is not None
        self._length, self._unread = 0, [view.new_features]
        if self._static is not None:
            self._room = self._static.room(capacity)
            self._rope = Rope(self._room.cos, self._room.sin)
        else:
            shape, like = self.network.config.layers, self._mask_embedding
            self._slab = like.new_empty(
                len(self.network.layers), 2, shape.num_key_value_heads, capacity, shape.head_dim
            )
            places = torch.arange(capacity, device=like.device)
            self._rope = Rope(*self.network.rope(places, like.dtype))
        self._read_context()

    def draft(self, view: View, n_slots: int) -> Draft:
        """Propose `n_slots - 1` tokens; the block needs no rollback, the next one overwrites it."""
        self._drafted = True
        n_unread = sum(each.shape[0] for each in self._unread)
        if self._static is None or n_unread > n_slots:
            self._read_context()
        if self._static is not None:
            hidden, logits = self._static.draft(
                view.anchor, self._room, self._length, self._unread, n_slots
            )
            self._length, self._unread = view.position, []
        else:
            hidden = self._block(self._blocks(view.anchor, n_slots)[0])
            logits = self._logits(hidden)  # [S, V], of a head of its own its rows
        network = self.network
        if isinstance(network.path, PathState):
            tokens, vectors = self._chain(network.path, hidden[None], view.anchor)
            logits = logits + vectors[0] @ network.path.output.T
            return Draft(tokens[0], network.over_vocabulary(logits))
        logits = network.over_vocabulary(logits)
        if self._head is None:
            return Draft(logits.argmax(dim=-1), logits)
        found = shortlist(self._head, hidden, logits, view.anchor[0])
        return Draft(greedy_chain(found.tokens, found.within), logits, shortlist=found)

    def _embed(self, ids: Tensor) -> Tensor:
        """What the network reads of tokens [...]: [..., D]."""
        config = self.network.config
        if config.embeds:
            return self.network.embed_tokens(ids)
        rows, scale = self._target.embed(ids), config.embedding_scale / self._target.embedding_scale
        return rows if scale == 1 else rows * scale

    def _blocks(self, anchors: Tensor, n_slots: int) -> Tensor:
        """What enters the network [A, B, D] for `n_slots - 1` drafts behind tokens [A]."""
        n_masks = n_slots - 1 - self.network.config.shift
        masks = self._mask_embedding.expand(len(anchors), n_masks, -1)
        return torch.cat([self._embed(anchors)[:, None], masks], dim=1)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., rows of the LM head] of final hidden states [..., D]."""
        if self.network.config.draft_vocab_size is None:
            return self._target.logits(hidden, self._logit_shape)
        logits: Tensor = self.network.lm_head(hidden)
        return logits if self._logit_shape is None else self._logit_shape(logits)

    def _chain(self, path: PathState, hidden: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [A, S] and vectors [A, S, r] of the chains that a path's reading gives."""
        return path.chain(
            hidden,
            anchors,
            lambda slot: self._logits(hidden[:, slot]),
            lambda ids: self._target.embed(ids) / self._target.embedding_scale,
            self.network.target_ids,
        )

    def observe(self, verdict: Verdict) -> None:
        """Keep the committed positions for the next draft, also of a cycle that asked for none.

        Warns once when acceptance says that this drafter belongs to another target.
        """
        assert verdict.features is not None
        self._unread.append(verdict.features)
        if not self._drafted:
            return
        self._drafted = False
        self._cycles += 1
        self._tokens += len(verdict.tokens)
        if self._cycles >= 256 and not self._warned and self._tokens < _WEAK_TAU * self._cycles:
            self._warned = True
            log.warning(
                "tau %.2f over %d cycles: is %s a drafter of this target? (output is unaffected)",
                self._tokens / self._cycles,
                self._cycles,
                self.checkpoint,
            )

    def replay(
        self, ids: Tensor, features: Tensor | None, anchors: Tensor, n_slots: int
    ) -> BlockProposals:
        """Blocks behind many anchors over one context, in one forward."""
        assert features is not None
        network, tokens = self.network, ids[anchors]
        blocks = self._blocks(tokens, n_slots)
        hidden = network(features, blocks, anchors)[:, network.first :]
        if isinstance(network.path, PathState):
            _, vectors = self._chain(network.path, hidden, tokens)
            return StateBlockProposals(hidden, self._logits, network, vectors)
        if self._head is None:
            return BlockProposals(hidden, self._logits, network)
        return PathBlockProposals(hidden, self._logits, network, tokens, self._head)

    def batched(self, rows: int, context: int, widest: int) -> Callable[[int], Tensor]:
        """Drafts of `rows` sequences at once, by the number of slots: tokens [R, B - 1].

        To measure what they take: contexts are noise and of one length, so nothing is padded or
        masked, as it would be in a batch of real texts. A draft reads the target's features of as
        many positions as the block has slots, as behind a block that was accepted whole; after most
        cycles there are fewer. It is the network's own code, without kernels.
        """
        network, mask, shape = self.network, self._mask_embedding, self.network.config.layers
        draw, width = torch.Generator().manual_seed(0), network.fc.in_features
        text = torch.randn(1, context, width, generator=draw).to(mask)  # its dtype and device
        latest = torch.randn(rows, min(context, widest), width, generator=draw).to(mask)
        cos, sin = network.rope(torch.arange(context + widest, device=mask.device), mask.dtype)
        heads, d = shape.num_key_value_heads, shape.head_dim
        one = mask.new_zeros(len(network.layers), 2, 1, heads, context + widest, d)
        network.read(text, one, 0, cos[:context], sin[:context])
        slab = one.repeat(1, 1, rows, 1, 1, 1)
        anchors = torch.zeros(rows, dtype=torch.int64, device=mask.device)

        def draft(n_slots: int) -> Tensor:
            start = max(0, context - n_slots)
            unread = latest[:, : context - start].contiguous()
            network.read(unread, slab, start, cos[start:context], sin[start:context])
            block = self._blocks(anchors, n_slots)
            end = context + block.shape[1]
            hidden = network.block(block, slab, context, cos[context:end], sin[context:end])
            if isinstance(network.path, PathState):
                return self._chain(network.path, hidden, anchors)[0]
            logits = self._logits(hidden)
            if self._head is None:
                return network.target_ids(logits.argmax(dim=-1))
            logits = network.over_vocabulary(logits)
            found = shortlist(self._head, hidden, logits, anchors)
            return greedy_chain(found.tokens, found.within)

        return draft

    def _read_context(self) -> None:
        """Append keys and values of the positions whose target features became known."""
        if not self._unread:
            return
        features = torch.cat(self._unread)  # [n, F]
        self._unread = []
        start, n = self._length, features.shape[0]
        self._length = start + n
        rope = self._rope.at(slice(start, start + n))
        if self._stack is not None and n <= MOST_ROWS:
            fused = linear(features, self.network.fc.weight).to(features.dtype)
            self._stack.extend(self.network.hidden_norm(fused), self._slab, start, rope)
            return
        slabs = self._slab[:, :, None] if self._static is None else self._room.slabs
        self.network.read(features[None], slabs, start, rope.cos, rope.sin)

    def _block(self, x: Tensor) -> Tensor:
        """Final hidden states [S, D] of the drafting slots of one block x [B, D] behind the cached
        context."""
        start, end = self._length, self._length + x.shape[0]
        rope = self._rope.at(slice(start, end))
        if self._stack is not None and x.shape[0] <= MOST_ROWS:
            assert self._sight is not None
            n_out = len(x) - self.network.first
            outputs = self._stack.forward(x, self._slab, start, rope, self._sight, n_out=n_out)
            return outputs.hidden.to(x.dtype)
        slab = self._slab[:, :, None]
        return self.network.block(x[None], slab, start, rope.cos, rope.sin)[0]


@dataclass(frozen=True)
class BlockProposals:
    """Drafts of many blocks; the LM head runs where it is asked to."""

    hidden: Tensor  # [A, S, D]
    head_logits: Callable[[Tensor], Tensor]  # [..., D] -> [..., rows of the LM head]
    network: DFlashNetwork

    def logits(self, rows: Tensor, slot: int) -> Tensor:
        """Logits [n, V] of one slot of the anchors `rows` [n]."""
        return self.network.over_vocabulary(self.head_logits(self.hidden[rows, slot]))


@dataclass(frozen=True)
class StateBlockProposals(BlockProposals):
    """Drafts of many blocks with the logits behind each one's greedy chain."""

    vectors: Tensor  # [A, S, r]

    def logits(self, rows: Tensor, slot: int) -> Tensor:
        """As of `BlockProposals`, with what the chain's tokens add."""
        path = self.network.path
        assert isinstance(path, PathState)
        logits = self.head_logits(self.hidden[rows, slot])
        return self.network.over_vocabulary(logits + self.vectors[rows, slot] @ path.output.T)


@dataclass(frozen=True)
class PathBlockProposals(BlockProposals):
    """Drafts of many blocks whose tokens a path head decides."""

    anchors: Tensor  # [A] tokens
    head: PathHead

    @property
    def n_scored(self) -> int:
        """Best tokens of a slot that the head scores."""
        return self.head.config.top_k

    def bias(self, rows: Tensor, slot: int, before: Tensor, tokens: Tensor) -> Tensor:
        """What the logits of `tokens` [n, K] gain behind each of `before` [n, J]: [n, J, K]."""
        found: Tensor = self.head(self.hidden[rows, slot], before, tokens)
        return torch.zeros_like(found) if slot == 0 and self.head.config.skips_first else found


def shortlist(head: PathHead, hidden: Tensor, logits: Tensor, anchors: Tensor) -> Shortlist:
    """What a head says of the best tokens of blocks with states [..., B - 1, D], logits
    [..., B - 1, V] and anchor tokens [...]."""
    top = logits.float().topk(min(head.config.top_k, logits.shape[-1]), dim=-1)
    bias = head.of_block(hidden, anchors, top.indices)
    return Shortlist(top.indices, top.values, within(top.values, bias))


def load_network(
    checkpoint: str, target: TargetModel, ignore_keys: Sequence[str] = ()
) -> DFlashNetwork:
    """The network of a checkpoint in the published form, in float32.

    Raises UserError when it is missing, unreachable, incomplete, of other shapes or says in a key
    outside `ignore_keys` what is not built.
    """
    if checkpoint == "random":
        ConfigReader({}, checkpoint, ignore_keys)
        return random_network(target)
    raw, weights = read_checkpoint(checkpoint)
    config = DFlashConfig.parse(raw, checkpoint, ignore_keys, weights)
    check_fits(config, target, checkpoint)
    network = DFlashNetwork(config)
    fill_network(network, network_tensors(config, weights, checkpoint), checkpoint)
    return network


def check_fits(config: DFlashConfig, target: TargetModel, where: str) -> None:
    """Refuse a drafter of another target by the first mismatch (UserError)."""
    target_config = target.config
    for what, drafter, wanted in (
        ("num_target_layers", config.num_target_layers, target_config.num_hidden_layers),
        ("hidden_size", config.layers.hidden_size, target_config.hidden_size),
        ("vocab_size", config.layers.vocab_size, target_config.vocab_size),
    ):
        if drafter not in (None, wanted):
            raise UserError(
                f"drafter {where}: {what}={drafter}, the target has {wanted}; "
                "it was trained for another target"
            )
    check_layers(config.target_layer_ids, target_config.num_hidden_layers, where)
    rows = config.layers.vocab_size if config.embeds else target.embed_rows
    if not 0 <= config.mask_token_id < rows:
        whose = "drafter" if config.embeds else "target"
        raise UserError(
            f"drafter {where}: mask_token_id={config.mask_token_id}, "
            f"allowed are 0..{rows - 1} (embedding rows of the {whose})"
        )


def new_config(
    target: TargetModel,
    *,
    n_layers: int,
    n_target_layers: int,
    block_size: int,
    mask_token_id: int,
) -> DFlashConfig:
    """A drafter as wide as its target, reading `n_target_layers` evenly spaced layers."""
    target_config: Any = target.config
    depth = target_config.num_hidden_layers
    if depth < 2:
        raise UserError(
            f"a DFlash drafter reads layers before the last one; {target.name} has only 1 layer"
        )
    room = max(1, depth - 3)
    if n_target_layers > room:
        raise UserError(
            f"n_target_layers={n_target_layers}: a target of {depth} layers has room for 1..{room}"
        )
    raw = {
        **new_shape(target_config),
        "num_hidden_layers": n_layers,
        "block_size": block_size,
        "mask_token_id": mask_token_id,
        "num_target_layers": depth,
        "target_layer_ids": default_layer_ids(depth, n_target_layers),
        "input_embedding_scale": target.embedding_scale,
    }
    return DFlashConfig.parse(raw, "new")


def random_network(target: TargetModel) -> DFlashNetwork:
    """Five layers, block 16, reading five target layers (fewer on shallow targets): random."""
    depth = target.config.num_hidden_layers
    config = new_config(
        target,
        n_layers=min(5, depth),
        n_target_layers=min(5, max(1, depth - 3)),
        block_size=16,
        mask_token_id=target.embed_rows - 1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DFlashNetwork(config)


def save_network(network: DFlashNetwork, folder: Path) -> None:
    """Write config.json and bf16 safetensors in the published form."""
    save_checkpoint(network, network.config.published(), folder)
