"""What a SpecBlock drafter learns from: rolled-out blocks of a known text, and their losses.

Shared by training and by adaptation, which differ in where the labels' distribution comes from. Own
readings: the mean over kept positions is taken slot by slot in every block of a conversation, the
classes of ranks are counted there too, and every anchor draws its own continuations.

Letters: A anchors, L blocks rolled out, K slots of a block, n slots with a known label, W draft
vocabulary, T tokens of a text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from blockpilot.decoding.replay import slot_labels
from blockpilot.drafters.specblock_net import N_CLASSES, RANK_BOUNDS

ROLLED_OUT = 3  # blocks behind an anchor
SLOT_DECAY = 0.8  # weight of slot k is SLOT_DECAY ** k
_COMMON = 10  # a class that is counted more often weighs less


@dataclass(frozen=True)
class Rollout:
    """Blocks behind anchors [A] of a text, each continuing the one before behind a random slot."""

    anchors: Tensor  # [A]
    continued: Tensor  # [A, L - 1] slots, from 1, that are kept of the block before
    read: Tensor  # [A, L - 1] tokens that later blocks read, the text's own
    labels: Tensor  # [A, L, K] tokens of the text
    places: Tensor  # [A, L, K] where they stand in it
    known: Tensor  # [A, L, K] False behind its end

    @classmethod
    def of(cls, ids: Tensor, anchors: Tensor, slots: int, generator: torch.Generator) -> Rollout:
        """Behind anchors of the text ids [T]; continuations M ~ U{1..K}."""
        steps = len(anchors), ROLLED_OUT - 1
        continued = torch.randint(1, slots + 1, steps, generator=generator).to(ids.device)
        anchors = anchors.to(ids.device)
        begins = torch.cat([anchors[:, None], anchors[:, None] + continued.cumsum(dim=1)], dim=1)
        labels, known = slot_labels(ids, begins.flatten(), slots + 1)
        places = begins[..., None] + torch.arange(1, slots + 1, device=ids.device)
        read = ids[begins[:, 1:].clamp_max(len(ids) - 1)]
        return cls(anchors, continued, read, labels.view_as(places), places, known.view_as(places))

    def spread(self, values: Tensor) -> Tensor:
        """Values [n, ...] of the known slots at their slots [A, L, K, ...], 0 elsewhere."""
        spread = values.new_zeros(*self.known.shape, *values.shape[1:])
        spread[self.known] = values
        return spread


def rank_classes(logits: Tensor, index: Tensor, has_row: Tensor) -> Tensor:
    """Classes [n] of the labels' ranks in draft logits [n, W]: 0 for the draft's best token.

    `index` [n] are the labels as draft ids; where the draft vocabulary lacks one, `has_row` is
    False and its class the last.
    """
    rank = (logits > logits.gather(-1, index[:, None])).sum(dim=-1) + 1
    bounds = torch.tensor(RANK_BOUNDS, device=rank.device)
    classes = (rank[:, None] > bounds).sum(dim=-1)
    return torch.where(has_row, classes, N_CLASSES - 1)


def draft_loss(losses: Tensor, classes: Tensor, has_row: Tensor) -> Tensor:
    """Losses of the slots [A, L, K] whose prefix is valid, summed over blocks.

    A slot counts where the draft vocabulary holds its label and all slots before it in its block
    proposed theirs. Each slot's mean has the weight of its place.
    """
    kept = has_row & _all_before(classes == 0)
    means = (losses * kept).sum(dim=0) / kept.sum(dim=0).clamp_min(1)  # [L, K]
    decay = SLOT_DECAY ** torch.arange(losses.shape[-1], device=losses.device)
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
