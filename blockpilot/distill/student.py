"""What the trainer wants to know of a drafter that it trains."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from blockpilot.decoding.anchors import walk
from blockpilot.decoding.loop import Method
from blockpilot.distill.corpus import Example

Autocast = Callable[[], AbstractContextManager[Any]]


class Student(Protocol):
    """A network with its loss on one conversation and its tau there."""

    @property
    def network(self) -> nn.Module:
        """What is trained."""
        ...

    def published(self) -> dict[str, Any]:
        """The config.json of the finished drafter."""
        ...

    def compile(self, backend: str) -> None:
        """Let torch.compile have what a step runs."""
        ...

    def begin_step(self, generator: torch.Generator) -> None:
        """An optimizer step of several conversations begins."""
        ...

    def loss(
        self, model: nn.Module, autocast: Autocast, example: Example, generator: torch.Generator
    ) -> Tensor:
        """Loss of one conversation; `model` is the network as it was prepared for training."""
        ...

    def tau(self, example: Example) -> float:
        """Tau at the trained size by a walk over drafts from all anchors of a conversation."""
        ...

    def save(self, folder: Path) -> None:
        """Write the drafter in the published form."""
        ...

    def method(self, folder: Path) -> Method:
        """How the drafter that was saved there decodes, unbound."""
        ...


def walked_tau(drafted: Tensor, labels: Tensor, known: Tensor) -> float:
    """Tau of drafts [A, S] from all anchors of a conversation, against its tokens there.

    A draft is accepted while it equals the stored response, so the walk visits the cycles that
    decoding would have had, up to arithmetic. `known` is False behind the response's end.
    """
    accepted = ((drafted == labels) & known).cumprod(dim=-1).sum(dim=-1)
    committed = walk(accepted.tolist())
    return sum(committed) / len(committed)
