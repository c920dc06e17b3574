"""Training of the predictor of a block size (arXiv 2606.31315), with early stopping on regret.

Letters: P examples, F features, m sizes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.base.files import replace_file
from blockpilot.predictor.examples import Examples
from blockpilot.predictor.net import FEATURES, BlockSizeNet, PredictorConfig, features_of
from blockpilot.records.settings import damaged, load_state
from blockpilot.stats.labels import argmax_labels, soft_labels

log = logging.getLogger(__name__)

_STANDARDIZED = ("hidden", "summary", "top_k")
"""Features whose entries differ in scale; the paper's raw logits are read as they are."""


LogCurves = Callable[[Mapping[str, float], int], object]
"""Takes values by name and the epoch that they are of."""


@dataclass(frozen=True)
class Optimisation:
    """How a predictor is trained."""

    epochs: int
    patience: int | None  # epochs without a smaller regret after which it stops; None: never
    batch_size: int
    learning_rate: float
    seed: int


@dataclass(frozen=True)
class Data:
    """Names, features [P, F], targets [P, m] and gains [P, m] of one split, on the training
    device."""

    names: Sequence[str]
    features: Tensor
    targets: Tensor
    gains: Tensor


def new_config(
    examples: Examples, *, features: str, hidden: int, depth: int, dropout: float, data: str
) -> PredictorConfig:
    """The predictor of this shape and these inputs over the sizes of the examples.

    `data` says where the examples came from. Raises UserError for unknown features.
    """
    if features not in FEATURES:
        raise UserError(f"predictor.features={features}: must be {', '.join(FEATURES)}")
    origin = examples.origin
    return PredictorConfig(
        sizes=origin.sizes,
        block_mode=origin.block_mode,
        features=features,
        hidden=hidden,
        depth=depth,
        dropout=dropout,
        target=origin.target,
        target_fingerprint=origin.settings["target_fingerprint"],
        dtype=origin.settings["dtype"],
        drafter=origin.drafter,
        vocab_size=examples.logits.shape[1],
        hidden_size=examples.hidden.shape[1],
        label=origin.label,
        objective=origin.objective,
        data=data,
    )


def data_of(examples: Examples, features: str, sharpness: float, device: torch.device) -> Data:
    """One split ready for training.

    Raises UserError for features or gains that are not finite, naming their example.
    """
    read = features_of(features, examples.logits, examples.hidden, examples.n_prompt_tokens)
    gains = examples.gains
    for what, values in ((f"features={features}", read), ("gains", gains)):
        if wrong := _named(examples.example, ~values.isfinite().all(dim=1)):
            raise UserError(f"dataset: {what} of {wrong} are not finite; its sweep must run again")
    if examples.origin.label == "argmax":
        best = torch.from_numpy(argmax_labels(gains.numpy()))
        targets = F.one_hot(best, gains.shape[1]).float()
    elif examples.origin.label == "soft":
        fixed = float(gains.mean(dim=0).max())
        targets = torch.from_numpy(soft_labels(gains.numpy(), sharpness * fixed)).float()
    else:
        targets = gains.float()
    return Data(examples.example, read.to(device), targets.to(device), gains.to(device))


def _named(names: Sequence[str], wrong: Tensor) -> str:
    """The first examples of those that are `wrong` [P], as text; empty without any."""
    found = [names[index] for index in wrong.nonzero()[:, 0].tolist()]
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return ", ".join(found[:5]) + more


def regret(scores: Tensor, gains: Tensor) -> float:
    """Mean gain given away against each prompt's best size."""
    chosen = gains.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0]
    return float((gains.max(dim=1).values - chosen).mean())


