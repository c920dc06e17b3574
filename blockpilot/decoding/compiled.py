"""The compiled engine: static shapes under the decode loop, so that `torch.compile` can fuse them,
and on a GPU replay them as CUDA graphs.

A cache of a fixed capacity is kept per capacity bucket and reused, since compiled code is tied to
its buffers; a forward of n tokens behind a non-empty cache is one graph per n and bucket, and one
more where the tokens are a tree. Prefills stay eager: each would be a shape of its own.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import StaticLayer

from blockpilot.base.paths import cache_dir
from blockpilot.decoding.cache import SlabCache
from blockpilot.decoding.features import untap
from blockpilot.decoding.target import Target
from blockpilot.decoding.types import Branches, Forward

log = logging.getLogger(__name__)

BACKEND: str | Callable[..., Any] = "inductor"
_SMALLEST = 256  # positions of the smallest bucket; each further one doubles
_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled_code() -> None:
    """Let inductor and Triton keep their code between runs, in blockpilot's cache folder.

    Their own folder is emptied with /tmp. One that the user named stays; torch writes its own into
    the variable when it is imported.
    """
    if os.environ.get(_FOLDER, default_cache_dir()) == default_cache_dir():
        os.environ[_FOLDER] = str(cache_dir() / "inductor")


class StaticFunction:
    """A function of tensors of fixed shapes, compiled once per shape.

    On a GPU its kernels are recorded and replayed as one CUDA graph. What it returns is the
    caller's; what it changes in place must be marked by `mark_static_address`.
    """

    def __init__(self, target: CompiledTarget, function: Callable[..., Any]) -> None:
        self._target, self._function = target, function
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self._calls: Counter[Hashable] = Counter()

    def __call__(self, shape: Hashable, *args: Any) -> Any:
        """The function's result; `shape` says all that decides about the shapes of `args`."""
        if shape not in self._compiled:
            self._compiled[shape] = self._new(whole=True)
        graphs = self._target.graphs
        self._calls[shape] += 1
        # With graphs, the first call compiles, the second records, the third replays.
        if self._calls[shape] > (2 if graphs else 1):
            return self._run(shape, args)
        begin = time.monotonic()
        try:
            result = self._run(shape, args)
        except torch._dynamo.exc.Unsupported:
            log.info("compiled in parts: the model's code is no single graph")
            self._compiled[shape] = self._new(whole=False)
            result = self._run(shape, args)
        spent = time.monotonic() - begin
        self._target.compile_s += spent
        log.info("compiled %s %s: %.0f s", self._function.__name__.strip("_"), shape, spent)
        return result

    def _run(self, shape: Hashable, args: tuple[Any, ...]) -> Any:
        if not self._target.graphs:
            return self._compiled[shape](*args)
        torch.compiler.cudagraph_mark_step_begin()
        # The next replay of any graph overwrites what this one returned.
        return tree_map_only(Tensor, torch.clone, self._compiled[shape](*args))

    def _new(self, *, whole: bool) -> Callable[..., Any]:
        options: dict[str, Any] = {}
        if self._target.graphs:
            options["triton.cudagraphs"] = True
        if whole:
            # A model's modules do not change, and to ask a thousand of them takes longer than a
            # replay. Of parts it has to be asked: layers share the code of theirs.
            options["guard_filter_fn"] = torch.compiler.skip_guard_on_all_nn_modules_unsafe
        return torch.compile(
            _twin(self._function),
            fullgraph=whole,
            backend=BACKEND,
            dynamic=False,
            options=options,
        )


