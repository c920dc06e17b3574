"""The DFlash block forward with static shapes, for an engine that compiles: one graph per number of
slots and capacity, whatever the length.

Letters: C slots of the cache, B slots of the block, D width, F width of the features, G key/value
heads, d head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from blockpilot.decoding.compiled import CompiledTarget, StaticFunction
from blockpilot.drafters.dflash_net import DFlashNetwork


@dataclass(frozen=True)
class Room:
    """Keys and values of one capacity, where compiled code knows them to be."""

    slabs: list[tuple[Tensor, Tensor]]  # of each layer, [1, G, C, d]
    cos: Tensor  # [C, d]
    sin: Tensor  # [C, d]


class StaticBlocks:
    """Drafts a block in one compiled call, which also reads the features of a last cycle."""

    def __init__(self, network: DFlashNetwork, target: CompiledTarget, mask: Tensor) -> None:
        self.network, self.target = network, target
        self._mask = mask  # [1, D] embedding
        self._none = mask.new_zeros(1, network.fc.in_features)
        torch._dynamo.mark_static_address(mask)
        self._rooms: dict[int, Room] = {}
        self._run = StaticFunction(target, self._step)

    def room(self, capacity: int) -> Room:
        """The room of a capacity, always the same; an earlier prompt's numbers may lie in it."""
        if capacity not in self._rooms:
            shape, like = self.network.config.layers, self._mask
            size = 1, shape.num_key_value_heads, capacity, shape.head_dim
            # Zeros: what a mask hides is multiplied by zero, and memory may hold no numbers.
            slabs = [(like.new_zeros(size), like.new_zeros(size)) for _ in self.network.stack]
            places = torch.arange(capacity, device=like.device)
            room = Room(slabs, *self.network.rope(places, like.dtype))
            for tensor in (*(each for pair in slabs for each in pair), room.cos, room.sin):
                torch._dynamo.mark_static_address(tensor)
            self._rooms[capacity] = room
        return self._rooms[capacity]

    def draft(
        self,
        anchor: Tensor,  # [1]
        room: Room,
        length: int,
        unread: Sequence[Tensor],  # each [n, F], B in all at most
        n_slots: int,
    ) -> tuple[Tensor, Tensor]:
        """Final states [B - 1, D] and logits [B - 1, V] behind `length` cached positions and those
        of `unread`, which become cached too."""
        n = sum(each.shape[0] for each in unread)
        features = torch.cat([*unread, self._none.expand(n_slots - n, -1)])  # [B, F]
        start, end = (anchor.new_full((), each) for each in (length, length + n))
        shape = n_slots, room.cos.shape[0]
        found: tuple[Tensor, Tensor] = self._run(shape, room, anchor, features, start, end)
        return found

    def _step(
        self,
        room: Room,
        anchor: Tensor,
        features: Tensor,  # [B, F]
        start: Tensor,
        end: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Positions `start...` get keys and values of the features, then `end...` the block's: so
        those of features that are there for their number alone are overwritten.
        """
        n_slots, shape = features.shape[0], self.network.config.layers
        heads, groups = shape.num_attention_heads, shape.num_key_value_heads
        slots, places = (torch.arange(n, device=end.device) for n in (n_slots, len(room.cos)))
        read, block = start + slots, end + slots
        both = torch.cat([read, block])
        cos, sin = room.cos[both], room.sin[both]
        rows = heads // groups * n_slots  # heads of a group lie next to each other
        seen = (places < end + n_slots).expand(rows, -1)
        context = self.network.context(features)
        x = torch.cat([self.target.embed(anchor), self._mask.expand(n_slots - 1, -1)])
        for layer, (keys, values) in zip(self.network.stack, room.slabs, strict=True):
            attention = layer.self_attn
            normed = layer.input_layernorm(x)
            new = attention.keys_values(torch.cat([context, normed]), cos, sin)
            for slab, states in zip((keys, values), new, strict=True):
                slab.index_copy_(2, read, states[None, :, :n_slots])
                slab.index_copy_(2, block, states[None, :, n_slots:])
            queries = attention.queries(normed, cos[n_slots:], sin[n_slots:])  # [H, B, d]
            attended = F.scaled_dot_product_attention(
                queries.reshape(1, groups, rows, -1), keys, values, attn_mask=seen
            )
            x = layer.finish(x, attended.reshape(queries.shape))
        hidden = self.network.norm(x[1:])
        return hidden, self.target.logits(hidden)
