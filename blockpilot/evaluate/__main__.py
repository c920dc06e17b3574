"""Stage `evaluate`: trained policies on prompts unseen by any stage, beside their controls.

    python -m blockpilot.evaluate runs=[outputs/sweep/<run id>] cost=<curve> \
        policies=[outputs/train/<run id>/predictor]

walks the answers of replayed sweeps with pilots, whole and without one part each: see `ladder`.

    python -m blockpilot.evaluate dataset=outputs/dataset/<run id> \
        policies=[outputs/train/<run id>/predictor] timed=outputs/sweep/<run id>

Scores the split `test` of a dataset: each prompt's gain at the size that a predictor picks, from
the records that the dataset was made of, beside the policies that decide every cycle, where the
sweeps replayed some. The fixed size is the best one of the split `policy`.
`timed` is a decoded sweep whose methods, policies among them, are compared with that size by time.
The last lines say what came out for each predictor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from hydra.utils import instantiate
from omegaconf import OmegaConf
from rich.console import Console

from blockpilot.app.config import EvaluateConfig
from blockpilot.app.job import stage
from blockpilot.app.terminal import text_table
from blockpilot.app.tracking import tracked
from blockpilot.base.errors import UserError
from blockpilot.base.files import make_folder, write_csv
from blockpilot.base.paths import names_of
from blockpilot.costs.curve import load_cost
from blockpilot.evaluate.comparison import (
    ABOUT_GAINS,
    ABOUT_TIMES,
    Gains,
    evaluate,
    evaluation_cells,
    narrow,
    timed_table,
)
from blockpilot.evaluate.hindsight import per_cycle_gains
from blockpilot.evaluate.ladder import ABOUT_LADDER, ladder, ladder_cells
from blockpilot.evaluate.policies import policy_gains, with_tuned
from blockpilot.evaluate.verdicts import of_evaluation, of_timed
from blockpilot.policies.blockpilot import BlockSizePolicy
from blockpilot.predictor.acceptance import load_acceptance
from blockpilot.predictor.examples import Examples, load_examples
from blockpilot.predictor.net import parameters_of
from blockpilot.records.run_folder import RunFolder
from blockpilot.records.schema import PLAIN
from blockpilot.stats.arrays import Floats, Ints
from blockpilot.stats.oracles import best_fixed
from blockpilot.stats.tau import turn_of
from blockpilot.sweep.tables import ALL_SETS, PROVENANCE, figures_of, provenance_of, terminal_table

log = logging.getLogger("blockpilot.evaluate")  # __name__ is __main__ under python -m

NO_DRAFTER = "none"
PREDICTOR = "predictor"  # the folder within a run of the stage `train`
# What a timed sweep must share with the replayed ones; the rest is the timing's own business.
_DECODED_ALIKE = (
    *("target", "weights", "tokenizer", "thinking", "template_date"),
    *("temperature", "top_k", "top_p", "max_new_tokens"),
)
CEILINGS = {
    "per cycle, in hindsight": None,
    "branch of 2, in hindsight": 2,
    "branch of 4, in hindsight": 4,
}


def run(cfg: EvaluateConfig) -> pd.DataFrame:
    """Score, print and write one line per set and method, pooled ones last."""
    if (cfg.dataset is None) == (not cfg.runs):
        raise UserError("give dataset=<folder> for predictors of a size, or runs=[...] for pilots")
    if cfg.runs:
        return evaluate_pilots(cfg)
    assert cfg.dataset is not None
    return evaluate_predictors(cfg, cfg.dataset)


def evaluate_pilots(cfg: EvaluateConfig) -> pd.DataFrame:
    """What each part of pilots adds on replayed answers, in ladder.csv."""
    if cfg.cost is None:
        raise UserError("cost=null: times of pilots are predicted, so give the curve of the runs")
    if cfg.timed is not None:
        raise UserError("timed: only of predictors; a report shows a timed sweep of pilots")
    models = {
        name: load_acceptance(path)
        for name, path in zip(predictor_names(cfg.policies), map(Path, cfg.policies), strict=True)
    }
    runs = [RunFolder(Path(run)) for run in cfg.runs]
    table = ladder(runs, load_cost(cfg.cost, {}), models, cfg.over)
    table = table.assign(**provenance_of(pd.concat([run.records() for run in runs])))
    folder = RunFolder(Path(cfg.paths.outputs) / "evaluate" / cfg.run_id)
    make_folder(folder.path)
    write_csv(table, folder.ladder)
    for stale in (folder.evaluation, folder.timed_evaluation):  # of an earlier call
        stale.unlink(missing_ok=True)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    tracker = instantiate(cfg.tracker, _convert_="all")
    pooled = table[table["set"] == ALL_SETS].set_index("method")
    ratios = ["speedup", *(f"over_{method}" for method in cfg.over)]
    with tracked(tracker, folder.path, config=config, rank=0):
        tracker.summarise(
            {f"{n}/{method}": pooled.loc[method, n] for n in ratios for method in models}
        )
    for name, lines in table.groupby("set", sort=False):
        Console().print(text_table(ladder_cells(lines).drop(columns="set"), str(name)))
    Console().print(ABOUT_LADDER, highlight=False)
    log.info("lines in %s", folder.ladder)
    return table


def evaluate_predictors(cfg: EvaluateConfig, dataset: str) -> pd.DataFrame:
    """Predictors against the best fixed size, in evaluation.csv."""
    examples = load_examples(Path(dataset))
    learnt, test = examples.learnt, examples.test
    for name, part in (("policy", learnt), ("test", test)):
        if len(part) < 2:
            raise UserError(f"dataset={dataset}: {len(part)} examples in split {name}")
    fixed = best_fixed(learnt.gains.numpy())
    policies = {
        name: BlockSizePolicy.from_pretrained(path)
        for name, path in zip(predictor_names(cfg.policies), cfg.policies, strict=True)
    }
    tracker = instantiate(cfg.tracker, _convert_="all")
    timed = None if cfg.timed is None else timed_lines(cfg, examples, fixed)
    choices = {name: chosen_sizes(policy, test) for name, policy in policies.items()}
    others = per_cycle(learnt, test, fixed)
    table = pd.concat(scored(test, fixed, choices, others), ignore_index=True)
    table = table.assign(
        **provenance_of(pd.concat([RunFolder(Path(run)).records() for run in examples.origin.runs]))
    )
    if policies:
        table = table.merge(pd.DataFrame(map(facts_of, policies.items())), how="left", on="method")
    if examples.origin.objective != "tau":
        log.info(
            "tokens/s by cycle costs, without what predicting a size or cutting a block takes; "
            "timed=<decoded sweep> counts all"
        )
    folder = RunFolder(Path(cfg.paths.outputs) / "evaluate" / cfg.run_id)
    make_folder(folder.path)
    write_csv(table, folder.evaluation)
    folder.ladder.unlink(missing_ok=True)  # of an earlier call, of pilots
    if timed is not None:
        write_csv(timed, folder.timed_evaluation)
    else:  # of an earlier call: times under another evaluation
        folder.timed_evaluation.unlink(missing_ok=True)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    with tracked(tracker, folder.path, config=config, rank=0):
        tracker.summarise(tracked_figures(table, timed))
    log.info("lines in %s", folder.evaluation)
    for verdict in of_evaluation(table) + ([] if timed is None else of_timed(timed)):
        Console().print(verdict, markup=False, highlight=False, soft_wrap=True)
    return table


def predictor_names(paths: Sequence[str]) -> list[str]:
    """The run of each predictor, a folder as `outputs/train/<run id>/predictor`."""
    folders = [Path(path).resolve() for path in paths]
    return names_of([f.parent if f.name == PREDICTOR else f for f in folders], "policies")


def tracked_figures(table: pd.DataFrame, timed: pd.DataFrame | None) -> dict[str, float]:
    """Gains and differences over all prompts, and the figures of the timed table."""
    pooled = table[table["prompt_set"] == ALL_SETS].set_index("method")
    columns = ("gain", "baseline", "difference", "difference_low", "difference_high")
    figures = {
        f"{column}/{name}": float(value)
        for column in columns
        for name, value in pooled[column].dropna().items()
    }
    if timed is None:
        return figures
    lines = timed[timed["set"] == ALL_SETS].drop(columns=["set", "best_fixed", *PROVENANCE])
    return figures | {f"timed/{name}": value for name, value in figures_of(lines).items()}


def per_cycle(learnt: Examples, test: Examples, fixed: int) -> dict[str, Floats]:
    """Gains on the test examples of policies that the runs replayed, and of hindsight."""
    origin = test.origin
    runs, seconds = [RunFolder(Path(run)) for run in origin.runs], test.seconds.numpy()
    base = {
        name: gain
        for part in (learnt, test)
        for name, gain in zip(part.example, part.gains[:, fixed].tolist(), strict=True)
    }
    decided = policy_gains(runs, base, origin.sizes[fixed], curve=origin.cost)
    others = {} if decided is None else with_tuned(decided, learnt.example, test.example)
    for name, width in CEILINGS.items():
        gains = per_cycle_gains(runs, test.example, origin.sizes, seconds, width)
        if gains is not None:
            others[name] = gains
    return others


def scored(
    test: Examples, fixed: int, choices: Mapping[str, Ints], others: Mapping[str, Floats]
) -> Iterator[pd.DataFrame]:
    """Lines of every prompt set and of all, printed as they come."""
    origin = test.origin
    unit = "tau" if origin.objective == "tau" else "tokens/s"
    for name in [*dict.fromkeys(test.prompt_set), ALL_SETS]:
        rows = [i for i, each in enumerate(test.prompt_set) if name in (each, ALL_SETS)]
        if len(rows) < 2:
            continue
        whole, first, second = (
            part.numpy()[rows] for part in (test.gains, test.first_half, test.second_half)
        )
        picked = {method: sizes[rows] for method, sizes in choices.items()}
        extra = {method: values[rows] for method, values in others.items()}
        turns = [(test.prompt_id[i], turn_of(test.example[i])) for i in rows]
        lines = evaluate(Gains(whole, first, second), turns, fixed, picked, extra)
        size, n, n_turns = origin.sizes[fixed], len(dict(turns)), len(set(turns))
        with_turns = f" ({n_turns} turns)" if n < n_turns else ""
        title = f"{name}: {n} prompts{with_turns}, best fixed size of the policy split {size}"
        lines = lines.assign(unit=unit)
        Console().print(text_table(evaluation_cells(lines), title))
        yield lines.assign(prompt_set=name, prompts=n, fixed_size=size)
    Console().print(ABOUT_GAINS, highlight=False)


def timed_lines(cfg: EvaluateConfig, examples: Examples, fixed: int) -> pd.DataFrame:
    """Lines of the decoded sweep `timed`, compared with the best fixed size; printed.

    Raises UserError for a sweep that was not decoded, of another pair, without that size, or of
    other settings or prompts of other splits.
    """
    records, origin = RunFolder(Path(cfg.timed or "")).records(), examples.origin
    alike = {name: origin.settings[name] for name in _DECODED_ALIKE}
    if set(records["dtype"]) == {origin.settings["dtype"]}:  # else the bits differ by rounding
        alike["target_fingerprint"] = origin.settings["target_fingerprint"]
    for what, wanted in {"mode": "decode", "split": "test", **alike}.items():
        values = {None if pd.isna(value) else value for value in records[what].unique()}
        if other := values - {wanted}:
            raise UserError(f"timed={cfg.timed}: {what} {other.pop()}, wanted is {wanted}")
    # Other drafters and other ways to cut a block may stand beside the pair that was learnt on.
    same = records[(records["policy"] == "fixed") & (records["drafter"] != NO_DRAFTER)]
    for what, needed in (("drafter_checkpoint", origin.drafter), ("block_mode", origin.block_mode)):
        if needed not in set(same[what]):
            held = ", ".join(map(str, same[what].unique()))
            raise UserError(f"timed={cfg.timed}: {what} {held or None}, wanted is {needed}")
        same = same[same[what] == needed]
    size = origin.sizes[fixed]
    named = same[same["block_size"] == size]["method"]
    base = PLAIN if size == 1 else next(iter(named.unique()), None)
    if base is None:
        raise UserError(f"timed={cfg.timed}: lacks the best fixed size {size}; add sizes=[{size}]")
    table = timed_table(records, base)
    unit = "tau" if origin.objective == "tau" else "predicted tokens/s"
    what = f"timed; best fixed size, by {unit} on the policy split: {base}"
    for name, lines in narrow(table).groupby("set", sort=False):
        shown = lines.drop(columns="set")
        caption = [*table.attrs["caption"], ABOUT_TIMES]
        shown.attrs["caption"] = caption if name == ALL_SETS else []
        Console().print(terminal_table(shown, f"{name}, {what}"))
    return table.assign(**provenance_of(records))


def facts_of(item: tuple[str, BlockSizePolicy]) -> dict[str, str | int | float]:
    """What tells a predictor apart, for the lines of its method."""
    name, policy = item
    config = policy.net.config
    facts: dict[str, str | int | float] = {"method": name, "parameters": parameters_of(policy.net)}
    facts["sizes"] = " ".join(map(str, config.sizes))
    for key in ("features", "hidden", "depth", "label", "objective"):
        facts[key] = getattr(config, key)
    return facts


def chosen_sizes(policy: BlockSizePolicy, test: Examples) -> Ints:
    """Index [P] of the size that a predictor picks for each example.

    Raises UserError for a predictor of other sizes or another pair, naming what differs.
    """
    config, origin = policy.net.config, test.origin
    for what, trained, given in (
        ("sizes", config.sizes, origin.sizes),
        ("target", config.target, origin.target),
        ("target weights", config.target_fingerprint, origin.settings["target_fingerprint"]),
        ("drafter", config.drafter, origin.drafter),
        ("block_mode", config.block_mode, origin.block_mode),
    ):
        if trained != given:
            raise UserError(
                f"policy {policy.path}: trained for {what} {trained}, the dataset has {given}"
            )
    scores = policy.scores(test.logits, test.hidden, test.n_prompt_tokens)
    return np.asarray(scores.argmax(dim=1).numpy())


@stage("evaluate", EvaluateConfig)
def main(cfg: EvaluateConfig) -> None:
    """Entry point."""
    run(cfg)


if __name__ == "__main__":
    main()