class PredictorTrainer:
    """Trains a net in float32, on a GPU under bf16 autocast; keeps the weights of the least regret.

    It stops when `patience` epochs have brought no smaller regret on the validation split.
    `resume`, `run` and a checkpoint per tenth of the epochs make an interruptible job of it.
    """

    def __init__(
        self, net: BlockSizeNet, settings: Optimisation, folder: Path, device: torch.device
    ) -> None:
        self.net, self.settings, self.device = net.to(device), settings, device
        self.checkpoint = folder / "checkpoint.pt"
        self.examples = ""
        # Fused: with 105 million weights for 32 rows most of a step is the pass over them.
        self.optimizer = torch.optim.Adam(net.parameters(), lr=settings.learning_rate, fused=True)
        self.epoch, self.best_epoch, self.best_regret = 0, 0, float("inf")
        self.best = {key: value.clone() for key, value in net.state_dict().items()}

    def standardize(self, features: Tensor) -> None:
        """Shift and scale the inputs by the training split's moments, where that is wanted."""
        if self.net.config.features in _STANDARDIZED:
            self.net.shift.copy_(features.mean(dim=0))
            self.net.scale.copy_(1 / features.std(dim=0).clamp_min(1e-6))

    def resume(self, examples: str) -> None:
        """Continue from the checkpoint, if there is one of the same `examples` (their digest).

        Raises UserError when it is damaged.
        """
        self.examples = examples
        if not self.checkpoint.exists():
            return
        parts = ("examples", "net", "optimizer", "epoch", "best_epoch", "best_regret", "best")
        state = load_state(self.checkpoint, self.device, parts)
        if state["examples"] != examples:
            log.info(
                "the examples are others than those of the checkpoint: training from the start"
            )
            return
        try:
            self.net.load_state_dict(state["best"])
            if (optimizer := state["optimizer"]) is not None:  # not finished
                self.net.load_state_dict(state["net"])
                self.optimizer.load_state_dict(optimizer)
        except Exception as error:  # of what else a checkpoint may hold
            raise damaged(self.checkpoint, error) from error
        self.epoch, self.best_epoch = state["epoch"], state["best_epoch"]
        self.best_regret, self.best = state["best_regret"], state["best"]
        log.info("continuing at epoch %d", self.epoch)

    def run(self, train: Data, validation: Data, log_curves: LogCurves) -> None:
        """Train until it stops and leave the best epoch's weights in the net."""
        if not self.epoch:
            self.standardize(train.features)
        while not self.finished:
            loss = self._pass(train)
            self.epoch += 1
            scores = self.scores(validation.features)
            found = regret(scores, validation.gains)
            if found < self.best_regret:
                self.best_regret, self.best_epoch = found, self.epoch
                self.best = {k: v.clone() for k, v in self.net.state_dict().items()}
            log_curves({"train/loss": loss, "validation/regret": found}, self.epoch)
            if self.finished or self.epoch % max(1, self.settings.epochs // 10) == 0:
                log.info("epoch %d  loss %.4f  validation regret %.4f", self.epoch, loss, found)
                self._save()
        self.net.load_state_dict(self.best)
        self.net.eval()

    @property
    def finished(self) -> bool:
        """Whether all epochs are done, or enough of them in vain."""
        patience = self.settings.patience
        in_vain = patience is not None and self.epoch - self.best_epoch >= patience
        return in_vain or self.epoch >= self.settings.epochs

    @torch.no_grad()
    def scores(self, features: Tensor) -> Tensor:
        """Scores [P, m], as the policy computes them."""
        self.net.eval()
        return self.net(features)

    def _pass(self, data: Data) -> float:
        """One epoch; the mean loss.

        Raises UserError, before any weight changes, at a loss or a gradient that is not finite.
        """
        self.net.train()
        total = 0.0
        for step, rows in enumerate(self._batches(len(data.features)), start=1):
            # Not on CPUs: 32 rows by 49,152 in bf16 kill the process where oneDNN 3.12 uses AMX
            # (integer division by zero), and that is the paper's batch and a usual vocabulary.
            with torch.autocast(
                self.device.type, dtype=torch.bfloat16, enabled=self.device.type != "cpu"
            ):
                scores = self.net(data.features[rows])
            if self.net.config.label == "curve":
                loss = F.mse_loss(scores.float(), data.targets[rows])
            else:
                loss = F.cross_entropy(scores.float(), data.targets[rows])
            self.optimizer.zero_grad()
            loss.backward()
            gradients = [weight.grad for weight in self.net.parameters() if weight.grad is not None]
            if not (loss + torch.nn.utils.get_total_norm(gradients)).isfinite():
                self._refuse(data, rows, step, ~scores.isfinite().all(dim=1))
            self.optimizer.step()
            total += loss.item() * len(rows)
        return total / len(data.features)

    def _refuse(self, data: Data, rows: Tensor, step: int, wrong: Tensor) -> NoReturn:
        """Name the examples of a batch that are to blame, all of them where none is alone."""
        blamed = rows[wrong] if wrong.any() else rows
        marks = torch.zeros(len(data.names), dtype=torch.bool)
        marks[blamed.cpu()] = True
        raise UserError(
            f"epoch {self.epoch + 1}, step {step}: loss or gradient is not finite, examples "
            f"{_named(data.names, marks)}; the checkpoint of an earlier epoch is intact; lower "
            "learning_rate in another run_id"
        )

    def _batches(self, n: int) -> Iterator[Tensor]:
        """Shuffled batches that follow from (seed, epoch), so a resumed run has the same ones."""
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + self.epoch)
        torch.manual_seed(self.settings.seed * 1_000_003 + self.epoch)  # of the dropout
        yield from (
            torch.randperm(n, generator=generator).to(self.device).split(self.settings.batch_size)
        )

    def _save(self) -> None:
        """Write the checkpoint; of a finished training only the best weights, a quarter of it."""
        state = {
            "examples": self.examples,
            "net": None if self.finished else self.net.state_dict(),
            "optimizer": None if self.finished else self.optimizer.state_dict(),
            "epoch": self.epoch,
            "best_epoch": self.best_epoch,
            "best_regret": self.best_regret,
            "best": self.best,
        }
        replace_file(self.checkpoint, lambda scratch: torch.save(state, scratch))


@torch.no_grad()
def seconds_per_prediction(net: BlockSizeNet, examples: Examples, device: torch.device) -> float:
    """Median seconds from a prompt's prefill to its size, as the policy spends them."""
    one = examples.logits[:1].to(device), examples.hidden[:1].to(device)
    length, spent = examples.n_prompt_tokens[:1].to(device), []
    for _ in range(12):
        begin = time.perf_counter()
        int(net(features_of(net.config.features, *one, length)).argmax())  # waits for the device
        spent.append(time.perf_counter() - begin)
    return sorted(spent[2:])[5]  # the first ones warm up
