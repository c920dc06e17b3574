"""What each part of a pilot adds: hindsight by hand, and the stage on replayed sweeps."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from stages_kit import TINY, performed, sweep_arguments, texts_of, write_prompts
from test_pilot import curve

from blockpilot import cost
from blockpilot.base.errors import UserError
from blockpilot.decoding.anchors import KnownAnswer, Replay
from blockpilot.evaluate import __main__ as evaluate
from blockpilot.evaluate.ladder import hindsight
from blockpilot.policies.pilot import SHIPPED
from blockpilot.policies.pilot_fit import Answered
from blockpilot.predictor.acceptance import load_acceptance, save_acceptance
from blockpilot.report import __main__ as report
from blockpilot.sweep import __main__ as sweep
from blockpilot.sweep.tables import sweep_table

OVER = "over=[tree7,copy_or_tree]"


def answered(prompt: list[int], tokens: list[int]) -> Answered:
    known = KnownAnswer(prompt, tokens, "budget", 0.0, torch.zeros(9), torch.zeros(4))
    return Answered("s", "p", "hash", 0, 0, known, Replay({}, None))


def test_hindsight_copies_what_holds_and_pays() -> None:
    answer = answered([1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 9])
    # Copied behind the anchor 1: 2 3 4, then the target's own 9; the last 9 is decoded plainly.
    walk = hindsight(curve(plain_ms=10, position_ms=1), ["copy"])
    assert walk(answer) == {"seconds": pytest.approx(0.013 + 0.010)}
    dear = hindsight(curve(plain_ms=10, position_ms=40), ["copy"])
    assert dear(answer) == {"seconds": pytest.approx(0.050)}
    without = hindsight(curve(plain_ms=10, position_ms=1), ["tree"])
    assert without(answer) == {"seconds": pytest.approx(0.050)}, "nothing was drafted"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A curve, and a replayed sweep of prompts of two turns with its predictions."""
    folder = tmp_path_factory.mktemp("ladder")
    pair = [*TINY, "drafter.checkpoint=random", "dtype=float64", "tracker=none", "run_id=run"]
    pair.append("decoding.temperature=1")
    grid = ["repeats=1", "contexts=[16]", "sizes=[1,15,17]", "trees=[2,8,16]", "copies=[2,8,33]"]
    performed(cost.run, "cost", *pair, *grid, f"paths.outputs={folder}")
    file = write_prompts(folder / "prompts.jsonl", [*texts_of("test", 4), ["one", "and two"]])
    given = ["mode=replay", f"cost={folder}/cost/run/cost.json", "tree_nodes=[7]"]
    given += ["method=[copy_or_tree]", "decoding.max_new_tokens=24"]
    performed(sweep.run, "sweep", *sweep_arguments(folder, file, *given))
    return folder


def evaluated(outputs: Path, *given: str) -> pd.DataFrame:
    own = [f"runs=[{outputs}/sweep/run]", f"cost={outputs}/cost/run/cost.json", OVER]
    place = ["tracker=none", "run_id=pilots", f"paths.outputs={outputs}"]
    return performed(evaluate.run, "evaluate", *own, *place, *given)


def test_pilots_and_their_parts_are_lines_beside_the_sweeps_methods(outputs: Path) -> None:
    lines = evaluated(outputs, f"policies=[{SHIPPED}]").set_index(["set", "method"])
    sets = lines.index.get_level_values("set").unique()
    assert list(sets) == ["local", "local, first turns", "local, later turns", "all"]
    pooled = lines.loc["all"]
    name = SHIPPED.name
    parts = [name, *(f"{name}, {part}" for part in ("no copies", "no drafts", "not fitted"))]
    assert {"plain", "tree7", "copy_or_tree", *parts} <= set(pooled.index)
    assert pooled.loc["tree7", "over_tree7"] == pooled.loc["plain", "speedup"] == 1
    table = sweep_table(sweep.RunFolder(outputs / "sweep/run").records()).set_index("method")
    for method in ("tree7", "copy_or_tree"):
        assert pooled.loc[method, "speedup"] == pytest.approx(table["predicted_speedup"][method])
        assert pooled.loc[method, "tau"] == pytest.approx(table["macro_tau"][method])
    assert pooled.loc[f"{name}, no copies", ["quoted", "repeated"]].sum() == 0
    assert pooled.loc[f"{name}, no drafts", "drafting"] == 0
    both = pooled.loc["copy and draft, in hindsight", "speedup"]
    assert both >= pooled.loc[["copy, in hindsight", "draft, in hindsight"], "speedup"].max()
    assert both >= pooled.loc["copy_or_tree", "speedup"]


def test_a_report_shows_them(outputs: Path) -> None:
    evaluated(outputs, f"policies=[{SHIPPED}]")
    assert [file.name for file in (outputs / "evaluate/pilots").glob("*.csv")] == ["ladder.csv"]
    given = f"runs=[{outputs}/evaluate/pilots]", f"paths.outputs={outputs}", "run_id=ladder"
    folder = performed(report.run, "report", *given)
    text = (folder / "report.md").read_text()
    assert "a source and a size per cycle by replay" in text
    assert "| all | copy and draft, in hindsight |" in text
    assert list((folder / "figures").glob("*ladder.png"))


def test_prompts_that_a_pilot_was_fitted_to_are_refused(outputs: Path, tmp_path: Path) -> None:
    records = sweep.RunFolder(outputs / "sweep/run").records()
    model = load_acceptance(SHIPPED)
    seen = {"prompts": [records["prompt_hash"].iloc[0][:12]]}
    save_acceptance(replace(model, fitted_to=seen), tmp_path / "mine/predictor")
    message = f"has prompt {records['prompt_id'].iloc[0]}, which mine was fitted to"
    with pytest.raises(UserError, match=message):
        evaluated(outputs, f"policies=[{tmp_path}/mine/predictor]")


def test_what_cannot_be_compared_is_refused(outputs: Path, tmp_path: Path) -> None:
    for given, message in (
        ("cost=null", "cost=null: times of pilots are predicted"),
        ("over=[tree9]", "over: tree9 is no method of the runs; they have plain"),
        ("dataset=x", "give dataset=<folder> for predictors of a size, or runs="),
        ("timed=x", "timed: only of predictors"),
    ):
        with pytest.raises(UserError, match=message):
            evaluated(outputs, given)
    shutil.copytree(outputs / "cost/run", tmp_path / "cost")
    other = json.loads((tmp_path / "cost/cost.json").read_text())
    other["points"][0]["cycle_s"] *= 2
    (tmp_path / "cost/cost.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match="was not swept with cost=<the curve given here>"):
        evaluated(outputs, f"cost={tmp_path}/cost/cost.json")
