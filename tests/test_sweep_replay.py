"""The replayed sweep as a stage: decode's rows without its cost, what it keeps, what it refuses."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from decoding_kit import bound_dflash, tiny_target
from stages_kit import performed, sweep_arguments, write_prompts
from test_cost_fits import points

from blockpilot import cost
from blockpilot.app.tracking import NullTracker
from blockpilot.base.errors import IncompleteError, UserError
from blockpilot.costs.curve import CostCurve, cost_settings, load_cost
from blockpilot.decoding.types import Block
from blockpilot.distill import __main__ as distill
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.records.run_folder import RunFolder
from blockpilot.records.schema import PLAIN, TIMES
from blockpilot.sweep import __main__ as sweep
from blockpilot.sweep import replayed
from blockpilot.sweep.tables import figures_of, sweep_table, terminal_table

PROMPTS = ["one", ["two", "and then", "and now"], "a third, somewhat longer one", "x" * 400]
SAME = ["method", "turn", "status", "n_prompt_tokens", "n_new_tokens", "stop_reason"]
COUNTS = ["committed", "drafted", "verified"]


def arguments(folder: Path, *more: str) -> list[str]:
    file = write_prompts(folder / "prompts.jsonl", PROMPTS)
    return sweep_arguments(folder, file, "mode=replay", "replay.batch_size=2", *more)


def modes(folder: Path, *more: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of the same sweep by replay and by decoding."""
    by_replay = performed(sweep.run, "sweep", *arguments(folder, *more))
    given = arguments(folder, *more, "mode=decode", "run_id=decoded")
    return by_replay, performed(sweep.run, "sweep", *given)


@pytest.mark.parametrize(
    "more",
    [["sizes=[4,16]"], ["block_mode=verify", "sizes=[3]"], ["decoding.max_new_tokens=0"]],
    ids=["draft", "verify", "no-budget"],
)
def test_rows_are_those_of_decoding(tmp_path: Path, more: list[str]) -> None:
    first, second = modes(tmp_path, *more)
    assert len(first) == len(second) > 0
    assert set(first["status"]) == {"ok", "skipped"}
    pd.testing.assert_frame_equal(first[SAME], second[SAME])
    for name in COUNTS:
        assert [list(x) for x in first[name]] == [list(x) for x in second[name]]
    assert first["output_sha256"].equals(second["output_sha256"])
    assert set(first["mode"]) == {"replay"}
    assert first[[*TIMES, "predicted_decode_s"]].isna().all(axis=None)
    assert not set(first["key"]) & set(second["key"])


def test_prefill_and_anchors_lie_beside_the_rows(tmp_path: Path) -> None:
    more = ["replay.keep_features=true", "sizes=[4]", "tree_nodes=[31]"]
    first, second = modes(tmp_path, *more)
    ours, theirs = (tmp_path / "sweep" / name for name in ("run", "decoded"))
    partner = second.set_index(["prompt_id", "turn", "method"])
    read = 0
    for _, row in first[first["status"] == "ok"].iterrows():
        other = partner.loc[(row["prompt_id"], row["turn"], row["method"])]
        key = {"prompt_id": row["prompt_id"], "turn": row["turn"]}
        wanted = RunFolder(theirs).prefill({**key, "group_key": other["group_key"]})
        found = RunFolder(ours).prefill({**key, "group_key": row["group_key"]})
        torch.testing.assert_close(found.logits, wanted.logits)
        torch.testing.assert_close(found.hidden, wanted.hidden)
        text, kept, features = RunFolder(ours).replay({**key, "group_key": row["group_key"]})
        n_anchors = row["n_new_tokens"] - 1
        assert len(text.ids) == row["n_prompt_tokens"] + row["n_new_tokens"]
        assert text.prompt_length == row["n_prompt_tokens"]
        assert features is not None
        assert len(features) == len(text.ids) - 1
        assert list(row["committed"]) == list(other["committed"])
        if row["policy"] == "fixed":
            plan = Block(int(row["block_size"]), int(row["block_size"]))
            assert kept.trace(plan, [], "").committed == list(row["committed"])
        assert kept.marginals is not None
        assert kept.marginals.rank.shape == (n_anchors, 15)
        assert kept.marginals.top_tokens.shape == (n_anchors, 15, 31), "as many as trees read"
        read += 1
    assert read > 10
    with pytest.raises(UserError, match="no replay of prompt nobody"):
        RunFolder(ours).replay({"prompt_id": "nobody", "turn": 0, "group_key": "x"})


