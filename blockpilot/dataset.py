"""Stage `dataset`: labelled examples of block sizes from the records of sweeps.

    python -m blockpilot.dataset runs=[outputs/sweep/<run id>]

Examples lie in <paths.outputs>/dataset/<run id>/. What it prints is a first honest look: how often
sizes tie, how much an oracle would gain, and how much of that gain is luck.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from blockpilot.app.config import DatasetConfig
from blockpilot.app.job import stage
from blockpilot.base.errors import UserError
from blockpilot.predictor.examples import Examples, gather, save_examples
from blockpilot.records.run_folder import RunFolder
from blockpilot.stats.labels import argmax_labels
from blockpilot.stats.luck import luck, luck_null
from blockpilot.stats.oracles import best_fixed, cross_fitted, oracle

log = logging.getLogger("blockpilot.dataset")  # __name__ is __main__ under python -m


def run(cfg: DatasetConfig) -> Examples:
    """Gather, print and write the examples."""
    if not cfg.runs:
        raise UserError("runs=[]: give the folders of sweeps, as runs=[outputs/sweep/<run id>]")
    folders = [Path(run) for run in cfg.runs]
    examples = gather(
        folders,
        [RunFolder(folder).records() for folder in folders],
        sizes=cfg.sizes,
        radius=cfg.radius,
        label=cfg.label,
        objective=cfg.objective,
        sharpness=cfg.sharpness,
        cost=cfg.cost,
    )
    folder = Path(cfg.paths.outputs) / "dataset" / cfg.run_id
    save_examples(examples, folder)
    Console().print(dataset_table(examples))
    log.info("%d examples in %s", len(examples), folder)
    return examples


def dataset_table(examples: Examples) -> Table:
    """Per split: examples, how the labels fall, and what an oracle's gain is worth."""
    origin = examples.origin
    unit = "tau" if origin.objective == "tau" else "tokens/s"
    splits = {"policy": examples.learnt, "validation": examples.held_out, "test": examples.test}
    table = Table("", *splits, title=f"{unit} at sizes {', '.join(map(str, origin.sizes))}")
    columns = {name: _figures(part) for name, part in splits.items()}
    for figure in dict.fromkeys(key for column in columns.values() for key in column):
        table.add_row(figure, *(columns[name].get(figure, "-") for name in splits))
    table.caption = (
        "each split by itself, in hindsight. by luck: oracle of prompts that all prefer the same "
        "sizes; cross-fitted: size chosen on one half of each answer and scored on the other, to "
        "be compared with the best fixed size on halves"
    )
    return table


def _figures(examples: Examples) -> dict[str, str]:
    if len(examples) < 2:
        return {"examples": str(len(examples))}
    gains, sizes = examples.gains.numpy(), examples.origin.sizes
    best, fixed = argmax_labels(gains), best_fixed(gains)
    ties = ((gains == gains.max(axis=1, keepdims=True)).sum(axis=1) > 1).mean()
    counts = np.bincount(best, minlength=len(sizes))
    halved = ~examples.first_half.isnan().any(dim=1)
    whole_halves = [half.numpy() for half in (examples.first_half, examples.second_half)]
    halves = [half[halved.numpy()] for half in whole_halves]
    figures = {
        "examples": str(len(examples)),
        "labels per size": " ".join(map(str, counts)),
        "ties": f"{ties:.0%}",
        "best size differs from the fixed": f"{(best != fixed).mean():.0%}",
        "best fixed size": f"{sizes[fixed]} ({gains[:, fixed].mean():.3f})",
        "oracle": f"{oracle(gains):.3f}",
    }
    if halved.any():
        same = np.mean([half[:, fixed].mean() for half in halves])
        figures["oracle by luck alone"] = f"{luck(gains, *whole_halves).mean():.3f}"
        figures["best fixed size, on halves"] = f"{same:.3f}"
        figures["cross-fitted oracle, on halves"] = f"{cross_fitted(*halves).mean():.3f}"
    if len(sizes) > 1:
        null = luck_null(gains)
        figures["luck, bound by permutation"] = (
            f"{null.mean:.3f} +- {null.std:.3f}, p = {null.p_value:.2f}"
        )
    return figures


@stage("dataset", DatasetConfig)
def main(cfg: DatasetConfig) -> None:
    """Entry point."""
    run(cfg)


if __name__ == "__main__":
    main()
