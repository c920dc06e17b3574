"""Training of a drafter: order of the data, optimizer steps, checkpoints, held-out tau.

What is special to a kind of drafter is the `Student` that its `Recipe` makes. One micro-batch is
one conversation with many anchors, so nothing is padded. The order of the data and the anchors
follow from (seed, step, rank), so a resumed run continues as if it had not stopped.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from blockpilot.app.config import TrainingConfig
from blockpilot.app.tracking import Tracker
from blockpilot.base.devices import has_16_bit_products
from blockpilot.base.errors import UserError
from blockpilot.base.files import replace_file
from blockpilot.base.provenance import digest
from blockpilot.distill.corpus import Corpus
from blockpilot.distill.optimizer import DrafterOptimizer
from blockpilot.distill.recipe import Student
from blockpilot.records.settings import damaged, keep_settings, load_state

log = logging.getLogger(__name__)

_SHAPING = [f.name for f in fields(TrainingConfig) if not f.name.endswith("_every")]
"""Settings that the weights depend on; how often to log and to evaluate is none."""


class DrafterTrainer:
    """Trains a network on a corpus; `resume`, `run` and `save` make an interruptible job of it."""

    def __init__(
        self,
        student: Student,
        device: torch.device,
        corpus: Corpus,
        settings: TrainingConfig,
        *,
        seed: int,
        folder: Path,
        drafter_settings: Mapping[str, Any],
        made_by: dict[str, Any],
    ) -> None:
        self.student, self.network, self.device = student, student.network, device
        self.corpus, self.settings, self.seed = corpus, settings, seed
        self.drafter_settings = drafter_settings  # which the weights depend on too
        self.made_by = made_by  # code and machine, from `provenance.facts`; the first run's
        self.checkpoint = folder / "checkpoint.pt"
        self.accelerator = Accelerator(
            cpu=device.type == "cpu",
            mixed_precision="bf16" if has_16_bit_products(device) else "no",
            gradient_accumulation_steps=settings.sequences_per_step,
        )
        if settings.compile is not None:
            student.compile(settings.compile)
        self.model = self.accelerator.prepare(student.network)
        self.optimizer = DrafterOptimizer(student.network, settings)
        self.first_weights = digest(student.network) if settings.init else None
        self.step = 0
        self.seconds = 0.0  # of all runs that this training took

    def resume(self) -> None:
        """Continue from the checkpoint of this folder, if there is one.

        Raises UserError when it was made with other settings, naming the first that differs, or is
        damaged.
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
        parts = ("network", "optimizer", "step", "seconds", "made_by")
        state = load_state(self.checkpoint, self.device, parts)
        try:
            self.network.load_state_dict(state["network"])
            self.optimizer.load(state["optimizer"])
        except Exception as error:  # of what else a checkpoint may hold
            raise damaged(self.checkpoint, error) from error
        self.step, self.seconds, self.made_by = state["step"], state["seconds"], state["made_by"]
        log.info("continuing at step %d", self.step)

    def _made_with(self) -> dict[str, Any]:
        """What the weights of any later step depend on."""
        return {
            **{name: getattr(self.settings, name) for name in _SHAPING},
            **self.drafter_settings,
            "seed": self.seed,
            "processes": self.accelerator.num_processes,
            "responses": len(self.corpus),
            "response_tokens": self.corpus.response_tokens,
            "drafter": self.student.published(),
            "first_weights": self.first_weights,
        }

    def save(self) -> None:
        """Write the checkpoint, atomically; every rank gives its part, one writes.

        Raises UserError instead when the last update left weights that are not finite.
        """
        if not all(bool(weight.isfinite().all()) for weight in self.network.parameters()):
            self._refuse("the weights after it are", [])
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
                log.info("step %d  held-out tau %s", self.step, _listed(taus))

    def _held_out(self, validation: Corpus) -> dict[str, float]:
        """Macro tau per prompt set; every rank walks its share of the conversations."""
        mine = range(
            self.accelerator.process_index, len(validation), self.accelerator.num_processes
        )
        examples = (validation[index] for index in mine)
        pairs = [(each.prompt_set, self.student.tau(each)) for each in examples]
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
        """One optimizer step over the sequences of a batch; their mean loss.

        Raises UserError on all ranks, before any weight changes, when a loss or the gradient of one
        of them is not finite.
        """
        rank = self.accelerator.process_index
        key = (self.seed * 1_000_003 + self.step) * 4099 + rank
        generator = torch.Generator().manual_seed(key)
        candidates = self.student.candidates(generator)
        losses = []
        for index in batch:
            with self.accelerator.accumulate(self.model):
                loss = self.student.loss(
                    self.model,
                    self.accelerator.autocast,
                    self.corpus[index],
                    candidates,
                    generator,
                )
                self.accelerator.backward(loss)
                losses.append(loss.item())
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        diverged = [i for i, loss in zip(batch, losses, strict=True) if not math.isfinite(loss)]
        finite = torch.tensor(float(not diverged and bool(norm.isfinite())), device=self.device)
        if self.accelerator.reduce(finite, "sum") < self.accelerator.num_processes:
            by_loss = gather_object([self.corpus.prompt_ids[index] for index in diverged])
            of_step = gather_object([self.corpus.prompt_ids[index] for index in batch])
            self.step += 1
            self._refuse(f"the {'loss' if by_loss else 'gradient'} is", by_loss or of_step)
        self.optimizer.step()
        self.model.zero_grad()
        return sum(losses) / len(batch)

    def _refuse(self, what: str, prompts: list[str]) -> NoReturn:
        """Stop at a value that is not finite; the checkpoint stays as it was."""
        kept = "no checkpoint was written yet"
        if self.checkpoint.exists():
            kept = f"{self.checkpoint} is as it was at the last save"
        by = f", prompts {', '.join(prompts[:8])}" if prompts else ""
        raise UserError(
            f"step {self.step}: {what} not finite{by}; {kept}; lower training.learning_rate in "
            "another run_id, or leave these prompts out"
        )


def _listed(taus: dict[str, float]) -> str:
    return "  ".join(f"{name} {tau:.2f}" for name, tau in taus.items())
