"""Recipe `dflash` (arXiv 2602.06036): random anchors, packed blocks, weights of slots.

Embedding and LM head are the target's and frozen.

Letters: A anchors, B slots of a block, S = B - 1 predicted ones, D width, R tokens of a response.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from blockpilot.app.config import TrainingConfig
from blockpilot.base.devices import has_16_bit_products
from blockpilot.base.errors import UserError
from blockpilot.decoding.loop import Method
from blockpilot.decoding.replay import slot_labels
from blockpilot.decoding.target import Target
from blockpilot.distill.blocks import decay_weights, dpace_weights, sample_anchors, unused_id
from blockpilot.distill.corpus import Corpus, Example
from blockpilot.distill.losses import CandidateHead, Candidates, cross_entropies, soft_targets
from blockpilot.distill.recipe import FINAL_NORM, Autocast, Blueprint, walked_tau
from blockpilot.distill.states import input_dtype, states_of
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.drafters.dflash_load import check_fits, load_network, new_config, save_network
from blockpilot.drafters.dflash_net import DFlashNetwork
from blockpilot.drafters.forms.dflash import DFlashConfig
from blockpilot.policies.fixed import FixedPolicy


@dataclass(frozen=True, kw_only=True)
class DFlashRecipe:
    """Shape and loss of a DFlash drafter; conf/recipe/dflash.yaml says what each value means."""

    name: ClassVar[str] = "dflash"
    description: ClassVar[str] = (
        "DFlash drafter (arXiv 2602.06036) of {repo}, in the form of the published ones:\n"
        "`config.json` and bf16 safetensors, without embedding and LM head, which are the target's."
    )

    n_layers: int
    n_target_layers: int
    mask_token_id: int | None
    gamma: float | None
    soft_labels: float
    sampled_negatives: int | None

    def blueprint(
        self, target: Target, name: str, block_size: int, training: TrainingConfig
    ) -> Blueprint:
        """A new drafter, or one of the same shape that training continues from."""
        config = self.config(target, name, block_size)
        if training.init is None:
            network = DFlashNetwork(config)
            torch.nn.init.constant_(network.norm.weight, FINAL_NORM)
        else:
            network = load_network(training.init, target)
            given, wanted = network.config.identity(), config.identity()
            for key in (*wanted, *given):
                if given.get(key) != wanted.get(key):
                    raise UserError(
                        f"training.init={training.init}: {key}={given.get(key)}, new_drafter and "
                        f"recipe ask for {wanted.get(key)}"
                    )

        def student(corpus: Corpus) -> DFlashStudent:
            n_anchors = training.anchors_per_sequence
            return DFlashStudent(network.to(target.device), target, corpus, self, n_anchors)

        return Blueprint(network.config.target_layer_ids, student)

    def config(self, target: Target, name: str, block_size: int) -> DFlashConfig:
        """Shape of a new drafter; the mask defaults to the first row that no token has."""
        mask = unused_id(target) if self.mask_token_id is None else self.mask_token_id
        config = new_config(
            target,
            n_layers=self.n_layers,
            n_target_layers=self.n_target_layers,
            block_size=block_size,
            mask_token_id=mask,
        )
        check_fits(config, target, name)
        return config


class DFlashStudent:
    """A network that learns the responses of a corpus from `n_anchors` blocks a conversation."""

    def __init__(
        self,
        network: DFlashNetwork,
        target: Target,
        corpus: Corpus,
        recipe: DFlashRecipe,
        n_anchors: int,
    ) -> None:
        self.network, self.target, self.recipe = network, target, recipe
        self.n_anchors = n_anchors
        self.feature_layers = network.config.target_layer_ids
        head = target.head_rows.to(input_dtype(target))
        seen = corpus.response_vocabulary(target.embed_rows)
        self.cap = target.logit_shape.cap
        self.head = CandidateHead(head, seen, recipe.sampled_negatives, self.cap)
        self.cross_entropies = cross_entropies

    def published(self) -> dict[str, Any]:
        return self.network.config.published()

    def compile(self, backend: str) -> None:
        self.network.compile(backend=backend, dynamic=True)
        self.cross_entropies = torch.compile(cross_entropies, backend=backend, dynamic=True)

    def candidates(self, generator: torch.Generator) -> Candidates:
        return self.head.draw(generator)

    def loss(
        self,
        model: nn.Module,
        autocast: Autocast,
        example: Example,
        candidates: Candidates,
        generator: torch.Generator,
    ) -> Tensor:
        """Weighted mean cross-entropy of the slots behind random anchors of one sequence."""
        config, device = self.network.config, self.target.device
        ids = example.ids.to(device)
        anchors = sample_anchors(example.prompt_length, len(ids), self.n_anchors, generator)
        anchors = anchors.to(device)
        labels, known = slot_labels(ids, anchors, config.block_size)
        features, head_inputs = states_of(self.target, example, self.feature_layers)
        # Where the slots' tokens stand in the response, for the target's distribution there.
        positions = anchors[:, None] + torch.arange(1, config.block_size, device=device)
        positions = (positions - example.prompt_length)[known]
        with autocast():
            hidden = model(features, blocks_of(self.target, self.network, ids, anchors), anchors)
            expected, offset = soft_targets(head_inputs, candidates, candidates.weight, self.cap)
            hard, soft = self.cross_entropies(
                hidden[:, 1:][known],
                candidates.weight,
                candidates.offset,
                candidates.index[labels[known]],
                expected[positions],
                offset[positions],
                self.cap,
            )
        weights, share = self._weights(hard, known), self.recipe.soft_labels
        losses = (1 - share) * hard + share * soft
        return (weights * losses).sum() / weights.sum()

    def _weights(self, cross_entropy: Tensor, known: Tensor) -> Tensor:
        """Weights of the known slots, in their order."""
        if self.recipe.gamma is not None:
            decay = decay_weights(known.shape[1], self.recipe.gamma).to(known.device)
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
        return Method(DFlashDrafter(checkpoint=str(folder), ignore_keys=[], head=None), policy)


def blocks_of(target: Target, network: DFlashNetwork, ids: Tensor, anchors: Tensor) -> Tensor:
    """Input embeddings [A, B, D]: the anchor's token and masks."""
    config = network.config
    block = torch.full((len(anchors), config.block_size), config.mask_token_id, device=ids.device)
    block[:, 0] = ids[anchors]
    rows, scale = target.embed(block), config.embedding_scale / target.embedding_scale
    return (rows if scale == 1 else rows * scale).to(input_dtype(target))


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
