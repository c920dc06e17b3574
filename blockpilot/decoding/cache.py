"""The key/value cache: preallocated buffers behind our protocol, handed to transformers as a Cache.

`DynamicCache` concatenates the whole cache per layer and forward, and its crop changed meaning
between releases; here a rollback is one integer per layer, whatever the length.
"""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _SlabLayer(CacheLayerMixin):
    """One layer's keys and values in a fixed slab [1, heads, capacity, head_dim]."""

    is_sliding = False  # all positions are kept; a sliding window is the mask's business
    is_croppable = True

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = key_states.new_zeros(*key_states.shape[:2], self.capacity, key_states.shape[3])
        self.values = value_states.new_zeros(
            *value_states.shape[:2], self.capacity, value_states.shape[3]
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        start, end = self.length, self.length + key_states.shape[2]
        if end > self.capacity:  # a slice past the end would take one token and drop it silently
            raise ValueError(f"{end} positions exceed the cache's capacity of {self.capacity}")
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity


class SlabCache(Cache):
    """Preallocated cache of one sequence with room for `capacity` positions."""

    def __init__(self, n_layers: int, capacity: int) -> None:
        super().__init__(layers=[_SlabLayer(capacity) for _ in range(n_layers)])
        self.capacity = capacity

    @property
    def length(self) -> int:
        """Positions held."""
        return self.layers[0].length

    def rollback(self, keep: int) -> None:
        """Forget all positions from `keep` on, in time that does not depend on the length."""
        if not 0 <= keep <= self.length:
            raise ValueError(f"rollback to {keep} positions, but the cache holds {self.length}")
        for layer in self.layers:
            layer.length = keep

    def compact(self, start: int, index: Tensor) -> None:
        """Keep positions `start + index` (increasing) as `start...`, forget the rest."""
        end = start + index.shape[0]
        for layer in self.layers:
            for slab in (layer.keys, layer.values):
                slab[:, :, start:end] = slab[:, :, start:].index_select(2, index)
            layer.length = end
