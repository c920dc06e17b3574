"""Training of a DFlash drafter (arXiv 2602.06036): random anchors, packed blocks, slot weights.

Embedding and LM head are the target's and frozen. One micro-batch is one sequence with many blocks
over its context, so nothing is padded. The order of the data and the anchors follow from
(seed, step, rank), so a resumed run continues as if it had not stopped.

Letters: A anchors, S = B - 1 predicted slots, D width, K candidate tokens of the loss.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from blockpilot.config import TrainingConfig
from blockpilot.decoding.anchors import walk
from blockpilot.decoding.replay import slot_labels
from blockpilot.decoding.target import Target
from blockpilot.devices import has_16_bit_products
from blockpilot.drafters.dflash_net import DFlashNetwork
from blockpilot.records.files import replace_file
from blockpilot.tracking import Tracker
from blockpilot.training.blocks import (
    decay_weights,
    dpace_weights,
    sample_anchors,
)
from blockpilot.training.corpus import Corpus, Example
from blockpilot.training.optimizer import DrafterOptimizer
from blockpilot.training.settings import keep_settings

log = logging.getLogger(__name__)

_SHAPING = [f.name for f in fields(TrainingConfig) if not f.name.endswith("_every")]
"""Settings that the weights depend on; how often to log and to evaluate is none."""


@dataclass(frozen=True)
class Candidates:
    """Tokens that the loss is computed over in one step, with the LM head's rows."""

    weight: Tensor  # [K, D]
    offset: Tensor  # [K] log-correction of sampled tokens
    place: Tensor  # [V] index of a token among the candidates


class CandidateHead:
    """The softmax of the loss over the tokens that occur in responses and a sample of the others.

    Most of a vocabulary never occurs in the responses and the LM head is the largest matrix of the
    step. The sampled tokens stand for all the absent ones: their logits are raised by
    log(absent / sampled), which keeps the partition function unbiased. `n_sampled` None takes the
    whole vocabulary.
    """

    def __init__(self, head: Tensor, seen: Tensor, n_sampled: int | None) -> None:
        self.head = head  # [V, D]
        absent = torch.ones(head.shape[0], dtype=torch.bool)
        absent[seen] = False
        self.seen, self.absent = seen, absent.nonzero()[:, 0]
        self.n_sampled = n_sampled if n_sampled and n_sampled < len(self.absent) else None

    def draw(self, generator: torch.Generator) -> Candidates:
        """Candidates of one step."""
        device = self.head.device
        if self.n_sampled is None:
            everything = torch.arange(self.head.shape[0], device=device)
            return Candidates(self.head, torch.zeros(1, device=device), everything)
        drawn = torch.randperm(len(self.absent), generator=generator)[: self.n_sampled]
        ids = torch.cat([self.seen, self.absent[drawn]]).to(device)
        offset = torch.zeros(len(ids), device=device)
        offset[len(self.seen) :] = math.log(len(self.absent) / self.n_sampled)
        place = torch.zeros(self.head.shape[0], dtype=torch.int64, device=device)
        place[ids] = torch.arange(len(ids), device=device)
        return Candidates(self.head[ids], offset, place)


