"""The compiled engine: static shapes under the decode loop, so that `torch.compile` can fuse them.

A cache of a fixed capacity is kept per capacity bucket and reused, since compiled code is tied to
its buffers; a forward of n tokens behind a non-empty cache is one graph per n and bucket. Prefills
stay eager: each would be a shape of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from blockpilot.decoding.cache import SlabCache
from blockpilot.decoding.features import untap
from blockpilot.decoding.target import Target
from blockpilot.decoding.types import Branches, Forward

log = logging.getLogger(__name__)

BACKEND = "inductor"
_SMALLEST = 256  # positions of the smallest bucket; each further one doubles


class StaticCache(SlabCache):
    """Cache protocol over transformers' compilable layers: attention reads the whole capacity."""

    def __init__(self, n_layers: int, capacity: int) -> None:
        super().__init__(n_layers, capacity)
        self.layers = [StaticLayer(capacity) for _ in range(n_layers)]
        self._length = 0

    @property
    def length(self) -> int:
        """Positions held, known without asking the device."""
        return self._length

    def advance(self, n: int) -> None:
        """A forward appended n positions."""
        self._length += n

    def rollback(self, keep: int) -> None:
        """Forget all positions from `keep` on."""
        if not 0 <= keep <= self._length:
            raise ValueError(f"rollback to {keep} positions, but the cache holds {self._length}")
        for layer in self.layers:
            layer.cumulative_length.fill_(keep)
        self._length = keep

    def compact(self, start: int, index: Tensor) -> None:
        """Keep positions `start + index` (increasing) as `start...`, forget the rest."""
        end = start + index.shape[0]
        for layer in self.layers:
            for slab in (layer.keys, layer.values):
                slab[:, :, start:end] = slab[:, :, start:].index_select(2, index)
        self.rollback(end)


class CompiledTarget(Target):
    """A target whose forwards behind a cache are compiled; one live sequence at a time."""

    engine = "compiled"

    def __init__(self, eager: Target) -> None:
        super().__init__(eager.model, eager.tokenizer, eager.name)
        self.stop_ids = eager.stop_ids
        self._caches: dict[int, StaticCache] = {}
        self._known: set[tuple[object, ...]] = set()
        self._layer_ids: tuple[int, ...] = ()
        # One graph per width and bucket; dynamo would give up after a few.
        torch._dynamo.config.recompile_limit = 256
        self._step = torch.compile(self._plain_step, backend=BACKEND, dynamic=False)

    def capture(self, layer_ids: Sequence[int]) -> None:
        """From now on `forward` returns the concatenated outputs of these layers."""
        untap(self.layers)  # an eager wrapper's hooks would be traced, again at every step
        self._layer_ids = tuple(layer_ids)

    def new_cache(self, capacity: int) -> StaticCache:
        """The emptied cache of the smallest bucket that holds `capacity` positions."""
        bucket = _SMALLEST
        while bucket < capacity:
            bucket *= 2
        if bucket not in self._caches:
            self._caches[bucket] = StaticCache(len(self.layers), bucket)
        cache = self._caches[bucket]
        cache.rollback(0)
        return cache

    def forward(
        self, ids: Tensor, cache: SlabCache, n_logits: int, branches: Branches | None = None
    ) -> Forward:
        """Append ids [n] to the cache; logits of the last `n_logits`. Trees run eagerly."""
        assert isinstance(cache, StaticCache)
        if branches is not None:
            more = self.tree_arguments(branches, cache.length, cache.capacity)
            logits, features = self._plain_step(ids, cache, n_logits, **more)
            cache.advance(ids.shape[0])
            return Forward(logits, features, self.head_input[0])
        step = self._step if cache.length else self._plain_step
        shape = (self._layer_ids, ids.shape[0], n_logits, cache.capacity)
        begin = time.monotonic()
        logits, features = step(ids, cache, n_logits)
        if cache.length and shape not in self._known:
            self._known.add(shape)
            spent = time.monotonic() - begin
            self.compile_s += spent
            log.info("compiled %d tokens behind %d: %.0f s", len(ids), cache.capacity, spent)
        cache.advance(ids.shape[0])
        return Forward(logits, features, self.head_input[0])

    def _plain_step(
        self, ids: Tensor, cache: StaticCache, n_logits: int, **more: Any
    ) -> tuple[Tensor, Tensor | None]:
        wanted = [layer_id + 1 for layer_id in self._layer_ids]
        output = self.model(
            input_ids=ids[None],
            cache=cache,
            logits_to_keep=n_logits,
            output_hidden_states=wanted or None,
            **more,
        )
        if not wanted:
            return output.logits[0], None
        parts = [output.hidden_states[entry][0] for entry in wanted]
        return output.logits[0], torch.cat(parts, dim=-1)
