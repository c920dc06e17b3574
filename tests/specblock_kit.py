"""SpecBlock drafters of tiny targets for tests: random, varied, and recorded."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from decoding_kit import tiny_target
from safetensors.torch import save_file
from torch import Tensor

from blockpilot.decoding.loop import Method
from blockpilot.decoding.types import Draft, View
from blockpilot.drafters.specblock import SpecBlockDrafter, random_specblock
from blockpilot.drafters.specblock_net import SpecBlockNetwork
from blockpilot.policies.fixed import FixedPolicy

TABLE = [2, 4, 10, 0]


class Recorded(SpecBlockDrafter):
    """Keeps where it was asked, what it proposed and how many rows its forwards had."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.drafts: list[tuple[int, Draft]] = []
        self.rows: list[int] = []

    def draft(self, view: View, n_slots: int) -> Draft:
        made = super().draft(view, n_slots)
        self.drafts.append((view.position, made))
        return made

    def _pass(self, condition: Tensor, *more: Any) -> Tensor:
        self.rows.append(len(condition))
        return super()._pass(condition, *more)


@cache
def published(kind: str = "llama") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A random drafter whose proposals are varied, as tensors and config.json."""
    network = random_specblock(tiny_target(kind))
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    generator = torch.Generator().manual_seed(3)
    for tensor in state.values():
        if tensor.is_floating_point() and tensor.dim() == 2:
            tensor.normal_(0, 0.3, generator=generator)
        elif tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5, generator=generator)
    return state, network.config.published()


def write(folder: Path, state: dict[str, Tensor], raw: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(state, folder / "model.safetensors")
    return folder


def flat(raw: dict[str, Any]) -> dict[str, Any]:
    return {**raw, "rope_theta": raw["rope_parameters"]["rope_theta"]}


def drafter_of(folder: Path, **settings: Any) -> Recorded:
    wanted: dict[str, Any] = {
        "ignore_keys": [],
        "adapt": None,
        "blocks": 2,
        "alternatives": TABLE,
        "block_size": 16,
    }
    return Recorded(checkpoint=str(folder), **(wanted | settings))


def bound(drafter: SpecBlockDrafter, size: int, kind: str = "llama") -> Method:
    return Method(drafter, FixedPolicy(block_size=size, block_mode="draft")).bind(tiny_target(kind))


class Exact(SpecBlockNetwork):
    """With angles in float64: transformers computes them in float32 whatever the weights are."""

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        shape = self.config.layers
        theta, d = shape.rope_parameters["rope_theta"], shape.head_dim
        half = positions[..., None] * theta ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)
        angles = torch.cat([half, half], dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)
