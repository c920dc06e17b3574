"""Recipe `specblock` (arXiv 2605.07243): rolled-out blocks, prefixes that are valid, ranks.

The target's embedding is frozen; the network learns its own rows of the draft vocabulary. Where the
description speaks of the target's argmax, the answer's own token is meant: that is what a draft is
compared with, and at temperature 0 it is the argmax. Own readings besides: the mean over kept
positions is taken slot by slot in every block of a conversation, the classes of ranks are counted
there too, and every anchor draws its own continuations.

Letters: A anchors, L blocks rolled out, K slots of a block, n slots with a known label, D width,
W draft vocabulary, R tokens of a response.
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
from blockpilot.drafters.eagle3_net import default_layers
from blockpilot.drafters.forms.checkpoints import save_checkpoint
from blockpilot.drafters.specblock import SpecBlockDrafter, load_specblock, new_specblock
from blockpilot.drafters.specblock_net import N_CLASSES, RANK_BOUNDS, SpecBlockNetwork
from blockpilot.policies.fixed import FixedPolicy

ROLLED_OUT = 3  # blocks behind an anchor
SLOT_DECAY = 0.8  # weight of slot k is SLOT_DECAY ** k
_COMMON = 10  # a class that is counted more often weighs less


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
        n_slots = network.config.slots
        anchors = sample_anchors(example.prompt_length, len(ids), self.n_anchors, generator)
        steps = len(anchors), ROLLED_OUT - 1
        continued = torch.randint(1, n_slots + 1, steps, generator=generator).to(ids.device)
        anchors = anchors.to(ids.device)
        begins = torch.cat([anchors[:, None], anchors[:, None] + continued.cumsum(dim=1)], dim=1)
        of_slots = *begins.shape, n_slots  # A, L, K
        labels, known = slot_labels(ids, begins.flatten(), n_slots + 1)
        labels, known = labels.view(of_slots), known.view(of_slots)
        read = ids[begins[:, 1:].clamp_max(len(ids) - 1)]
        features, head_inputs = states_of(self.target, example, self.feature_layers)
        places = torch.arange(1, n_slots + 1, device=ids.device) - example.prompt_length
        positions = (begins[..., None] + places)[known]
        has_row = network.t2d[labels[known]]
        with autocast():
            normed = model(
                features, self._embedded(ids[1:]), anchors, continued, self._embedded(read)
            )[known]
            rows = network.lm_head.weight.to(normed.dtype)
            expected, _ = soft_targets(head_inputs, candidates, rows, None)
            logits = F.linear(normed, rows).float()
            soft, classes = self.losses(
                *(normed, logits, candidates.index[labels[known]], has_row, expected[positions])
            )
            ranked = network.rank_head(normed, logits).float()
        draft = draft_loss(_spread(soft, known), _spread(classes, known), _spread(has_row, known))
        return draft + rank_loss(_spread(ranked, known), _spread(classes, known), known)

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
    """Cross-entropies [n] towards the target's distribution, and classes [n] of the label's rank in
    the draft: 0 for its best token, the last also for a label that it cannot draft."""
    soft = logits.logsumexp(dim=-1) - (normed.float() * expected.float()).sum(dim=-1)
    rank = (logits > logits.gather(-1, index[:, None])).sum(dim=-1) + 1
    bounds = torch.tensor(RANK_BOUNDS, device=rank.device)
    classes = (rank[:, None] > bounds).sum(dim=-1)
    return soft, torch.where(has_row, classes, N_CLASSES - 1)


def draft_loss(soft: Tensor, classes: Tensor, has_row: Tensor) -> Tensor:
    """Loss of slots [A, L, K] whose prefix is valid, summed over blocks.

    A slot counts where the draft vocabulary holds its label and all slots before it in its block
    proposed theirs. Each slot's mean has the weight of its place.
    """
    kept = has_row & _all_before(classes == 0)
    means = (soft * kept).sum(dim=0) / kept.sum(dim=0).clamp_min(1)  # [L, K]
    decay = SLOT_DECAY ** torch.arange(soft.shape[-1], device=soft.device)
    return (decay * means).sum()


def rank_loss(ranked: Tensor, classes: Tensor, known: Tensor) -> Tensor:
    """Mean loss of class logits [A, L, K, 4] up to the first wrong prediction of each block.

    Soft labels fall with the square of a class's distance from the true one, faster below it; a
    prediction far off, above all one too sure, weighs more, and a class that is common at its slot
    less.
    """
    every = torch.arange(N_CLASSES, device=ranked.device)
    predicted = ranked.detach().argmax(dim=-1)
    off = classes[..., None] - every  # [A, L, K, 4]
    kernel = (1 + off.abs() + off.clamp_min(0)).float() ** -2
    wanted = kernel / kernel.sum(dim=-1, keepdim=True)
    losses = -(wanted * ranked.log_softmax(dim=-1)).sum(dim=-1)
    counts = (F.one_hot(classes, N_CLASSES) * known[..., None]).sum(dim=(0, 1))  # [K, 4]
    slots = torch.arange(counts.shape[0], device=ranked.device).expand_as(classes)
    weights = 1 + (classes - predicted).abs() + (classes - predicted).clamp_min(0)
    weights = weights * (_COMMON / counts[slots, classes].clamp_min(1)).clamp_max(1)
    kept = known & _all_before(predicted == classes)
    return (weights * losses * kept).sum() / kept.sum().clamp_min(1)


def _all_before(right: Tensor) -> Tensor:
    """Where all earlier slots [..., K] are right."""
    return F.pad(right[..., :-1].cumprod(dim=-1), (1, 0), value=1).bool()


def _spread(values: Tensor, known: Tensor) -> Tensor:
    """Values [n, ...] at the slots [A, L, K] where something is known, 0 elsewhere."""
    spread = values.new_zeros(*known.shape, *values.shape[1:])
    spread[known] = values
    return spread
