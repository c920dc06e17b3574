"""Stage `train`: the predictor of a block size, from labelled examples.

    python -m blockpilot.train dataset=outputs/dataset/<run id>
    python -m blockpilot.train runs=[outputs/sweep/<run id>] cost=<file>    # a pilot
    python -m blockpilot.train -m dataset=<folder> predictor.hidden=1024,2048,4096

Learns from the split `policy`, stops by the regret on `validation`, never reads `test`. The
predictor lies in <paths.outputs>/train/<run id>/predictor/, ready for `policy.path=`.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from blockpilot.app.config import TrainConfig
from blockpilot.app.job import stage
from blockpilot.app.tracking import tracked
from blockpilot.base.devices import pick_device
from blockpilot.base.errors import UserError
from blockpilot.base.files import make_folder
from blockpilot.base.provenance import facts
from blockpilot.costs.curve import load_cost
from blockpilot.policies.pilot_fit import answers_of, fit_acceptance
from blockpilot.predictor.acceptance import save_acceptance
from blockpilot.predictor.examples import Examples, load_examples
from blockpilot.predictor.net import BlockSizeNet, parameters_of, save_predictor
from blockpilot.predictor.trainer import (
    Optimisation,
    PredictorTrainer,
    data_of,
    new_config,
    regret,
    seconds_per_prediction,
)
from blockpilot.prompts.base import POLICY
from blockpilot.records.run_folder import RunFolder
from blockpilot.records.settings import keep_settings
from blockpilot.stats.oracles import best_fixed

log = logging.getLogger("blockpilot.train")  # __name__ is __main__ under python -m

REGRET = "validation regret, least of all epochs"
FIXED_REGRET = "validation regret of the best fixed size"


def run(cfg: TrainConfig) -> Path:
    """Train, print and save; the predictor's folder."""
    if (cfg.dataset is None) == (not cfg.runs):
        raise UserError(
            f"dataset={cfg.dataset}, runs={list(cfg.runs)}: give the one for a predictor of the "
            "block size, the other for a pilot"
        )
    if cfg.dataset is None:
        return fit_pilot(cfg)
    examples = load_examples(Path(cfg.dataset))
    learnt, held_out = examples.learnt, examples.held_out
    for name, part in (("policy", learnt), ("validation", held_out)):
        if len(part) < 2:
            raise UserError(f"dataset={cfg.dataset}: {len(part)} examples in split {name}")
    if cfg.shuffle_labels:
        learnt = shuffled(learnt, cfg.seed)
    device = pick_device(cfg.device)
    folder = Path(cfg.paths.outputs) / "train" / cfg.run_id
    make_folder(folder)
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    shaping = {k: v for k, v in settings.items() if k not in ("tracker", "paths", "threads")}
    keep_settings(folder / "training.json", shaping, what="a predictor")
    net = untrained(cfg, examples)
    kind, sharpness = cfg.predictor.features, examples.origin.sharpness
    train, validation = (data_of(part, kind, sharpness, device) for part in (learnt, held_out))
    trainer = PredictorTrainer(net, optimisation(cfg), folder, device)
    trainer.resume(examples.digest())
    tracker = instantiate(cfg.tracker, _convert_="all")
    with tracked(tracker, folder, config=settings, rank=0):
        trainer.run(train, validation, lambda curves, epoch: tracker.log(curves, step=epoch))
        save_predictor(net, folder / "predictor")
        fixed = best_fixed(learnt.gains.numpy())
        best = validation.gains.max(dim=1).values
        figures: dict[str, float] = {
            "best epoch": trainer.best_epoch,
            "epochs": trainer.epoch,
            REGRET: regret(trainer.scores(validation.features), validation.gains),
            FIXED_REGRET: float((best - validation.gains[:, fixed]).mean()),
            "parameters": parameters_of(net),
            "share of the target's": parameters_of(net) / examples.origin.target_parameters,
        }
        tracker.summarise(figures)
    # Told here alone: it differs in every call, also in one that finds the training finished.
    figures["ms per prediction"] = 1e3 * seconds_per_prediction(net, held_out, device)
    if figures[REGRET] > figures[FIXED_REGRET]:
        log.warning(
            "on the validation prompts size %d for all has less regret than this predictor",
            examples.origin.sizes[fixed],
        )
    table = Table("predictor", f"{kind}, {cfg.predictor.depth} x {cfg.predictor.hidden}")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else f"{value:,}")
    Console().print(table)
    log.info("predictor in %s", folder / "predictor")
    return folder / "predictor"


def fit_pilot(cfg: TrainConfig) -> Path:
    """Fit the model of policy `pilot` to the replays of sweeps; its folder."""
    if cfg.cost is None:
        raise UserError("cost=null: a pilot is fitted along the cycles that pay by a cost curve")
    curve = load_cost(cfg.cost, {})
    pairs, answers, counts = [], [], {}
    for each in cfg.runs:
        pair, some = answers_of(RunFolder(Path(each)), POLICY)
        pairs.append(pair)
        answers += some
        counts[Path(each).name] = len(some)
        if pair != pairs[0]:
            raise UserError(f"runs: {each} is of {pair}, {cfg.runs[0]} of {pairs[0]}")
    folder = Path(cfg.paths.outputs) / "train" / cfg.run_id
    make_folder(folder)
    origin = {
        "target": pairs[0].target,
        "drafter": pairs[0].drafter,
        "answers": counts,
        "prompts": sorted({each.prompt_hash[:12] for each in answers}),
        "code": facts(pick_device("cpu"))["git_commit"],
    }
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    shaping = {name: settings[name] for name in ("runs", "cost", "seed", "shuffle_labels")}
    keep_settings(folder / "training.json", shaping, what="a pilot")
    model = fit_acceptance(
        pairs[0],
        answers,
        curve,
        origin=origin,
        shuffle=cfg.seed if cfg.shuffle_labels else None,
    )
    save_acceptance(model, folder / "predictor")
    table = Table("pilot", "weights")
    for name in ("copy", "draft", "node"):
        table.add_row(name, " ".join(f"{weight:.2f}" for weight in getattr(model, name)))
    table.add_row("accepted of a draft", f"{model.mean_drafted:.2f}")
    Console().print(table)
    log.info("pilot in %s", folder / "predictor")
    return folder / "predictor"


def untrained(cfg: TrainConfig, examples: Examples) -> BlockSizeNet:
    """The predictor that a configuration asks for, before its first step."""
    shape = cfg.predictor
    config = new_config(
        examples,
        features=shape.features,
        hidden=shape.hidden,
        depth=shape.depth,
        dropout=shape.dropout,
        data=str(cfg.dataset),
    )
    return BlockSizeNet(config)


def optimisation(cfg: TrainConfig) -> Optimisation:
    """How a configuration wants it trained."""
    return Optimisation(
        epochs=cfg.epochs,
        patience=cfg.patience,
        batch_size=cfg.batch_size,
        learning_rate=cfg.learning_rate,
        seed=cfg.seed,
    )


def shuffled(examples: Examples, seed: int) -> Examples:
    """The same prompts with each other's gains: nothing is left to learn."""
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed))
    return replace(examples, gains=examples.gains[order])


@stage("train", TrainConfig)
def main(cfg: TrainConfig) -> None:
    """Entry point."""
    run(cfg)


if __name__ == "__main__":
    main()