def test_the_same_run_id_repeats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = performed(sweep.run, "sweep", *arguments(tmp_path))
    monkeypatch.setattr(replayed, "answer", lambda *rest: pytest.fail("a prompt was answered"))
    again = performed(sweep.run, "sweep", *arguments(tmp_path))
    pd.testing.assert_frame_equal(first, again)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_answers_do_not_depend_on_who_shares_the_batch(tmp_path: Path, dtype: str) -> None:
    found = []
    for size in (1, 2, 32):
        given = [f"replay.batch_size={size}", f"dtype={dtype}", f"run_id=by{size}"]
        rows = performed(sweep.run, "sweep", *arguments(tmp_path, *given))
        found.append(rows.set_index(["prompt_id", "turn", "method"]))
    for other in found[1:]:
        for column in ("output_sha256", "committed"):
            assert found[0][column].map(str).equals(other[column].map(str))
    assert found[0]["output_sha256"].nunique() > 3


def test_a_prompt_that_fails_does_not_take_its_batch_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = replayed.answer

    def failing(target: Any, prompts: list[list[int]], *rest: Any) -> Any:
        if any(target.tokenizer.decode(ids) == "one" for ids in prompts):
            raise RuntimeError("out of memory")
        return answer(target, prompts, *rest)

    monkeypatch.setattr(replayed, "answer", failing)
    with pytest.raises(IncompleteError, match=r"failed prompts: 1 \(local/p00\)"):
        performed(sweep.run, "sweep", *arguments(tmp_path))
    monkeypatch.undo()
    records = performed(sweep.run, "sweep", *arguments(tmp_path))
    assert set(records["status"]) == {"ok", "skipped"}


def test_a_drafter_that_cannot_be_replayed_is_decoded_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(DFlashDrafter, "replay")
    with caplog.at_level(logging.WARNING):
        records = performed(sweep.run, "sweep", *arguments(tmp_path))
    assert "drafter dflash cannot be replayed" in caplog.text
    assert set(records["mode"]) == {"decode"}
    assert records["decode_s"].notna().any()


COST = ["sizes=[1,15,17]", "contexts=[4,40]", "repeats=2"]
COST += ["decoding.max_new_tokens=4", "decoding.temperature=1"]


def cost_arguments(folder: Path, *more: str) -> list[str]:
    tiny = sweep_arguments(folder, folder)
    dropped = ("radius", "mode=", "prompts", "decoding")
    return [*(a for a in tiny if not a.startswith(dropped)), *COST, *more]


def test_a_measured_curve_predicts_the_times_of_a_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, float]] = []
    monkeypatch.setattr(NullTracker, "summarise", lambda _, values: told.append(values))
    curve = performed(cost.run, "cost", *cost_arguments(tmp_path))
    assert [(p.block_size, p.context) for p in curve.points] == [
        (size, context) for size in (1, 15, 17) for context in (4, 40)
    ]
    for point in curve.points:
        assert 0 < point.cycle_s_q25 <= point.cycle_s <= point.cycle_s_q75
        assert (point.draft_s > 1e-4) == (point.block_size > 1), "plain decoding drafts nothing"
        assert point.repeats == 2
    file = tmp_path / "cost/run/cost.json"
    assert load_cost(file, {}) == curve
    records = performed(sweep.run, "sweep", *arguments(tmp_path, f"cost={file}"))
    for _, row in records[records["status"] == "ok"].iterrows():
        assert row["predicted_decode_s"] > 0
        if row["method"] == PLAIN:
            place = row["n_prompt_tokens"]
            steps = range(place, place + len(row["committed"]))
            wanted = sum(curve.seconds(1, at) for at in steps)
            assert row["predicted_decode_s"] == pytest.approx(wanted)
    given = arguments(tmp_path, f"cost={file}", "decoding.temperature=0", "run_id=other")
    with pytest.raises(UserError, match=r"measured with temperature=1.0, this run has 0.0"):
        performed(sweep.run, "sweep", *given)
    with pytest.raises(UserError, match=r"made with cost=\w{12}, this run has None"):
        performed(sweep.run, "sweep", *arguments(tmp_path))
    table = sweep_table(records)
    assert table["predicted_speedup"].notna().all()
    of_curve, of_sweep = told
    assert of_curve["cycle_ms/b15/context40"] == 1e3 * curve.points[3].cycle_s
    assert of_sweep == figures_of(table), "the tracker has the figures of the table"
    assert table["speedup"].isna().all()
    shown = [column.header for column in terminal_table(table).columns]
    assert "predicted\nspeedup 95%" in shown
    followed = table["plain_predicted_tpot_ms"] / table["predicted_tpot_ms"]
    assert followed.tolist() == pytest.approx(table["predicted_speedup"].tolist(), rel=1e-12)
    assert "TPOT\nms" not in shown


def test_a_curve_is_measured_once_and_not_mixed_with_another(tmp_path: Path) -> None:
    first = performed(cost.run, "cost", *cost_arguments(tmp_path))
    assert performed(cost.run, "cost", *cost_arguments(tmp_path)) == first
    with pytest.raises(UserError, match=r"a cost curve in .* made with repeats=2, this run has 3"):
        performed(cost.run, "cost", *cost_arguments(tmp_path, "repeats=3"))