class DrafterTrainer:
    """Trains a network on a corpus; `resume`, `run` and `save` make an interruptible job of it."""

    def __init__(
        self,
        network: DFlashNetwork,
        target: Target,
        corpus: Corpus,
        settings: TrainingConfig,
        *,
        seed: int,
        folder: Path,
        made_by: dict[str, Any],
    ) -> None:
        self.target, self.corpus, self.settings, self.seed = target, corpus, settings, seed
        self.made_by = made_by  # code and machine, from `provenance.facts`; the first run's
        self.checkpoint = folder / "checkpoint.pt"
        self.accelerator = Accelerator(
            cpu=target.device.type == "cpu",
            mixed_precision="bf16" if has_16_bit_products(target.device) else "no",
            gradient_accumulation_steps=settings.sequences_per_step,
        )
        self.network = network
        self.cross_entropy = candidate_cross_entropy
        if settings.compile is not None:
            network.compile(backend=settings.compile, dynamic=True)
            self.cross_entropy = torch.compile(
                candidate_cross_entropy, backend=settings.compile, dynamic=True
            )
        self.model = self.accelerator.prepare(network)
        self.optimizer = DrafterOptimizer(network, settings)
        seen = corpus.response_vocabulary(target.embed_rows)
        head = target.model.get_output_embeddings().weight.to(input_dtype(target))
        self.head = CandidateHead(head, seen, settings.sampled_negatives)
        self.step = 0
        self.seconds = 0.0  # of all runs that this training took

    def resume(self) -> None:
        """Continue from the checkpoint of this folder, if there is one.

        Raises UserError when it was made with other settings, naming the first that differs.
        """
        file = self.checkpoint.with_name("training.json")
        leads = self.accelerator.is_main_process
        if not self.checkpoint.exists():
            if leads:
                file.unlink(missing_ok=True)
                keep_settings(file, self._made_with(), what="a checkpoint")
            return
        if leads or file.exists():
            keep_settings(file, self._made_with(), what="a checkpoint")
        state = torch.load(self.checkpoint, weights_only=True, map_location=self.target.device)
        self.network.load_state_dict(state["network"])
        self.optimizer.load(state["optimizer"])
        self.step, self.seconds, self.made_by = state["step"], state["seconds"], state["made_by"]
        log.info("continuing at step %d", self.step)

    def _made_with(self) -> dict[str, Any]:
        """What the weights of any later step depend on."""
        return {
            **{name: getattr(self.settings, name) for name in _SHAPING},
            "seed": self.seed,
            "processes": self.accelerator.num_processes,
            "responses": len(self.corpus),
            "response_tokens": self.corpus.response_tokens,
            "drafter": self.network.config.published(),
        }

    def save(self) -> None:
        """Write the checkpoint, atomically; every rank gives its part, one writes."""
        optimizer = self.optimizer.state()
        if not self.accelerator.is_main_process:
            return
        state: dict[str, Any] = {
            "network": self.network.state_dict(),
            "optimizer": optimizer,
            "step": self.step,
            "seconds": self.seconds,
            "made_by": self.made_by,
        }
        replace_file(self.checkpoint, lambda scratch: torch.save(state, scratch))

    def run(self, validation: Corpus, tracker: Tracker) -> None:
        """Train to the last step, logging curves and saving on the way."""
        settings = self.settings
        begin, first, before = time.monotonic(), self.step, self.seconds
        losses: list[float] = []
        for batch in self._batches():
            losses.append(self._update(batch))
            self.step += 1
            self.seconds = before + time.monotonic() - begin
            if self.step % settings.log_every == 0 or self.step == settings.steps:
                pace = (time.monotonic() - begin) / (self.step - first)
                loss = sum(losses) / len(losses)
                losses.clear()
                rate = self.optimizer.learning_rate
                tracker.log({"train/loss": loss, "train/learning_rate": rate}, step=self.step)
                log.info(
                    "step %d/%d  loss %.3f  %.2f s/step  %.0f min left",
                    self.step,
                    settings.steps,
                    loss,
                    pace,
                    pace * (settings.steps - self.step) / 60,
                )
            if self.step % settings.evaluate_every == 0 or self.step == settings.steps:
                self.save()
                taus = self._held_out(validation)
                tracker.log({f"tau/{name}": tau for name, tau in taus.items()}, step=self.step)
                log.info("step %d  held-out tau %s", self.step, _told(taus))

    def _held_out(self, validation: Corpus) -> dict[str, float]:
        """Macro tau per prompt set; every rank walks its share of the conversations."""
        places = range(
            self.accelerator.process_index, len(validation), self.accelerator.num_processes
        )
        mine = [replayed_tau(self.network, self.target, validation[i]) for i in places]
        pairs = [(validation[i].prompt_set, tau) for i, tau in zip(places, mine, strict=True)]
        per_set: dict[str, list[float]] = {}
        for name, tau in gather_object(pairs):
            per_set.setdefault(name, []).append(tau)
        return {name: sum(taus) / len(taus) for name, taus in sorted(per_set.items())}

    def _batches(self) -> Iterator[list[int]]:
        """Sequences of this rank for every step from `self.step` on."""
        size, world = self.settings.sequences_per_step, self.accelerator.num_processes
        rank = self.accelerator.process_index
        for step in range(self.step, self.settings.steps):
            start = (step * world + rank) * size
            yield [self._order(n // len(self.corpus), n) for n in range(start, start + size)]

    def _order(self, epoch: int, n: int) -> int:
        if getattr(self, "_epoch", None) != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._permutation = torch.randperm(len(self.corpus), generator=generator)
            self._epoch = epoch
        return int(self._permutation[n % len(self.corpus)])

    def _update(self, batch: list[int]) -> float:
        """One optimizer step over the sequences of a batch; their mean loss."""
        rank = self.accelerator.process_index
        key = (self.seed * 1_000_003 + self.step) * 4099 + rank
        generator = torch.Generator().manual_seed(key)
        candidates = self.head.draw(generator)
        total = 0.0
        for index in batch:
            with self.accelerator.accumulate(self.model):
                loss = self._loss(self.corpus[index], candidates, generator)
                self.accelerator.backward(loss)
                total += loss.item()
        self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.model.zero_grad()
        return total / len(batch)

    def _loss(self, example: Example, candidates: Candidates, generator: torch.Generator) -> Tensor:
        """Weighted mean cross-entropy of the slots behind random anchors of one sequence."""
        config, device = self.network.config, self.target.device
        ids = example.ids.to(device)
        anchors = sample_anchors(
            example.prompt_length, len(ids), self.settings.anchors_per_sequence, generator
        ).to(device)
        labels, known = slot_labels(ids, anchors, config.block_size)
        features = features_of(self.target, example, config.target_layer_ids)
        with self.accelerator.autocast():
            hidden = self.model(
                features, blocks_of(self.target, self.network, ids, anchors), anchors
            )
            cross_entropy = self.cross_entropy(
                hidden[:, 1:][known],
                candidates.weight,
                candidates.offset,
                candidates.place[labels[known]],
            )
        weights = self._weights(cross_entropy, known)
        return (weights * cross_entropy).sum() / weights.sum()

    def _weights(self, cross_entropy: Tensor, known: Tensor) -> Tensor:
        """Weights of the known slots, in their order."""
        if self.settings.slot_weights == "decay":
            decay = decay_weights(known.shape[1], self.settings.gamma).to(known.device)
            return decay.expand_as(known)[known]
        probability = torch.zeros(known.shape, device=known.device)
        probability[known] = cross_entropy.detach().neg().exp()
        return dpace_weights(probability, known)[known]


def candidate_cross_entropy(
    hidden: Tensor,  # [n, D]
    weight: Tensor,  # [K, D]
    offset: Tensor,  # [K]
    labels: Tensor,  # [n]
) -> Tensor:
    """Cross-entropy [n] in float32 of LM-head inputs over K candidate tokens."""
    logits = F.linear(hidden, weight).float() + offset
    return F.cross_entropy(logits, labels, reduction="none")


def blocks_of(target: Target, network: DFlashNetwork, ids: Tensor, anchors: Tensor) -> Tensor:
    """Input embeddings [A, B, D]: the anchor's token and masks."""
    config = network.config
    block = torch.full((len(anchors), config.block_size), config.mask_token_id, device=ids.device)
    block[:, 0] = ids[anchors]
    return target.embed(block).to(input_dtype(target))


def features_of(target: Target, example: Example, layer_ids: tuple[int, ...]) -> Tensor:
    """Features [T - 1, F] of all but the last token: stored, or by one target forward."""
    if example.features is not None:
        return example.features.to(target.device, input_dtype(target))
    target.capture(layer_ids)
    with torch.inference_mode():
        ids = example.ids[:-1].to(target.device)
        features = target.forward(ids, target.new_cache(len(ids)), n_logits=1).features
    assert features is not None
    return features.clone().to(input_dtype(target))  # the clone leaves inference mode behind


def input_dtype(target: Target) -> torch.dtype:
    """Of what a network in training reads: without autocast its own float32 needs the same."""
    widened = target.dtype.itemsize == 2 and not has_16_bit_products(target.device)
    return torch.float32 if widened else target.dtype


@torch.no_grad()
def replayed_tau(network: DFlashNetwork, target: Target, example: Example) -> float:
    """Tau at the trained block size of one conversation, by a walk over drafts from all anchors.

    A draft is accepted while it equals the stored response, so the walk visits the cycles that
    decoding would have had, up to arithmetic.
    """
    config = network.config
    ids = example.ids.to(target.device)
    anchors = torch.arange(example.prompt_length, len(ids) - 1, device=ids.device)
    labels, known = slot_labels(ids, anchors, config.block_size)
    features = features_of(target, example, config.target_layer_ids)
    with torch.autocast(
        ids.device.type, dtype=torch.bfloat16, enabled=has_16_bit_products(ids.device)
    ):
        # Not by a call: a compiled network would be compiled again for these shapes.
        hidden = network.forward(features, blocks_of(target, network, ids, anchors), anchors)
        predicted = target.head(hidden[:, 1:].to(target.dtype)).argmax(dim=-1)
    accepted = ((predicted == labels) & known).cumprod(dim=-1).sum(dim=-1)
    committed = walk(accepted.tolist())
    return sum(committed) / len(committed)


def _told(taus: dict[str, float]) -> str:
    return "  ".join(f"{name} {tau:.2f}" for name, tau in taus.items())
