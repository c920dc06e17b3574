"""The native engine: a target whose forwards of few rows behind a cache are the kernels'.

Prefills and wider forwards stay the model's own, so the prefill distribution is the eager one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from blockpilot.base.errors import UserError
from blockpilot.decoding.cache import SlabCache
from blockpilot.decoding.native.compiler import compiler
from blockpilot.decoding.native.stack import (
    CAUSAL,
    MOST_ROWS,
    READ,
    Rope,
    Stack,
    Tree,
    choose,
    linear,
    working_dtype,
)
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.target import LogitShape, Target
from blockpilot.decoding.types import Branches, Forward

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def why_not_native(target: Target) -> str | None:
    """Why the kernels cannot run a target, or None."""
    config: Any = target.config
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if not kinds else None
    if target.device.type != "cpu":
        return f"it runs on CPUs, the model lies on {target.device}"
    if target.dtype not in _DTYPES:
        allowed = ", ".join(str(each).removeprefix("torch.") for each in _DTYPES)
        return f"it knows {allowed}, not {str(target.dtype).removeprefix('torch.')}"
    if config.model_type not in FAMILIES:
        return f"it knows models of {', '.join(FAMILIES)}, not {config.model_type}"
    if window is not None or kinds - {"full_attention"}:
        return "it knows no sliding windows"
    if config.hidden_act != "silu":
        return f"it knows the activation silu, not {config.hidden_act}"
    if target.hard_end is not None:
        return "it knows no rotary angles that change with the length"
    if any(each.dtype != target.dtype for each in target.model.parameters()):
        return "its weights are of several dtypes"
    if any(
        type(each) is not nn.Linear
        for layer in target.layers
        for name, each in layer.named_modules()
        if name.endswith("_proj")
    ):
        return "its projections are no plain linear layers"
    own = {name for layer in target.layers for name, _ in layer.named_parameters()}
    if unread := sorted(own - READ):
        return f"it knows no {unread[0]}"
    if compiler() is None:
        return "no C++ compiler is found; install g++ or name one in CXX"
    return None


class NativeTarget(Target):
    """A target on a CPU whose forwards of few rows are the kernels'.

    Raises UserError for a model that they do not know.
    """

    engine = "native"

    def __init__(self, eager: Target) -> None:
        if reason := why_not_native(eager):
            raise UserError(f"engine=native: {reason}; choose engine=eager")
        super().__init__(eager.model, eager.tokenizer, eager.name)
        self.stop_ids = eager.stop_ids
        config: Any = self.config
        heads = config.num_attention_heads
        attention: Any = self.layers[0].self_attn
        decoder: Any = self.model.get_decoder()
        self._decoder = decoder
        self._layer_ids: tuple[int, ...] = ()
        self._rope: Rope | None = None
        self._stack = Stack(
            list(self.layers),
            decoder.norm,
            self._head,
            heads=heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            eps=config.rms_norm_eps,
            scale=attention.scaling,
        )

    def capture(self, layer_ids: Sequence[int]) -> None:
        """From now on `forward` returns the concatenated outputs of these layers."""
        super().capture(layer_ids)
        self._layer_ids = tuple(layer_ids)

    def logits(self, hidden: Tensor, shape: LogitShape | None = None) -> Tensor:
        """Logits [..., V] of LM-head inputs [..., D]: those that the model itself would give, or
        with another shape."""
        if hidden.numel() > MOST_ROWS * hidden.shape[-1]:
            return super().logits(hidden, shape)
        return (shape or self.logit_shape)(linear(hidden, self._head.weight, self._head.bias))

    def choose(self, sampler: KeyedSampler, logits: Tensor, positions: Tensor) -> Tensor:
        """Tokens [n] that the sampler chooses for logits [n, V]; -1 where they are not finite."""
        if sampler.filters or sampler.temperature == 0:
            return super().choose(sampler, logits, positions)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return choose(logits, positions, sampler.keys[0], sampler.temperature)

    def forward(
        self, ids: Tensor, cache: SlabCache, n_logits: int, branches: Branches | None = None
    ) -> Forward:
        """Append ids [n] to the cache; logits of the last `n_logits` positions."""
        start, n, slab = cache.length, ids.shape[0], cache.stacked
        if slab is None or n > MOST_ROWS:
            return super().forward(ids, cache, n_logits, branches)
        table = self._table(cache.capacity)
        sight: str | Tree
        if branches is None:
            rope, sight = table.at(slice(start, start + n)), CAUSAL
        else:
            rope = table.at(branches.depths + start)
            sight = Tree(start, [-1, *branches.parents])
        outputs = self._stack.forward(
            self.embed(ids),
            slab,
            start,
            rope,
            sight,
            n_out=n_logits,
            feature_layers=self._layer_ids,
        )
        cache.advance(n)
        assert outputs.logits is not None
        features = None if outputs.features is None else outputs.features.to(self.dtype)
        return Forward(self.logit_shape(outputs.logits), features, outputs.hidden.to(self.dtype))

    def _table(self, capacity: int) -> Rope:
        """Rotary tables of at least `capacity` positions."""
        if self._rope is None or len(self._rope.cos) < capacity:
            places = torch.arange(capacity)[None]
            like = torch.empty(0, dtype=self.dtype)
            cos, sin = self._decoder.rotary_emb(like, places)
            working = working_dtype(self.dtype)
            self._rope = Rope(cos[0].to(working), sin[0].to(working))
        return self._rope