def test_a_method_without_a_cost_is_refused_before_the_first_prompt(tmp_path: Path) -> None:
    performed(cost.run, "cost", *cost_arguments(tmp_path))
    file = tmp_path / "cost/run/cost.json"
    for more, told in (
        (["tree_nodes=[7]"], "no cost for tree 8: the curve holds nothing"),
        (["sizes=[20]"], r"no cost for block size 20: the curve holds 1\.\.17"),
    ):
        with pytest.raises(UserError, match=told):
            performed(sweep.run, "sweep", *arguments(tmp_path, f"cost={file}", *more))
    assert not (tmp_path / "sweep").exists()


def test_a_low_tau_on_noise_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("blockpilot.drafters.dflash")
    with cost.silent_drafters():
        log.warning("while the text is noise")
    log.warning("afterwards")
    assert [record.message for record in caplog.records] == ["afterwards"]


def test_a_predictor_is_timed_on_request(tmp_path: Path) -> None:
    curve = performed(cost.run, "cost", *cost_arguments(tmp_path, "policy.path=random"))
    assert curve.predictor_s == sorted(curve.predictor_s)
    assert curve.predictor_s[0] > 0
    stored = load_cost(tmp_path / "cost/run/cost.json", {})
    assert stored.predictor_s == curve.predictor_s


@pytest.mark.parametrize(
    "key", ["dtype", "drafter", "drafter_shape", "engine", "hardware", "threads"]
)
def test_a_curve_of_other_settings_is_refused_by_name(tmp_path: Path, key: str) -> None:
    settings = cost_settings(tiny_target(), bound_dflash())
    curve = CostCurve({**settings, key: "other"}, {}, points())
    file = tmp_path / "cost.json"
    file.write_text(curve.to_json())
    with pytest.raises(UserError, match=rf"measured with {key}=other, this run has"):
        load_cost(file, settings)
    file.write_text(replace(curve, settings=settings).to_json())
    assert load_cost(file, settings).points == points()


def test_a_replay_may_ask_about_another_machine_but_not_about_another_pair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_target()
    monkeypatch.setattr(target, "timed", False)
    pair = {"target": target.name, "drafter": "dflash", "drafter_shape": bound_dflash().shape}
    assert cost_settings(target, bound_dflash()) == pair


@pytest.mark.parametrize("text", ["", "{}", "[]", json.dumps({"points": [{"x": 1}]})])
def test_a_file_that_is_no_curve_is_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "cost.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"cost.json: no cost curve \(.*python -m") as caught:
        load_cost(file, {})
    assert "\n" not in str(caught.value)


def test_a_policy_that_follows_the_clock_is_decoded_and_not_replayed(tmp_path: Path) -> None:
    trees = ["trees=[2,8,32,64]", "sizes=[1]", "contexts=[40]"]
    performed(cost.run, "cost", *cost_arguments(tmp_path, *trees))
    more = ["method=[bastion,bastion-online]", f"policy.cost={tmp_path}/cost/run/cost.json"]
    with pytest.raises(UserError, match=r"bastion-online: .* this machine's clock; set mode=dec"):
        performed(sweep.run, "sweep", *arguments(tmp_path, *more))
    records = performed(
        sweep.run, "sweep", *arguments(tmp_path, *more, "mode=decode", "prompts.limit=1")
    )
    done = records[records["status"] == "ok"]
    assert (done.groupby(["prompt_id", "turn"])["output_sha256"].nunique() == 1).all()
    online = done["method"] == "bastion-online"
    assert done.loc[~online, "cycle_s"].isna().all()
    for _, row in done[online].iterrows():
        assert len(row["cycle_s"]) == len(row["verified"]) > 0
        assert sum(row["cycle_s"]) == pytest.approx(row["decode_s"], rel=0.5)
        assert row["policy"].endswith("-online")


def test_a_cost_for_decoded_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="times of decoded rows are measured; set mode=replay"):
        performed(sweep.run, "sweep", *arguments(tmp_path, "mode=decode", "cost=x.json"))


