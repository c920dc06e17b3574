"""Capture of the target's hidden states that a drafter reads, and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_TAPS: WeakKeyDictionary[nn.ModuleList, FeatureTap] = WeakKeyDictionary()


def untap(layers: nn.ModuleList) -> None:
    """Close the tap of a model's layers, whoever opened it."""
    tap = _TAPS.pop(layers, None)
    if tap is not None:
        tap.close()


class FeatureTap:
    """Records the outputs of some decoder layers while a model runs.

    A layer may be named twice. Hooks sit on the layers themselves, so `forward` and `generate` are
    captured alike and the other layers cost nothing. Every forward appends; `take` hands over and
    forgets. A model has one tap: opening another closes it, for a forgotten one would keep every
    state and be compiled along.
    """

    def __init__(self, layers: nn.ModuleList, layer_ids: Sequence[int]) -> None:
        untap(layers)
        _TAPS[layers] = self
        self.layer_ids = tuple(layer_ids)
        self._seen: dict[int, list[Tensor]] = {i: [] for i in self.layer_ids}
        self._handles = [layers[i].register_forward_hook(self._recorder(i)) for i in self._seen]

    def _recorder(self, layer_id: int):  # type: ignore[no-untyped-def]
        def record(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            self._seen[layer_id].append(hidden)

        return record

    def take(self) -> Tensor:
        """Features [R, T, len(layer_ids) * D] of all positions seen since the last `take`."""
        parts = {}
        for layer_id, seen in self._seen.items():
            parts[layer_id] = seen[0] if len(seen) == 1 else torch.cat(seen, dim=1)
            seen.clear()
        return torch.cat([parts[layer_id] for layer_id in self.layer_ids], dim=-1)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
