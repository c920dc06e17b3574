"""Stage `evaluate`: trained predictors against the best fixed size, on prompts unseen by any stage.

    python -m blockpilot.evaluate dataset=outputs/dataset/<run id> \
        policies=[outputs/train/<run id>/predictor]

Scores the split `test` of a dataset: each prompt's gain at the size that a predictor picks, from
the records that the dataset was made of. The fixed size is the best one of the split `policy`.
"""

from __future__ import annotations

import logging
from pathlib import Path

import hydra
import numpy as np
import pandas as pd
from rich.console import Console

from blockpilot import labels
from blockpilot.config import EvaluateConfig
from blockpilot.errors import UserError
from blockpilot.paths import conf_dir
from blockpilot.policies.blockpilot import BlockSizePolicy
from blockpilot.prompts.base import POLICY, TEST
from blockpilot.records.files import make_folder, replace_file
from blockpilot.reporting.evaluation import Gains, Ints, evaluate, evaluation_table
from blockpilot.runtime import stage
from blockpilot.training.examples import Examples, load_examples

log = logging.getLogger("blockpilot.evaluate")  # __name__ is __main__ under python -m

POOLED = "all"


def run(cfg: EvaluateConfig) -> pd.DataFrame:
    """Score, print and write evaluation.csv; one line per set and method, pooled ones last."""
    examples = load_examples(Path(cfg.dataset))
    learnt, test = examples.of(POLICY), examples.of(TEST)
    for name, part in ((POLICY, learnt), (TEST, test)):
        if len(part) < 2:
            raise UserError(f"dataset={cfg.dataset}: {len(part)} examples in split {name}")
    fixed = labels.best_fixed(learnt.gains.numpy())
    choices = {Path(path).parent.name: chosen_sizes(path, test) for path in cfg.policies}
    if len(choices) < len(cfg.policies):
        raise UserError(f"policies={list(cfg.policies)}: two come from runs of one name")
    size, origin = examples.origin.sizes[fixed], examples.origin
    unit = "tau" if origin.objective == "tau" else "tokens/s"
    frames = []
    for name in [*dict.fromkeys(test.prompt_set), POOLED]:
        rows = [i for i, each in enumerate(test.prompt_set) if name in (each, POOLED)]
        if len(rows) < 2:
            continue
        whole, first, second = (
            part.numpy()[rows] for part in (test.gains, test.first_half, test.second_half)
        )
        picked = {method: sizes[rows] for method, sizes in choices.items()}
        lines = evaluate(Gains(whole, first, second), fixed, picked)
        title = f"{name}: {len(rows)} prompts, best fixed size of the policy split {size}"
        Console().print(evaluation_table(lines, title, unit))
        null = labels.luck_null(whole) if len(origin.sizes) > 1 else None
        if null is not None:
            log.info("oracle by luck alone: %.3f +- %.3f, p = %.2f", *_values(null))
        frames.append(lines.assign(prompt_set=name, prompts=len(rows), fixed_size=size))
    table = pd.concat(frames, ignore_index=True)
    folder = Path(cfg.paths.outputs) / "evaluate" / cfg.run_id
    make_folder(folder)
    text = table.to_csv(index=False).encode()
    replace_file(folder / "evaluation.csv", lambda stream: stream.write(text))
    log.info("lines in %s", folder / "evaluation.csv")
    return table


def _values(null: labels.LuckNull) -> tuple[float, float, float]:
    return null.mean, null.std, null.p_value


def chosen_sizes(path: str, test: Examples) -> Ints:
    """Index [P] of the size that a predictor picks for each example.

    Raises UserError for a predictor of other sizes or another pair, naming what differs.
    """
    policy = BlockSizePolicy.from_pretrained(path)
    assert policy.net is not None
    config, origin = policy.net.config, test.origin
    for what, theirs, ours in (
        ("sizes", config.sizes, origin.sizes),
        ("target", config.target, origin.target),
        ("drafter", config.drafter, origin.drafter),
        ("block_mode", config.block_mode, origin.block_mode),
    ):
        if theirs != ours:
            raise UserError(f"policy {path}: trained for {what} {theirs}, the dataset has {ours}")
    scores = policy.scores(test.logits, test.hidden, test.n_prompt_tokens)
    return np.asarray(scores.argmax(dim=1).numpy())


@stage(
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="evaluate"),
    EvaluateConfig,
)
def main(cfg: EvaluateConfig) -> None:
    """Entry point."""
    run(cfg)


if __name__ == "__main__":
    main()
