"""DFlash drafter (arXiv 2602.06036): one forward fills a whole block of masked tokens.

Letters: C context positions, B slots of the block, D width, V vocabulary, G key/value heads,
d head width, R sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.decoding.compiled import CompiledTarget
from blockpilot.decoding.native.stack import CAUSAL, MOST_ROWS, WHOLE, Rope, Stack, linear
from blockpilot.decoding.paths import greedy_chain
from blockpilot.decoding.protocols import TargetModel
from blockpilot.decoding.target import LogitShape
from blockpilot.decoding.types import Draft, Verdict, View
from blockpilot.drafters.dflash_load import check_fits, load_network
from blockpilot.drafters.dflash_net import DFlashNetwork
from blockpilot.drafters.dflash_proposals import (
    BlockProposals,
    PathBlockProposals,
    StateBlockProposals,
    shortlist,
)
from blockpilot.drafters.dflash_static import StaticBlocks
from blockpilot.drafters.forms.checkpoints import (
    fingerprint_of,
    settle,
    size_of,
)
from blockpilot.drafters.forms.dflash import Sight
from blockpilot.drafters.layers import native_stack
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