def _twin(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with code of its own.

    Dynamo keeps what it compiled with the code: every call would try the guards of all shapes, and
    of all models.
    """
    plain: Any = getattr(function, "__func__", function)
    twin = FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__)
    bound = getattr(function, "__self__", None)
    return twin if bound is None else MethodType(twin, bound)


class _Layer(StaticLayer):
    """A layer of a static cache whose length is its cache's, one tensor for all layers."""

    def __init__(self, capacity: int, length: Tensor) -> None:
        super().__init__(capacity)
        self.cumulative_length = length

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values behind the length; the cache's `advance` moves it, once for all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        places = _behind(self.cumulative_length, key_states.shape[2])
        self.keys.index_copy_(2, places, key_states)
        self.values.index_copy_(2, places, value_states)
        return self.keys, self.values


class StaticCache(SlabCache):
    """Cache protocol over transformers' compilable layers: attention reads the whole capacity."""

    def __init__(self, n_layers: int, capacity: int, target: CompiledTarget) -> None:
        super().__init__(n_layers, capacity)
        self.place = torch.zeros((), dtype=torch.int64, device=target.device)  # the length
        self.layers = [_Layer(capacity, self.place) for _ in range(n_layers)]
        self._length = 0
        self._move = StaticFunction(target, _moved)

    @property
    def length(self) -> int:
        """Positions held, known without asking the device."""
        return self._length

    def advance(self, n: int) -> None:
        """A forward appended n positions."""
        self.place.add_(n)
        self._length += n

    def rollback(self, keep: int) -> None:
        """Forget all positions from `keep` on."""
        if not 0 <= keep <= self._length:
            raise ValueError(f"rollback to {keep} positions, but the cache holds {self._length}")
        self.place.fill_(keep)
        self._length = keep

    def compact(self, start: int, index: Tensor) -> None:
        """Keep positions `start + index` (increasing) as `start...`, forget the rest."""
        n, kept = self._length - start, index.shape[0]
        self.place.fill_(start)
        # As many as there are, so that the shape does not depend on how many are kept.
        padded = torch.cat([index, index.new_zeros(1).expand(n - kept)])
        self._move(n, self.layers, self.place, padded)
        self._length = start + n
        self.rollback(start + kept)


def _behind(length: Tensor, n: int) -> Tensor:
    """Positions [n] behind a length, a scalar on the device."""
    return torch.arange(n, device=length.device) + length


def _moved(layers: Sequence[StaticLayer], start: Tensor, index: Tensor) -> None:
    """Copy positions `start + index` of all layers to `start...`."""
    to = _behind(start, index.shape[0])
    for layer in layers:
        for slab in (layer.keys, layer.values):
            slab.index_copy_(2, to, slab.index_select(2, start + index))


class CompiledTarget(Target):
    """A target whose forwards behind a cache are compiled; one live sequence at a time."""

    engine = "compiled"

    def __init__(self, eager: Target) -> None:
        super().__init__(eager.model, eager.tokenizer, eager.name)
        keep_compiled_code()
        self.stop_ids = eager.stop_ids
        self.graphs = self.device.type == "cuda"  # replayed as CUDA graphs
        self._caches: dict[int, StaticCache] = {}
        self._layer_ids: tuple[int, ...] = ()
        self._step = StaticFunction(self, self._plain_step)
        # Of a model that is compiled in parts, each part has an entry per shape and layer.
        torch._dynamo.config.recompile_limit = 256

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
            self._caches[bucket] = StaticCache(len(self.layers), bucket, self)
        cache = self._caches[bucket]
        cache.rollback(0)
        return cache

    def forward(
        self, ids: Tensor, cache: SlabCache, n_logits: int, branches: Branches | None = None
    ) -> Forward:
        """Append ids [n] to the cache; logits of the last `n_logits`."""
        assert isinstance(cache, StaticCache)
        step = self._plain_step
        if cache.length:
            shape = ids.shape[0], n_logits, cache.capacity, self._layer_ids, branches is not None
            step = partial(self._step, shape)
        tree = None if branches is None else (branches.depths, branches.visible)
        logits, features, hidden = step(ids, cache, n_logits, self._layer_ids, tree)
        cache.advance(ids.shape[0])
        return Forward(logits, features, hidden)

    def _plain_step(
        self,
        ids: Tensor,
        cache: StaticCache,
        n_logits: int,
        layer_ids: tuple[int, ...],
        tree: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Logits, features and inputs of the LM head; depths and sight of a tree, or None."""
        more = {} if tree is None else self.tree_arguments(*tree, cache.place, cache.capacity)
        wanted = [layer_id + 1 for layer_id in layer_ids]
        output = self.model(
            input_ids=ids[None],
            cache=cache,
            logits_to_keep=n_logits,
            output_hidden_states=wanted or None,
            **more,
        )
        if not wanted:
            return output.logits[0], None, self.head_input[0]
        parts = [output.hidden_states[entry][0] for entry in wanted]
        return output.logits[0], torch.cat(parts, dim=-1), self.head_input[0]
