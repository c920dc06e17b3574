"""Evaluation on unseen prompts: by hand, on gains that can and cannot be learnt, and as a stage."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from stages_kit import performed, sweep_arguments, texts_of, write_prompts
from test_labels import halves
from test_learning import SMALL, folder, outputs

from blockpilot import dataset, train
from blockpilot.app.tracking import NullTracker
from blockpilot.base.errors import UserError
from blockpilot.evaluate import __main__ as evaluate
from blockpilot.evaluate.comparison import Gains
from blockpilot.evaluate.comparison import evaluate as score
from blockpilot.evaluate.policies import policy_gains, with_tuned
from blockpilot.records.run_folder import RunFolder
from blockpilot.records.store import read_records
from blockpilot.stats.tau import tau_by_size, turn_of
from blockpilot.sweep import __main__ as sweep
from blockpilot.sweep.tables import PROVENANCE

__all__ = ["folder"]  # the fixture


def evaluated(*given: str) -> pd.DataFrame:
    """What the stage returns, untracked."""
    return performed(evaluate.run, "evaluate", "tracker=none", *given)


def turns_of(n: int) -> list[tuple[str, int]]:
    """One turn of each of n conversations."""
    return [(str(number), 0) for number in range(n)]


def lines_of(gains: Gains, fixed: int, **choices: list[int]) -> pd.DataFrame:
    picked = {name: np.array(sizes) for name, sizes in choices.items()}
    return score(gains, turns_of(len(gains.whole)), fixed, picked, {}).set_index("method")


def test_by_hand() -> None:
    whole = np.array([[1.0, 3.0], [2.0, 1.0], [1.0, 2.0]])
    first = np.array([[1.0, 3.0], [2.0, 1.0], [2.0, 1.0]])
    second = np.array([[1.0, 2.0], [1.0, 3.0], [2.0, 3.0]])
    lines = lines_of(Gains(whole, first, second), 1, mine=[1, 0, 0], best=[1, 0, 1])
    assert lines.loc["best fixed", "gain"] == 2
    assert lines.loc["best fixed", "difference"] == 0
    assert lines.loc["mine", "gain"] == pytest.approx((3 + 2 + 1) / 3)
    assert lines.loc["mine", "accuracy"] == pytest.approx(2 / 3)
    assert lines.loc["mine", "regret"] == pytest.approx(1 / 3)
    assert lines.loc["oracle", "gain"] == lines.loc["best", "gain"] == pytest.approx(7 / 3)
    assert lines.loc["oracle", "regret"] == 0
    assert lines.loc["uniform random", "gain"] == pytest.approx(np.mean(whole))
    # Chosen on the first half: 2, 1, 2 on the second; chosen on the second: 3, 1, 1 on the first.
    assert lines.loc["cross-fitted oracle", "gain"] == pytest.approx((2 + 1 + 2 + 3 + 1 + 1) / 6)
    fixed_on_halves = (3 + 1 + 1 + 2 + 3 + 3) / 6
    assert lines.loc["cross-fitted oracle", "baseline"] == pytest.approx(fixed_on_halves)
    assert lines.drop(index="cross-fitted oracle")["baseline"].tolist() == [2.0] * (len(lines) - 1)
    followed = lines["gain"] - lines["baseline"]
    assert followed.tolist() == pytest.approx(lines["difference"].tolist(), abs=1e-12)
    room = lines.loc["cross-fitted oracle", "gain"] - fixed_on_halves
    assert lines.loc["cross-fitted oracle", "difference"] == pytest.approx(room)
    assert room < 0
    assert np.isnan(lines.loc["mine", "recovered"]), "nothing to recover a share of"


def test_a_tie_is_right_at_any_of_its_sizes() -> None:
    whole = np.array([[2.0, 2.0], [1.0, 3.0]])
    lines = lines_of(Gains(whole, whole, whole), 1, mine=[1, 1], other=[0, 0])
    assert lines.loc["mine", "accuracy"] == lines.loc["best fixed", "accuracy"] == 1
    assert lines.loc["other", "accuracy"] == 0.5


def test_turns_of_one_conversation_are_one_piece_of_evidence() -> None:
    first, second = halves(100, 3, 0)
    once = score(Gains(first, first, second), turns_of(100), 0, {}, {})
    names = [(str(number), turn) for number in range(100) for turn in range(4)]
    parts = [np.repeat(part, 4, axis=0) for part in (first, first, second)]
    again = score(Gains(*parts), names, 0, {}, {})
    pd.testing.assert_frame_equal(once, again)
    # Two seeds of a's second turn: as sampled texts differ there, they are examples of their own.
    names = [("a", 0), ("a", 1), ("a", 1), ("b", 0)]
    lines = score(Gains(first[:4], first[:4], second[:4]), names, 0, {}, {})
    base = first[:4, 0]
    fixed = (base[0] + (base[1] + base[2]) / 2) / 2 / 2 + base[3] / 2
    assert lines.loc[0, "gain"] == pytest.approx(fixed)


@pytest.mark.parametrize(
    ("name", "turn"), [("a/1", 0), ("a/1#1", 1), ("a/1#12@3", 12), ("a#b/1@2", 0)]
)
def test_the_turn_of_an_example_is_read_from_its_name(name: str, turn: int) -> None:
    assert turn_of(name) == turn


def test_an_answer_without_halves_is_scored_but_not_cross_fitted() -> None:
    first, second = halves(20, 3, 0)
    whole = (first + second) / 2
    known = score(Gains(whole[:19], first[:19], second[:19]), turns_of(19), 0, {}, {})
    first[19] = second[19] = np.nan
    lines = score(Gains(whole, first, second), turns_of(20), 0, {}, {})
    assert not lines["gain"].isna().any()
    crossed = [t.set_index("method").loc["cross-fitted oracle", "gain"] for t in (known, lines)]
    assert crossed[0] == crossed[1]
    nothing = np.full_like(whole, np.nan)
    names = score(Gains(whole, nothing, nothing), turns_of(20), 0, {}, {})["method"]
    assert "cross-fitted oracle" not in set(names)


def test_a_real_preference_counts_and_luck_does_not() -> None:
    for signal, learnt in ((0.0, False), (1.0, True)):
        first, second = halves(400, 5, 3, signal)
        whole = (first + second) / 2
        liked = second.argmax(axis=1) if signal else np.random.default_rng(0).integers(5, size=400)
        lines = lines_of(Gains(whole, first, second), 2, policy=list(liked))
        low, high = lines.loc["policy", ["difference_low", "difference_high"]]
        assert (low > 0) == learnt
        assert lines.loc["oracle", "difference"] > 0.2, "of luck, where there is nothing else"
        crossed = lines.loc["cross-fitted oracle"]
        assert (crossed["difference_low"] > 0.3) == learnt
        assert low < lines.loc["policy", "difference"] < high


def test_the_detectable_difference_shrinks_with_the_root_of_the_prompts() -> None:
    detectable = []
    for n in (100, 400):
        first, second = halves(n, 3, 0)
        table = lines_of(Gains(first, first, second), 0, policy=[1] * n)
        detectable.append(table.loc["policy", "detectable"])
    assert detectable[0] / detectable[1] == pytest.approx(2, rel=0.15)


def test_the_stage_scores_predictors_on_the_test_split(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summaries: list[dict[str, float]] = []
    monkeypatch.setattr(NullTracker, "summarise", lambda _, values: summaries.append(values))
    predictor = folder / "train/run/predictor"
    given = [f"dataset={folder}/dataset/run", f"policies=[{predictor}]", *outputs(folder)]
    table = evaluated(*given)
    assert set(table["method"]) == {
        "best fixed",
        "run",
        "uniform random",
        "cross-fitted oracle",
        "oracle",
        "oracle, by luck alone",
        "oracle, less its luck",
        "per cycle, in hindsight",
        "branch of 2, in hindsight",
        "branch of 4, in hindsight",
    }
    by_method = table[table["prompt_set"] == "all"].set_index("method")
    gain = by_method["gain"]
    assert gain["per cycle, in hindsight"] >= gain["oracle"]
    luck = gain["oracle"] - gain["oracle, less its luck"]
    assert gain["oracle, by luck alone"] - gain["best fixed"] == pytest.approx(luck)
    assert gain["branch of 4, in hindsight"] >= gain["branch of 2, in hindsight"]
    assert by_method.loc["run", ["features", "hidden", "depth"]].tolist() == ["logits", 16, 2]
    assert set(table["prompt_set"]) == {"local", "all"}
    assert table[list(PROVENANCE)].notna().all(axis=None), "who made it, beside every line"
    assert (table["prompts"] == 4).all()
    for column in ("gain", "baseline", "difference"):
        assert summaries[0][f"{column}/run"] == by_method.loc["run", column]
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict.startswith("the learned size run gains ")
    assert f"against block {table['fixed_size'].iloc[0]}: " in verdict
    stored = pd.read_csv(folder / "evaluate/run/evaluation.csv")
    pd.testing.assert_frame_equal(stored, table, check_dtype=False)


def test_policies_that_a_sweep_replayed_are_lines_beside_the_sizes(
    folder: Path, tmp_path: Path
) -> None:
    policies = "mode=replay", "method=[libraspec]", "tree_nodes=[7,15,63]"
    texts = write_prompts(tmp_path / "p.jsonl", [*texts_of("policy", 3), *texts_of("test", 3)])
    performed(sweep.run, "sweep", *sweep_arguments(tmp_path, texts, "run_id=run", *policies))
    given = [f"runs=[{tmp_path}/sweep/run]", *outputs(tmp_path)]
    performed(dataset.run, "dataset", *given)
    given = [f"dataset={tmp_path}/dataset/run", *outputs(tmp_path)]
    table = evaluated(*given)
    lines = table[table["prompt_set"] == "all"].set_index("method")
    records = read_records(tmp_path / "sweep/run")
    rows = records[(records["split"] == "test") & (records["method"] == "tree7")]
    taus = [sum(committed) / len(committed) for committed in rows["committed"]]
    assert len(taus) == 3
    assert lines.filter(like="tree7", axis=0)["gain"].item() == pytest.approx(np.mean(taus))
    assert "libraspec" in lines.index
    assert lines.index.str.fullmatch(r"tree\d+, tuned among tree\*").sum() == 1


def test_predicted_times_of_policies_are_those_of_the_same_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        # prompt, seed, method, policy, size, committed, predicted seconds
        ("a", 0, "dflash8", "fixed", 8, [4], 2.0),
        ("a", 0, "tree7", "tree", 8, [4], 1.6),
        ("a", 1, "dflash8", "fixed", 8, [3, 3], 2.0),
        ("a", 1, "tree7", "tree", 8, [6], 2.4),
        ("b", 0, "dflash8", "fixed", 8, [2, 2], 4.0),
        ("b", 1, "dflash8", "fixed", 8, [1, 1], 4.0),
        ("b", 0, "tree7", "tree", 8, [4], 5.0),
        ("b", 0, "dflash7", "fixed", 7, [2, 2], 9.0),
    ]
    names = ["prompt_id", "seed", "method", "policy", "block_size", "committed"]
    frame = pd.DataFrame(rows, columns=[*names, "predicted_decode_s"]).assign(
        turn=0, status="ok", temperature=1.0
    )
    monkeypatch.setattr("blockpilot.records.run_folder.RunFolder.records", lambda run: frame)
    gains = policy_gains([RunFolder(Path("run"))], {"a": 10.0, "b": 100.0}, 8, curve="x")
    assert gains is not None
    # a: 2.5 tokens/s on both seeds where the fixed size has 2 and 3; b: the seed that both have.
    assert gains["tree7"].to_dict() == pytest.approx({"a": 10, "b": 100 * 4 / 5})
    taus = policy_gains([RunFolder(Path("run"))], {"a": 3.5, "b": 1.5}, 8, curve=None)
    assert taus is not None
    assert taus["tree7"].to_dict() == pytest.approx({"a": 5, "b": 1.5 * 4 / 2})
    (tmp_path / "settings.json").write_text('{"cost": "x"}')
    assert policy_gains([RunFolder(tmp_path)], {"a": 1.0, "b": 1.0}, 8, curve="x") is not None
    assert policy_gains([RunFolder(tmp_path)], {"a": 1.0, "b": 1.0}, 8, curve="y") is None, (
        "another machine"
    )
    frame.loc[1, "predicted_decode_s"] = np.nan
    assert policy_gains([RunFolder(Path("run"))], {"a": 1.0, "b": 1.0}, 8, curve="x") is None


def test_the_tuned_one_is_chosen_on_other_prompts_than_it_is_scored_on() -> None:
    gains = pd.DataFrame(
        {"tree7": [3.0, 1.0], "tree15": [2.0, 9.0], "libraspec": [1.0, 1.0], "cad": [1, np.nan]},
        index=["learnt", "test"],
    )
    named = with_tuned(gains, ["learnt"], ["test"])
    assert {name: values.tolist() for name, values in named.items()} == {
        "tree7, tuned among tree*": [1.0],
        "tree15": [9.0],
        "libraspec": [1.0],
    }


def test_predictors_of_other_sizes_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    given = [f"runs=[{folder}/sweep/run]", "sizes=[15,17]", *outputs(tmp_path)]
    performed(dataset.run, "dataset", *given)
    predictor = performed(
        train.run, "train", f"dataset={tmp_path}/dataset/run", *SMALL, *outputs(tmp_path)
    )
    given = [f"dataset={folder}/dataset/run", f"policies=[{predictor}]", *outputs(tmp_path)]
    with pytest.raises(UserError, match=r"trained for sizes \(15, 17\), the dataset has \(15, 16"):
        evaluated(*given)


def test_predictors_of_runs_of_one_name_are_told_apart(folder: Path, tmp_path: Path) -> None:
    predictor = folder / "train/run/predictor"
    shutil.copytree(predictor, tmp_path / "train/run/predictor")
    both = f"policies=[{predictor},{tmp_path}/train/run/predictor]"
    table = evaluated(f"dataset={folder}/dataset/run", both, *outputs(tmp_path))
    learnt = table[table["features"].notna()]
    names = {f"{each.name}/train/run" for each in (folder, tmp_path)}
    assert set(learnt["method"]) == names
    with pytest.raises(UserError, match=r"policies: .*train/run is given twice"):
        evaluated(
            f"dataset={folder}/dataset/run",
            f"policies=[{predictor},{predictor}]",
            *outputs(tmp_path),
        )


def timed(folder: Path, *more: str) -> list[str]:
    """Arguments of a decoded sweep of test prompts with the trained policy."""
    texts = write_prompts(folder / "timed.jsonl", texts_of("test", 3))
    policy = ["method=[blockpilot]", f"policy.path={folder}/train/run/predictor"]
    alike = "prompts.split=test", "decoding.max_new_tokens=8"
    return sweep_arguments(folder, texts, "run_id=timed", *alike, *policy, *more)


def test_rows_of_one_folder_are_of_one_predictor(folder: Path, tmp_path: Path) -> None:
    learn = [f"dataset={folder}/dataset/run", *SMALL, "epochs=1", f"paths.outputs={tmp_path}"]
    given = [*timed(folder), f"paths.outputs={tmp_path}"]
    for run_id in ("a", "b"):
        performed(train.run, "train", *learn, f"run_id={run_id}", f"seed={ord(run_id)}")
    policies = [f"policy.path={tmp_path}/train/{run_id}/predictor" for run_id in ("a", "b")]
    records = performed(sweep.run, "sweep", *given, policies[0])
    rows = records[records["method"] == "blockpilot"]
    assert len(rows) == 3
    (name,) = rows["policy"].unique()
    assert name.startswith("blockpilot@")
    with pytest.raises(UserError, match=f"made with blockpilot.policy={name}, this run has"):
        performed(sweep.run, "sweep", *given, policies[1])


@pytest.mark.parametrize("regret", [0.0, 9.0])
def test_a_predictor_that_one_size_for_all_beats_is_told(
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    regret: float,
) -> None:
    monkeypatch.setattr(train, "regret", lambda *_: regret)
    learn = [f"dataset={folder}/dataset/run", *SMALL, "epochs=1", f"paths.outputs={tmp_path}"]
    performed(train.run, "train", *learn, "run_id=run")
    assert ("for all has less regret than this predictor" in caplog.text) == (regret == 9.0)


def test_times_are_compared_with_the_best_fixed_size(folder: Path) -> None:
    performed(sweep.run, "sweep", *timed(folder))
    given = [f"dataset={folder}/dataset/run", f"timed={folder}/sweep/timed", *outputs(folder, "t")]
    lines = evaluated(*given)
    times = pd.read_csv(folder / "evaluate/t/timed.csv").set_index(["set", "method"]).loc["all"]
    assert list(times.index) == ["plain", "blockpilot", "dflash15", "dflash16", "dflash17"]
    fixed = f"dflash{lines['fixed_size'].iloc[0]}"
    assert np.isnan(times.loc[fixed, "over_fixed"]), "against itself"
    others = times.drop(index=fixed)
    assert (others["over_fixed"] > 0).all()
    assert (others["over_fixed_low"] <= others["over_fixed"]).all()
    ratio = times.loc["blockpilot", "speedup"] / times.loc[fixed, "speedup"]
    assert times.loc["blockpilot", "over_fixed"] == pytest.approx(ratio)
    sizes = {"plain": 1, "dflash15": 15, "dflash16": 16, "dflash17": 17}
    assert times["verified"].drop("blockpilot").to_dict() == sizes
    assert times["drafting"].drop("plain").between(0.01, 0.99).all()
    assert times.loc["plain", "drafting"] < times["drafting"].drop("plain").min()
    assert (times["drafting_low"] <= times["drafting"]).all()
    assert (times["drafting"] <= times["drafting_high"]).all()
    evaluated(given[0], *given[2:])
    assert not (folder / "evaluate/t/timed.csv").exists(), "of another call"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("mode=replay", "mode replay, wanted is decode"),
        ("block_mode=verify", "block_mode verify, wanted is draft"),
        ("prompts.split=null", "split policy, wanted is test"),
        ("decoding.max_new_tokens=6", "max_new_tokens 6, wanted is 8"),
        ("radius=0", "lacks the best fixed size 1[57]; add sizes="),
    ],
)
def test_a_sweep_that_says_nothing_about_time_is_refused(
    folder: Path, tmp_path: Path, change: str, problem: str
) -> None:
    records = read_records(folder / "sweep/run")
    given = [*timed(folder), f"paths.outputs={tmp_path}", change]
    if change == "prompts.split=null":
        given.append(f"prompts.path={write_prompts(tmp_path / 'p.jsonl', texts_of('policy', 1))}")
    performed(sweep.run, "sweep", *given)
    best = set(tau_by_size(records[records["split"] == "policy"]).mean().nlargest(1).index)
    if change == "radius=0" and best == {16}:
        pytest.skip("the trained size is the best one here")
    given = [f"dataset={folder}/dataset/run", f"timed={tmp_path}/sweep/timed", *outputs(tmp_path)]
    with pytest.raises(UserError, match=problem):
        evaluated(*given)
