"""A DFlash drafter in training (arXiv 2602.06036): random anchors, packed blocks, slot weights.

Embedding and LM head are the target's and frozen.

Letters: A anchors, B slots of a block, S = B - 1 predicted ones, D width, R tokens of a response.
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
from blockpilot.distill.blocks import decay_weights, dpace_weights, sample_anchors
from blockpilot.distill.corpus import Corpus, Example
from blockpilot.distill.losses import CandidateHead, cross_entropies, soft_targets
from blockpilot.distill.states import input_dtype, states_of
from blockpilot.distill.student import Autocast, walked_tau
from blockpilot.drafters.dflash import DFlashDrafter, save_network
from blockpilot.drafters.dflash_net import DFlashNetwork
from blockpilot.policies.fixed import FixedPolicy


class DFlashStudent:
    """A network that learns the responses of a corpus."""

    def __init__(
        self, network: DFlashNetwork, target: Target, corpus: Corpus, settings: TrainingConfig
    ) -> None:
        self.network, self.target, self.settings = network, target, settings
        self.feature_layers = network.config.target_layer_ids
        head = target.head_rows.to(input_dtype(target))
        seen = corpus.response_vocabulary(target.embed_rows)
        self.cap = target.logit_shape.cap
        self.head = CandidateHead(head, seen, settings.sampled_negatives, self.cap)
        self.cross_entropies = cross_entropies

    def published(self) -> dict[str, Any]:
        return self.network.config.published()

    def compile(self, backend: str) -> None:
        self.network.compile(backend=backend, dynamic=True)
        self.cross_entropies = torch.compile(cross_entropies, backend=backend, dynamic=True)

    def begin_step(self, generator: torch.Generator) -> None:
        self.candidates = self.head.draw(generator)

    def loss(
        self, model: nn.Module, autocast: Autocast, example: Example, generator: torch.Generator
    ) -> Tensor:
        """Weighted mean cross-entropy of the slots behind random anchors of one sequence."""
        config, device, candidates = self.network.config, self.target.device, self.candidates
        ids = example.ids.to(device)
        anchors = sample_anchors(
            example.prompt_length, len(ids), self.settings.anchors_per_sequence, generator
        ).to(device)
        labels, known = slot_labels(ids, anchors, config.block_size)
        features, head_inputs = states_of(self.target, example, self.feature_layers)
        # Places of the slots' tokens in the response, for what the target thought of them.
        places = anchors[:, None] + torch.arange(1, config.block_size, device=device)
        places = (places - example.prompt_length)[known]
        with autocast():
            hidden = model(features, blocks_of(self.target, self.network, ids, anchors), anchors)
            expected, offset = soft_targets(head_inputs, candidates, candidates.weight, self.cap)
            hard, soft = self.cross_entropies(
                hidden[:, 1:][known],
                candidates.weight,
                candidates.offset,
                candidates.place[labels[known]],
                expected[places],
                offset[places],
                self.cap,
            )
        weights, share = self._weights(hard, known), self.settings.soft_labels
        losses = (1 - share) * hard + share * soft
        return (weights * losses).sum() / weights.sum()

    def _weights(self, cross_entropy: Tensor, known: Tensor) -> Tensor:
        """Weights of the known slots, in their order."""
        if self.settings.slot_weights == "decay":
            decay = decay_weights(known.shape[1], self.settings.gamma).to(known.device)
            return decay.expand_as(known)[known]
        probability = torch.zeros(known.shape, device=known.device)
        probability[known] = cross_entropy.detach().neg().exp()
        return dpace_weights(probability, known)[known]

    def tau(self, example: Example) -> float:
        return replayed_tau(self.network, self.target, example)

    def save(self, folder: Path) -> None:
        save_network(self.network, folder)

    def method(self, folder: Path) -> Method:
        policy = FixedPolicy(block_size=self.network.config.block_size, block_mode="draft")
        return Method(DFlashDrafter(checkpoint=str(folder), ignore_keys=[]), policy)


def blocks_of(target: Target, network: DFlashNetwork, ids: Tensor, anchors: Tensor) -> Tensor:
    """Input embeddings [A, B, D]: the anchor's token and masks."""
    config = network.config
    block = torch.full((len(anchors), config.block_size), config.mask_token_id, device=ids.device)
    block[:, 0] = ids[anchors]
    return target.embed(block).to(input_dtype(target))


@torch.no_grad()
def replayed_tau(network: DFlashNetwork, target: Target, example: Example) -> float:
    """Tau at the trained block size of one conversation, by a walk over drafts from all anchors."""
    config = network.config
    ids = example.ids.to(target.device)
    anchors = torch.arange(example.prompt_length, len(ids) - 1, device=ids.device)
    labels, known = slot_labels(ids, anchors, config.block_size)
    features, _ = states_of(target, example, config.target_layer_ids)
    with torch.autocast(
        ids.device.type, dtype=torch.bfloat16, enabled=has_16_bit_products(ids.device)
    ):
        # Not by a call: a compiled network would be compiled again for these shapes.
        hidden = network.forward(features, blocks_of(target, network, ids, anchors), anchors)
        predicted = target.logits(hidden[:, 1:].to(target.dtype)).argmax(dim=-1)
    return walked_tau(predicted, labels, known)
