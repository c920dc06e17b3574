"""Decoder layers of the Llama family as the kernels run them: a target's or a drafter's.

Letters: n rows, D width, F width of the concatenated features, C slots of a cache, G key/value
heads, d head width, V vocabulary rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockpilot.decoding.native.compiler import kernels

MOST_ROWS = 64
"""Rows above which torch's own products are faster."""

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}

Pointer = ctypes.c_void_p
Whole = ctypes.c_int64


class _Shape(ctypes.Structure):
    _fields_ = [
        *[(each, Whole) for each in ("width", "inner", "heads", "kv_heads", "head_dim")],
        ("attention_in", Whole),
        ("eps", ctypes.c_double),
        ("scale", ctypes.c_double),
    ]


_WEIGHTS = {
    "input_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
"""Members of the kernels' Layer, in order, and the parameters of a module that they are."""

READ = frozenset(_WEIGHTS.values())
"""Parameters of a layer that the kernels read."""

_OPTIONAL = ("q_bias", "k_bias", "v_bias", "o_bias", "q_norm", "k_norm")


class _Layer(ctypes.Structure):
    _fields_ = [(name, Pointer) for name in _WEIGHTS]


class _Rows(ctypes.Structure):
    _fields_ = [
        ("n", Whole),
        ("x", Pointer),
        ("attends", Pointer),
        ("cos", Pointer),
        ("sin", Pointer),
        ("slab", Pointer),
        ("capacity", Whole),
        ("start", Whole),
        ("sight", Whole),
        ("base", Whole),
        ("parents", ctypes.POINTER(Whole)),
        ("features", Pointer),
        ("n_features", Whole),
        ("feature_layers", ctypes.POINTER(Whole)),
    ]


class _Head(ctypes.Structure):
    _fields_ = [
        ("norm", Pointer),
        ("weight", Pointer),
        ("bias", Pointer),
        ("vocab", Whole),
        ("n", Whole),
        ("hidden", Pointer),
        ("logits", Pointer),
    ]


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the kernels compute in for weights of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Rope:
    """Rotary tables of all positions of a cache, in the dtype that the kernels compute in."""

    cos: Tensor  # [C, d]
    sin: Tensor  # [C, d]

    def at(self, positions: slice | Tensor) -> Rope:
        """The rows of some positions."""
        return Rope(self.cos[positions], self.sin[positions])


@dataclass(frozen=True)
class Tree:
    """Which slots the rows see: the `base` first ones, and their ancestors and themselves.

    `parents` are those of slots `base`, `base` + 1, ..., counted from `base` too; -1 for a root.
    """

    base: int
    parents: Sequence[int]


@dataclass(frozen=True)
class Outputs:
    """What a stack gives, in the dtype that it computes in."""

    last: Tensor  # [n, D] of the last layer
    hidden: Tensor  # [n_out, D] normed
    logits: Tensor | None  # [n_out, V], of a stack with a head
    features: Tensor | None  # [n, F] of the layers asked for


CAUSAL, WHOLE = "causal", "whole"
"""A row sees all slots up to its own / up to the last row's."""


class Stack:
    """Layers, final norm and head, read in place: the modules' parameters stay where they are."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        norm: nn.Module,
        head: nn.Module | None = None,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        scale: float,
    ) -> None:
        tensors = [_tensors(layer) for layer in layers]
        first = tensors[0]
        self.dtype = first["q"].dtype
        self.working = working_dtype(self.dtype)
        self._type = _TYPES[self.dtype]
        sizes = heads, kv_heads, head_dim, eps, scale
        self._made_of = list(layers), norm, head, *sizes  # keeps the memory that is pointed to
        self.width, self.n_layers = first["o"].shape[0], len(tensors)
        self._shape = _Shape(
            self.width,
            first["gate"].shape[0],
            heads,
            kv_heads,
            head_dim,
            first["q"].shape[1],
            eps,
            scale,
        )
        self._layers = (_Layer * len(tensors))(
            *[
                _Layer(**{name: tensor.data_ptr() for name, tensor in each.items()})
                for each in tensors
            ]
        )
        self._norm = _checked(norm.weight, self.dtype)
        bias = getattr(head, "bias", None)
        self._head = None if head is None else _checked(head.weight, self.dtype)
        self._head_bias = None if bias is None else _checked(bias, self.dtype)
        self._kernels = kernels()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy points to its own modules' memory."""
        return _stack, self._made_of

    def forward(
        self,
        x: Tensor,  # [n, D]
        slab: Tensor,  # [layers, 2, G, C, d]
        start: int,
        rope: Rope,  # of the rows
        sight: str | Tree,
        *,
        n_out: int,
        attends: Tensor | None = None,
        feature_layers: Sequence[int] = (),
    ) -> Outputs:
        """Rows behind the cache; their keys and values go to its slots `start`, `start` + 1, ...

        The last `n_out` rows go through the norm and the head. `attends` [n, ...] is what the first
        layer's projections read instead of the normed rows.
        """
        x = x.to(self.working, copy=True).contiguous()
        rows = self._rows(x, x.shape[0], slab, start, rope, sight, attends)
        features = None
        if feature_layers:
            features = x.new_empty(x.shape[0], len(feature_layers) * self.width)
            rows.features, rows.n_features = features.data_ptr(), len(feature_layers)
            rows.feature_layers = _wholes(feature_layers)
        hidden = x.new_empty(n_out, self.width)
        head = _Head(norm=self._norm.data_ptr(), n=n_out, hidden=hidden.data_ptr())
        logits = None
        if self._head is not None:
            logits = x.new_empty(n_out, self._head.shape[0])
            head.weight, head.vocab = self._head.data_ptr(), self._head.shape[0]
            head.bias = None if self._head_bias is None else self._head_bias.data_ptr()
            head.logits = logits.data_ptr()
        self._kernels.run_layers(
            Whole(self._type),
            ctypes.byref(self._shape),
            self._layers,
            Whole(self.n_layers),
            ctypes.byref(rows),
            ctypes.byref(head),
        )
        return Outputs(x, hidden, logits, features)

    def extend(self, context: Tensor, slab: Tensor, start: int, rope: Rope) -> None:
        """Keys and values of context rows [n, D], the same for all layers, into the cache."""
        rows = self._rows(None, context.shape[0], slab, start, rope, CAUSAL, context)
        self._kernels.extend(
            Whole(self._type),
            ctypes.byref(self._shape),
            self._layers,
            Whole(self.n_layers),
            ctypes.byref(rows),
        )

    def _rows(
        self,
        x: Tensor | None,
        n: int,
        slab: Tensor,
        start: int,
        rope: Rope,
        sight: str | Tree,
        attends: Tensor | None,
    ) -> _Rows:
        capacity = slab.shape[3]
        assert slab.dtype == self.dtype
        assert slab.is_contiguous()
        if start + n > capacity:
            raise ValueError(f"{start + n} positions exceed the cache's capacity of {capacity}")
        cos, sin = (each.to(self.working).contiguous() for each in (rope.cos[:n], rope.sin[:n]))
        if attends is not None:
            attends = attends.to(self.working).contiguous()
        rows = _Rows(
            n=n,
            x=None if x is None else x.data_ptr(),
            attends=None if attends is None else attends.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            slab=slab.data_ptr(),
            capacity=capacity,
            start=start,
            sight={CAUSAL: 0, WHOLE: 1}[sight] if isinstance(sight, str) else 2,
        )
        if isinstance(sight, Tree):
            assert start - sight.base + n <= len(sight.parents)
            rows.base, rows.parents = sight.base, _wholes(sight.parents)
        rows.kept = (cos, sin, attends)  # as long as they are pointed to
        return rows


def _stack(layers: list[nn.Module], norm: nn.Module, head: nn.Module | None, *sizes: Any) -> Stack:
    names = ("heads", "kv_heads", "head_dim", "eps", "scale")
    return Stack(layers, norm, head, **dict(zip(names, sizes, strict=True)))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times weight [out, in], for few rows; in the dtype that is computed in."""
    working = working_dtype(weight.dtype)
    flat = x.reshape(-1, weight.shape[1]).to(working).contiguous()
    to = flat.new_empty(flat.shape[0], weight.shape[0])
    kernels().linear(
        Whole(_TYPES[weight.dtype]),
        Pointer(weight.data_ptr()),
        Pointer(None if bias is None else bias.data_ptr()),
        Whole(weight.shape[0]),
        Whole(weight.shape[1]),
        Pointer(flat.data_ptr()),
        Whole(flat.shape[0]),
        Pointer(to.data_ptr()),
    )
    return to.unflatten(0, x.shape[:-1]) if x.dim() != 2 else to


def choose(logits: Tensor, positions: Tensor, key: Tensor, temperature: float) -> Tensor:
    """Tokens [n] of logits [n, V], float32 or float64: what the keyed sampler chooses without
    filters, with the `key` [2] of a prompt.
    """
    logits, positions, key = logits.contiguous(), positions.contiguous(), key.contiguous()
    tokens = torch.empty(len(logits), dtype=torch.int64)
    kernels().choose(
        Whole(_TYPES[logits.dtype]),
        Pointer(logits.data_ptr()),
        Whole(logits.shape[0]),
        Whole(logits.shape[1]),
        Pointer(key.data_ptr()),
        Pointer(positions.data_ptr()),
        ctypes.c_double(temperature),
        Pointer(tokens.data_ptr()),
    )
    return tokens


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Parameters of a layer by their names in the kernels."""
    found: dict[str, Tensor] = {}
    own = dict(layer.named_parameters())
    dtype = own[_WEIGHTS["q"]].dtype
    for name, place in _WEIGHTS.items():
        if place in own:
            found[name] = _checked(own[place], dtype)
        elif name not in _OPTIONAL:
            raise KeyError(place)
    return found


def _checked(parameter: Any, dtype: torch.dtype) -> Tensor:
    assert parameter.dtype == dtype
    assert parameter.device.type == "cpu"
    assert parameter.is_contiguous()
    tensor: Tensor = parameter.data
    return tensor


def _wholes(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (Whole * len(values))(*values)
