"""Recipe `specblock` (arXiv 2605.07243): rolled-out blocks, prefixes that are valid, ranks.

The target's embedding is frozen; the network learns its own rows of the draft vocabulary. Where the
description speaks of the target's argmax, the answer's own token is meant: that is what a draft is
compared with, and at temperature 0 it is the argmax. Further readings: drafters/specblock_loss.py.

Letters: n slots with a known label, D width, W draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockpilot.app.config import TrainingConfig
from blockpilot.base.devices import has_16_bit_products
from blockpilot.base.errors import UserError
from blockpilot.decoding.loop import Method
from blockpilot.decoding.replay import slot_labels
from blockpilot.decoding.target import Target
from blockpilot.distill.blocks import sample_anchors
from blockpilot.distill.corpus import Corpus, Example
from blockpilot.distill.losses import Candidates, soft_targets
from blockpilot.distill.recipe import FINAL_NORM, Autocast, Blueprint, walked_tau
from blockpilot.distill.states import input_dtype, states_of
from blockpilot.drafters.forms.checkpoints import save_checkpoint
from blockpilot.drafters.forms.eagle3 import default_layers
from blockpilot.drafters.specblock import SpecBlockDrafter, load_specblock, new_specblock
from blockpilot.drafters.specblock_loss import Rollout, draft_loss, rank_classes, rank_loss
from blockpilot.drafters.specblock_net import SpecBlockNetwork
from blockpilot.policies.fixed import FixedPolicy


@dataclass(frozen=True, kw_only=True)
class SpecBlockRecipe:
    """Shape of a SpecBlock drafter; conf/recipe/specblock.yaml says what each value means.

    It has a slot for each token that a block of `block_size` drafts. The loss is as published:
    draft and rank, of one weight.
    """

    name: ClassVar[str] = "specblock"
    description: ClassVar[str] = (
        "SpecBlock drafter (arXiv 2605.07243) of {repo}: `config.json` and bf16 safetensors under\n"
        "this project's names, without embedding, which is the target's. Measured as a chain of\n"
        "one block."
    )
    n_target_layers: ClassVar[int] = 3

    draft_vocabulary: int

    def blueprint(
        self, target: Target, name: str, block_size: int, training: TrainingConfig
    ) -> Blueprint:
        """A new drafter over the tokens that occur most often in the responses, or a given one."""
        given = None
        layers = default_layers(target.config.num_hidden_layers, name)
        if training.init is not None:
            given = self.given(target, training.init, block_size)
            layers = given.config.target_layer_ids

        def student(corpus: Corpus) -> SpecBlockStudent:
            network = self.new(target, corpus, block_size - 1) if given is None else given
            n_anchors = training.anchors_per_sequence
            return SpecBlockStudent(network.to(target.device), target, n_anchors)

        return Blueprint(layers, student)

    def new(self, target: Target, corpus: Corpus, slots: int) -> SpecBlockNetwork:
        """Random layers under the target's own rows of the draft vocabulary; the shift begins as
        none."""
        ids = corpus.frequent_tokens(self.draft_vocabulary, target.embed_rows)
        network = new_specblock(target, ids, slots)
        network.lm_head.weight.data.copy_(target.head_rows[ids.to(target.device)])
        nn.init.constant_(network.norm.weight, FINAL_NORM)
        nn.init.eye_(network.shift.weight)
        return network

    def given(self, target: Target, init: str, block_size: int) -> SpecBlockNetwork:
        """The drafter that training continues from (UserError when it is not of this recipe)."""
        network = load_specblock(init, target)
        config = network.config
        if config.slots != block_size - 1:
            raise UserError(
                f"training.init={init}: it has {config.slots} slots, new_drafter.block_size="
                f"{block_size} asks for {block_size - 1}"
            )
        if config.draft_vocab_size > self.draft_vocabulary:
            raise UserError(
                f"training.init={init}: its draft vocabulary has {config.draft_vocab_size} tokens, "
                f"recipe.draft_vocabulary={self.draft_vocabulary} asks for fewer"
            )
        return network


class SpecBlockStudent:
    """A network that learns from blocks rolled out behind `n_anchors` tokens a conversation."""

    def __init__(self, network: SpecBlockNetwork, target: Target, n_anchors: int) -> None:
        self.network, self.target, self.n_anchors = network, target, n_anchors
        self.feature_layers = network.config.target_layer_ids
        every = torch.arange(network.config.draft_vocab_size, device=network.d2t.device)
        head = target.head_rows.to(input_dtype(target))
        no_offset = torch.zeros(1, device=head.device)
        cap = target.logit_shape.cap
        self.vocabulary = Candidates(
            head[network.target_ids(every)], no_offset, network.draft_index(), cap
        )
        self.losses = slot_losses

    def published(self) -> dict[str, Any]:
        return self.network.config.published()

    def compile(self, backend: str) -> None:
        torch._dynamo.config.optimize_ddp = False  # as for EAGLE-3: its parts do not compile
        self.network.compile(backend=backend, dynamic=True)
        self.losses = torch.compile(slot_losses, backend=backend, dynamic=True)

    def candidates(self, generator: torch.Generator) -> Candidates:
        """The draft vocabulary, in every block."""
        return self.vocabulary

    def loss(
        self,
        model: nn.Module,
        autocast: Autocast,
        example: Example,
        candidates: Candidates,
        generator: torch.Generator,
    ) -> Tensor:
        """Draft and rank losses of blocks rolled out behind random anchors of one sequence."""
        network, ids = self.network, example.ids.to(self.target.device)
        anchors = sample_anchors(example.prompt_length, len(ids), self.n_anchors, generator)
        rollout = Rollout.of(ids, anchors, network.config.slots, generator)
        known, spread = rollout.known, rollout.spread
        labels = rollout.labels[known]
        has_row = network.t2d[labels]
        features, head_inputs = states_of(self.target, example, self.feature_layers)
        with autocast():
            normed = model(
                *(features, self._embedded(ids[1:]), rollout.anchors, rollout.continued),
                self._embedded(rollout.read),
            )[known]
            rows = network.lm_head.weight.to(normed.dtype)
            expected, _ = soft_targets(head_inputs, candidates, rows, None)
            expected = expected[rollout.places[known] - example.prompt_length]
            logits = F.linear(normed, rows).float()
            soft, classes = self.losses(normed, logits, candidates.index[labels], has_row, expected)
            ranked = network.rank_head(normed, logits).float()
        draft = draft_loss(spread(soft), spread(classes), spread(has_row))
        return draft + rank_loss(spread(ranked), spread(classes), known)

    def _embedded(self, ids: Tensor) -> Tensor:
        return self.target.embed(ids).to(input_dtype(self.target))

    @torch.no_grad()
    def tau(self, example: Example) -> float:
        network, ids = self.network, example.ids.to(self.target.device)
        anchors = torch.arange(example.prompt_length, len(ids) - 1, device=ids.device)
        labels, known = slot_labels(ids, anchors, network.config.slots + 1)
        features, _ = states_of(self.target, example, self.feature_layers)
        with torch.autocast(
            ids.device.type, dtype=torch.bfloat16, enabled=has_16_bit_products(ids.device)
        ):
            states, _ = network.first_blocks(features, self._embedded(ids[1:]))
            best = network.lm_head(network.norm(states[anchors - 1])).argmax(dim=-1)
        return walked_tau(network.target_ids(best), labels, known)

    def save(self, folder: Path) -> None:
        save_checkpoint(self.network, self.published(), folder)

    def method(self, folder: Path) -> Method:
        """A chain of one block."""
        drafter = SpecBlockDrafter(
            checkpoint=str(folder),
            ignore_keys=[],
            blocks=1,
            alternatives=[1],
            adapt=None,
            block_size=self.network.config.slots + 1,
        )
        return Method(drafter, FixedPolicy(block_size=None, block_mode="draft"))


def slot_losses(
    normed: Tensor,  # [n, D]
    logits: Tensor,  # [n, W] float32
    index: Tensor,  # [n] labels as draft ids
    has_row: Tensor,  # [n] False where the draft vocabulary lacks the label
    expected: Tensor,  # [n, D] of the target's distribution, as `soft_targets` has it
) -> tuple[Tensor, Tensor]:
    """Cross-entropies [n] towards the target's distribution, and classes [n] of the labels."""
    soft = logits.logsumexp(dim=-1) - (normed.float() * expected.float()).sum(dim=-1)
    return soft, rank_classes(logits, index, has_row)
