"""What the stage wants to know of a drafter that it trains.

A trainable drafter is one `Recipe`: a class in a file of this folder and a YAML of the drafter's
name in conf/recipe, whose keys are the constructor's arguments. The stage knows no kind by name. It
asks for a `Blueprint` before the target answers any prompt and, once the answers are there, for the
`Student` that learns them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from blockpilot.app.config import TrainingConfig
from blockpilot.decoding.anchors import walk
from blockpilot.decoding.loop import Method
from blockpilot.decoding.target import Target
from blockpilot.distill.corpus import Corpus, Example
from blockpilot.distill.losses import Candidates

Autocast = Callable[[], AbstractContextManager[Any]]

FINAL_NORM = 0.2
"""First weight of a new network's final norm: at 1 the fresh states meet the target's LM head at a
scale where the loss begins at several times ln V (39 against 14 on SmolLM2) and much of a short run
is spent on shrinking it."""


class Recipe(Protocol):
    """How drafters of one kind are made: the component `recipe` of a distillation."""

    @property
    def name(self) -> str:
        """Of the kind, as in conf/drafter."""
        ...

    @property
    def description(self) -> str:
        """Of a finished drafter, for its model card; `{repo}` stands for the target's."""
        ...

    @property
    def n_target_layers(self) -> int:
        """How many layers of the target a new drafter reads."""
        ...

    def blueprint(
        self, target: Target, name: str, block_size: int, training: TrainingConfig
    ) -> Blueprint:
        """The drafter `name` of blocks of `block_size` slots: new, or that of `training.init`.

        Raises UserError when it cannot fit the target, or when the one that training continues from
        is missing, of another target or not what the recipe asks for.
        """
        ...


@dataclass(frozen=True)
class Blueprint:
    """A drafter as far as it is known before there are answers to learn from."""

    feature_layers: tuple[int, ...]  # of the target, that the drafter reads
    student: Callable[[Corpus], Student]  # the drafter before its first step


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

    def candidates(self, generator: torch.Generator) -> Candidates:
        """Tokens that the losses of one optimizer step, of several conversations, run over."""
        ...

    def loss(
        self,
        model: nn.Module,
        autocast: Autocast,
        example: Example,
        candidates: Candidates,
        generator: torch.Generator,
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
