"""An EAGLE-3 head in training: unrolled steps that read their own outputs (training-time test).

The target's embedding is frozen; the head learns its own rows of the draft vocabulary.

Letters: A anchors, S unrolled steps, D width, K draft vocabulary, R tokens of a response.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockpilot.app.config import TrainingConfig
from blockpilot.base.devices import has_16_bit_products
from blockpilot.decoding.loop import Method
from blockpilot.decoding.replay import slot_labels
from blockpilot.decoding.target import Target
from blockpilot.distill.blocks import sample_anchors
from blockpilot.distill.corpus import Example
from blockpilot.distill.losses import Candidates, cross_entropies, soft_targets
from blockpilot.distill.states import input_dtype, states_of
from blockpilot.distill.student import Autocast, walked_tau
from blockpilot.drafters.eagle3 import Eagle3Drafter
from blockpilot.drafters.eagle3_net import Eagle3Network
from blockpilot.drafters.forms.checkpoints import save_checkpoint
from blockpilot.policies.fixed import FixedPolicy

STEP_DECAY = 0.8  # weight of step i is STEP_DECAY ** i, as in the authors' training


class Eagle3Student:
    """A head that learns the target's distribution `block_size` - 1 tokens ahead."""

    def __init__(
        self, network: Eagle3Network, target: Target, settings: TrainingConfig, block_size: int
    ) -> None:
        self.network, self.target, self.settings = network, target, settings
        self.block_size = block_size
        self.feature_layers = network.config.target_layer_ids
        ids = network.target_ids(torch.arange(len(network.d2t), device=network.d2t.device))
        head = target.head_rows.to(input_dtype(target))
        place = torch.zeros(head.shape[0], dtype=torch.int64, device=head.device)
        place[ids] = torch.arange(len(ids), device=head.device)
        no_offset = torch.zeros(1, device=head.device)
        cap = target.logit_shape.cap
        self.vocabulary = Candidates(head[ids.to(head.device)], no_offset, place, cap)
        self.cross_entropies = cross_entropies

    def published(self) -> dict[str, Any]:
        return self.network.config.published()

    def compile(self, backend: str) -> None:
        # Dynamo would cut the graph where gradients are sent, and its parts pass numbers that
        # inductor takes for tensors (torch 2.13).
        torch._dynamo.config.optimize_ddp = False
        self.network.compile(backend=backend, dynamic=True)
        self.cross_entropies = torch.compile(cross_entropies, backend=backend, dynamic=True)

    def begin_step(self, generator: torch.Generator) -> None:
        """Nothing is drawn per step."""

    def loss(
        self, model: nn.Module, autocast: Autocast, example: Example, generator: torch.Generator
    ) -> Tensor:
        """Soft cross-entropy of the steps behind random anchors of one sequence.

        A step whose target token the draft vocabulary lacks teaches nothing. Only soft labels, as
        published: `training.soft_labels` and `training.slot_weights` are of other drafters.
        """
        ids = example.ids.to(self.target.device)
        anchors = sample_anchors(
            example.prompt_length, len(ids), self.settings.anchors_per_sequence, generator
        ).to(ids.device)
        labels, known = slot_labels(ids, anchors, self.block_size)  # [A, S]
        known &= self.network.t2d[labels]
        steps = torch.arange(labels.shape[1], device=ids.device)
        read = ids[(anchors[:, None] + steps).clamp_max(len(ids) - 1)]
        features, head_inputs = states_of(self.target, example, self.feature_layers)
        places = (anchors[:, None] + steps + 1 - example.prompt_length)[known]
        with autocast():
            hidden = model(features, self._embedded(ids[1:]), anchors, self._embedded(read))
            rows = self.network.lm_head.weight.to(hidden.dtype)
            expected, offset = soft_targets(head_inputs, self.vocabulary, rows, None)
            _, soft = self.cross_entropies(
                hidden[known],
                rows,
                self.vocabulary.offset,
                self.vocabulary.place[labels[known]],
                expected[places],
                offset[places],
                None,  # the head's own logits are under no cap
            )
        weights = (STEP_DECAY**steps).expand_as(known)[known]
        return (weights * soft).sum() / weights.sum().clamp_min(1e-6)

    def _embedded(self, ids: Tensor) -> Tensor:
        return self.target.embed(ids).to(input_dtype(self.target))

    @torch.no_grad()
    def tau(self, example: Example) -> float:
        network, ids = self.network, example.ids.to(self.target.device)
        anchors = torch.arange(example.prompt_length, len(ids) - 1, device=ids.device)
        labels, known = slot_labels(ids, anchors, self.block_size)
        features, _ = states_of(self.target, example, self.feature_layers)
        drawn: list[Tensor] = []

        def drafted(step: int, output: Tensor) -> Tensor:
            if step == 0:
                return self._embedded(ids[anchors])
            drawn.append(network.target_ids(network.lm_head(output).argmax(dim=-1)))
            return self._embedded(drawn[-1])

        with torch.autocast(
            ids.device.type, dtype=torch.bfloat16, enabled=has_16_bit_products(ids.device)
        ):
            outputs = network.unroll(
                features, self._embedded(ids[1:]), anchors, labels.shape[1], drafted
            )
            drafted(labels.shape[1], outputs[:, -1])
        return walked_tau(torch.stack(drawn, dim=1), labels, known)

    def save(self, folder: Path) -> None:
        save_checkpoint(self.network, self.published(), folder)

    def method(self, folder: Path) -> Method:
        """A chain as long as the unrolled steps."""
        drafter = Eagle3Drafter(
            checkpoint=str(folder),
            ignore_keys=[],
            depth=self.block_size - 2,
            top_k=1,
            block_size=self.block_size,
        )
        return Method(drafter, FixedPolicy(block_size=None, block_mode="draft"))