@pytest.mark.parametrize("mode", ["replay", "decode"])
def test_a_plan_loads_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: str,
) -> None:
    for stage in (sweep, distill, cost):
        monkeypatch.setattr(stage, "load_target", lambda cfg: pytest.fail("a weight was loaded"))
    performed(
        sweep.run, "sweep", *arguments(tmp_path, "plan=true", f"mode={mode}", "tree_nodes=[7,15]")
    )
    shown = capsys.readouterr().out
    for name, value in (("prompts", 4), ("turns", 6), ("rows", 36)):
        assert any(line.split() == [name, str(value)] for line in shown.splitlines()), name
    assert not (tmp_path / "sweep").exists()
    # Of every slot a token's rank and, per candidate, a token and half a float.
    shape = "model.architecture.vocab_size=300", "decoding.max_new_tokens=100000"
    for nodes, kept in (("[]", 16), ("[7]", 16), ("[63,7]", 63)):
        given = (*shape, f"tree_nodes={nodes}", "plan=true", "mode=replay")
        performed(sweep.run, "sweep", *arguments(tmp_path, *given))
        size = round(6 * (16 * 100_000 * (4 + 6 * kept) + (300 + 32) * 4) / 1e9, 3)
        assert str(size) in capsys.readouterr().out.split()
    missing = f"cost={tmp_path}/not/there/yet.json"  # a pipeline's first step will measure it
    performed(sweep.run, "sweep", *arguments(tmp_path, "plan=true", missing))
    assert ["mode", "replay"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    performed(sweep.run, "sweep", *arguments(tmp_path, "plan=true", "drafter=eagle3"))
    assert ["mode", "decode"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    performed(cost.run, "cost", *cost_arguments(tmp_path, "plan=true"))
    assert "18" in capsys.readouterr().out, "3 sizes x 2 contexts x (1 warm-up + 2 repeats)"


def test_a_policy_that_cannot_be_replayed_is_planned_decoded_and_named(tmp_path: Path) -> None:
    given = arguments(tmp_path, "+methods.mine._target_=decoding_kit.MinimalPolicy", "radius=0")
    performed(sweep.run, "sweep", *given, "plan=true")
    with pytest.raises(UserError, match="method mine: policy minimal has no replay; set mode=dec"):
        performed(sweep.run, "sweep", *given)
    records = performed(sweep.run, "sweep", *given, "mode=decode", "prompts.limit=1")
    assert set(records["method"]) == {PLAIN, "dflash16", "mine"}


def test_further_methods_are_decoded_beside_the_sizes(tmp_path: Path) -> None:
    more = ["tree_nodes=[7]", "method=[blockpilot]", "policy.path=random", "mode=decode"]
    records = performed(sweep.run, "sweep", *arguments(tmp_path, *more))
    assert set(records["method"]) == {
        PLAIN,
        "dflash15",
        "dflash16",
        "dflash17",
        "tree7",
        "blockpilot",
    }
    done = records[records["status"] == "ok"]
    assert (done.groupby(["prompt_id", "turn"])["output_sha256"].nunique() == 1).all()
    trees = done[done["method"] == "tree7"]
    assert set(trees["policy"]) == {"tree"}
    assert {size for row in trees["verified"] for size in row} == {8}
    chosen = done[done["method"] == "blockpilot"]
    assert all(len(set(row)) == 1 for row in chosen["verified"]), "one size per prompt"
    assert (chosen["policy_s"] > 0).all()
    assert len(sweep_table(records)) == 6


def test_other_drafters_are_decoded_beside_the_sizes(tmp_path: Path) -> None:
    more = ["method=[lookup,eagle3_16,eagle3_chain]", "model.drafters.eagle3=random"]
    records = performed(
        sweep.run, "sweep", *arguments(tmp_path, *more, "mode=decode", "prompts.limit=1")
    )
    done = records[records["status"] == "ok"]
    assert (done.groupby(["prompt_id", "turn"])["output_sha256"].nunique() == 1).all()
    drafters = done.groupby("method")["drafter"].agg(set)
    assert drafters["lookup"] == {"prompt_lookup"}
    assert drafters["eagle3_16"] == drafters["eagle3_chain"] == {"eagle3"}
    verified = done.groupby("method")["verified"].agg(lambda rows: {n for row in rows for n in row})
    assert verified["eagle3_16"] == {16}
    assert verified["eagle3_chain"] == {8}
    with pytest.raises(UserError, match="method lookup brings its own drafter, prompt_lookup"):
        performed(sweep.run, "sweep", *arguments(tmp_path, *more, "run_id=other"))


def test_trees_and_chosen_sizes_are_replayed_like_everything_else(tmp_path: Path) -> None:
    more = ["tree_nodes=[7,31]", "method=[blockpilot]", "policy.path=random"]
    more += ["decoding.max_new_tokens=20"]
    first, second = modes(tmp_path, *more)
    assert {"tree7", "tree31", "blockpilot"} < set(first["method"])
    pd.testing.assert_frame_equal(first[SAME], second[SAME])
    for name in COUNTS:
        assert [list(x) for x in first[name]] == [list(x) for x in second[name]]


def test_trees_cannot_be_replayed_without_marginals(tmp_path: Path) -> None:
    more = ["tree_nodes=[7]", "replay.marginals=false"]
    with pytest.raises(UserError, match=r"replay.marginals=false: tree7 is replayed from the"):
        performed(sweep.run, "sweep", *arguments(tmp_path, *more))
