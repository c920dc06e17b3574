"""The key/value cache: preallocated buffers behind our protocol, handed to transformers as a Cache.

`DynamicCache` concatenates the whole cache per layer and forward, and its crop changed meaning
between releases; here a rollback is one integer per layer, whatever the length.
"""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _Slabs:
    """Memory of all layers, taken when the first of them is known: one tensor, but for layers of
    other shapes and for several sequences.
    """

    def __init__(self, n_layers: int, capacity: int) -> None:
        self.n_layers, self.capacity = n_layers, capacity
        self.stacked: Tensor | None = None  # [layers, 2, heads, capacity, head_dim]
        self.others: list[Tensor] = []  # each [R, heads, capacity, head_dim]

    def of(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Slabs [R, heads, capacity, head_dim] for keys and values [R, heads, n, head_dim]."""
        rows, heads, _, d = keys.shape
        alike = rows == 1 and keys.shape == values.shape
        if self.stacked is None and alike:
            # Zeros: what a mask hides is multiplied by zero, and memory may hold no numbers.
            self.stacked = keys.new_zeros(self.n_layers, 2, heads, self.capacity, d)
        if self.stacked is not None:
            mine = self.stacked[layer]
            if alike and mine.shape[1:] == (heads, self.capacity, d):
                return mine[:1], mine[1:]
        own = [
            each.new_zeros(rows, each.shape[1], self.capacity, each.shape[3])
            for each in (keys, values)
        ]
        self.others += own
        return own[0], own[1]


class _SlabLayer(CacheLayerMixin):
    """One layer's keys and values in fixed slabs [R, heads, capacity, head_dim]."""

    is_sliding = False  # all positions are kept; a sliding window is the mask's business
    is_croppable = True

    def __init__(self, slabs: _Slabs, index: int) -> None:
        super().__init__()
        self._slabs, self._index = slabs, index
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._slabs.of(self._index, key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        start, end = self.length, self.length + key_states.shape[2]
        if end > self._slabs.capacity:  # a slice past the end would drop the rest silently
            raise ValueError(
                f"{end} positions exceed the cache's capacity of {self._slabs.capacity}"
            )
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self._slabs.capacity


class SlabCache(Cache):
    """Preallocated cache with room for `capacity` positions, of one sequence or of several of one
    length: the first forward says how many."""

    def __init__(self, n_layers: int, capacity: int) -> None:
        self._slabs = _Slabs(n_layers, capacity)
        super().__init__(layers=[_SlabLayer(self._slabs, index) for index in range(n_layers)])
        self.capacity = capacity

    @property
    def length(self) -> int:
        """Positions held."""
        return self.layers[0].length

    @property
    def stacked(self) -> Tensor | None:
        """Keys and values [layers, 2, heads, capacity, head_dim] of one sequence, where all layers
        are alike and something was appended."""
        return None if self._slabs.others else self._slabs.stacked

    def advance(self, n: int) -> None:
        """Something else than the layers' own code appended n positions."""
        for layer in self.layers:
            layer.length += n

    def rollback(self, keep: int) -> None:
        """Forget all positions from `keep` on, in time that does not depend on the length."""
        if not 0 <= keep <= self.length:
            raise ValueError(f"rollback to {keep} positions, but the cache holds {self.length}")
        for layer in self.layers:
            layer.length = keep

    def compact(self, start: int, index: Tensor) -> None:
        """Keep positions `start + index` (increasing) as `start...`, forget the rest."""
        end = start + index.shape[0]
        held = [] if self._slabs.stacked is None else [self._slabs.stacked]
        for slab in (*held, *self._slabs.others):
            slab[..., start:end, :] = slab[..., start : self.length, :].index_select(-2, index)
        for layer in self.layers:
            layer.length = end
