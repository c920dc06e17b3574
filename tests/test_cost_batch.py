"""Batches: what is measured of them, how it is read, and the speedups that a report predicts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from decoding_kit import KINDS, bound_dflash, tiny_target
from records_kit import FakeTrace, make_settings, open_store
from stages_kit import composed, performed
from test_cost_fits import points
from test_report import reported
from test_sweep_replay import arguments, cost_arguments

from blockpilot import cost
from blockpilot.base.errors import UserError
from blockpilot.costs.batch import BatchCost, BatchPoint
from blockpilot.costs.curve import CostCurve, load_cost
from blockpilot.costs.forwards import verification
from blockpilot.records.run_folder import RunFolder
from blockpilot.records.schema import PLAIN, ok_row
from blockpilot.records.store import read_records
from blockpilot.report.batches import batch_lines
from blockpilot.sweep import __main__ as sweep

BATCHED = "batch=[3,1]"


def timed(part: str, batch: int, positions: int, context: int, seconds: float) -> BatchPoint:
    return BatchPoint(part, batch, positions, context, 3, seconds, seconds, seconds, "eager")


# --- what is measured --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_batched_forward_is_that_of_each_row_alone(kind: str) -> None:
    target, context, n = tiny_target(kind), 9, 4
    forward = verification(target, 3, context, 5, seed=7)
    first = forward(n)
    assert first.shape == (3, n)
    assert torch.equal(forward(n), first), "what it appended was not rolled back"
    draw = torch.Generator().manual_seed(7)
    prompt = torch.randint(target.embed_rows, (1, context), generator=draw)
    ids = torch.randint(target.embed_rows, (3, 5), generator=draw)
    for row, new in zip(first, ids, strict=True):
        text = torch.cat([prompt[0], new[:n]])
        alone = target.forward(text, target.new_cache(len(text)), n_logits=n)
        assert torch.equal(alone.logits.argmax(-1), row)


@torch.inference_mode()
def test_a_batched_block_is_that_of_each_row_alone() -> None:
    """Against the training forward, which knows no cache."""
    drafter, context, n_slots = bound_dflash(), 7, 5
    network = drafter.network
    draw = torch.Generator().manual_seed(1)
    features, blocks = (
        torch.randn(3, n, width, generator=draw, dtype=torch.float64)
        for n, width in ((context, network.fc.in_features), (n_slots, network.fc.out_features))
    )
    shape = network.config.layers
    slab = features.new_empty(
        len(network.layers), 2, 3, shape.num_key_value_heads, context + n_slots, shape.head_dim
    )
    cos, sin = network.rope(torch.arange(context + n_slots), torch.float64)
    network.read(features, slab, 0, cos[:context], sin[:context])
    got = network.block(blocks, slab, context, cos[context:], sin[context:])
    for row, read, block in zip(got, features, blocks, strict=True):
        (want,) = network(read, block[None], torch.tensor([context]))
        torch.testing.assert_close(row, want[1:], atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("context", [2, 40])
@torch.inference_mode()
def test_batched_drafts_have_a_token_for_every_slot(context: int) -> None:
    """Also behind a context that is shorter than a block."""
    draft = bound_dflash().batched(3, context, 6)
    for n_slots in (2, 6):
        assert draft(n_slots).shape == (3, n_slots - 1)
        assert torch.equal(draft(n_slots), draft(n_slots))


def test_the_stage_times_batches_beside_the_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trees = "trees=[2,8]"
    curve = performed(cost.run, "cost", *cost_arguments(tmp_path, BATCHED, trees))
    # 16 is the trained block: trees are grown from it.
    wanted = {"verify": [1, 2, 8, 15, 17], "draft": [15, 16, 17]}
    assert [(p.batch, p.context, p.part, p.positions) for p in curve.batched] == [
        (batch, context, part, n)
        for batch in (1, 3)
        for context in (4, 40)
        for part, counts in wanted.items()
        for n in counts
    ]
    for point in curve.batched:
        assert 0 < point.seconds_q25 <= point.seconds <= point.seconds_q75
        assert (point.repeats, point.engine) == (2, "eager")
    assert "eager" in capsys.readouterr().out
    assert cost.figures_of(curve)["batch3_ms/draft16/context40"] > 0
    assert load_cost(tmp_path / "cost/run/cost.json", {}) == curve
    with pytest.raises(UserError, match=r"made with batch=\[3, 1\], this run has \[2\]"):
        performed(cost.run, "cost", *cost_arguments(tmp_path, "batch=[2]", trees))
    performed(cost.run, "cost", *cost_arguments(tmp_path, BATCHED, "plan=true"))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    # 2 batches x 2 contexts x (3 widths + 2 blocks) x (1 warm-up + 2 repeats)
    assert ["forwards", "of", "batches,", "about", "60"] in lines


def test_plain_decoding_alone_needs_no_drafter_that_can(tmp_path: Path) -> None:
    curve = performed(
        cost.run, "cost", *cost_arguments(tmp_path, BATCHED, "sizes=[1]", "drafter=eagle3")
    )
    assert {(p.part, p.positions) for p in curve.batched} == {("verify", 1)}


@pytest.mark.parametrize("value", ["[0]", "[4,-1]", "[65537]", "[x]", "4"])
def test_a_batch_size_that_cannot_be_is_refused_by_key(value: str) -> None:
    with pytest.raises(UserError, match="batch") as caught:
        composed("cost", "run_id=x", f"batch={value}")
    assert "\n" not in str(caught.value)


def test_a_drafter_of_one_sequence_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    eagle = "drafter=eagle3", "drafter.block_size=8"
    with pytest.raises(UserError, match=r"batch=\[3, 1\]: drafter eagle3 drafts for one sequence"):
        performed(cost.run, "cost", *cost_arguments(tmp_path, BATCHED, *eagle))
    assert not list(tmp_path.rglob("*.json"))


# --- how it is read ----------------------------------------------------------------------------


def test_a_file_without_batches_holds_none_and_keeps_its_digest(tmp_path: Path) -> None:
    curve, file = CostCurve({}, {}, points()), tmp_path / "cost.json"
    raw = json.loads(curve.to_json())
    assert "batched" not in raw
    file.write_text(curve.to_json())
    assert load_cost(file, {}).batches == []
    more = replace(curve, batched=[timed("verify", 4, 1, 64, 0.1)])
    assert more.digest() != curve.digest() == load_cost(file, {}).digest()
    assert more.batches == [4]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"part": "x"}, "part=x: allowed is verify or draft"),
        ({"batch": 0}, "batch=0: allowed is an integer >= 1"),
        ({"positions": 0}, "positions=0: allowed is an integer >= 1"),
        ({"seconds": 0.0}, "seconds=0.0: allowed is seconds > 0"),
    ],
)
def test_a_point_that_cannot_be_is_refused(
    tmp_path: Path, change: dict[str, object], told: str
) -> None:
    point = replace(timed("verify", 4, 1, 64, 0.1), **change)  # type: ignore[arg-type]
    file = tmp_path / "cost.json"
    file.write_text(CostCurve({}, {}, points(), None, [point]).to_json())
    with pytest.raises(UserError, match=told):
        load_cost(file, {})


def test_seconds_lie_between_the_measured_positions_and_contexts() -> None:
    measured = [
        timed("verify", batch, n, context, batch * (n + context / 100))
        for batch in (1, 4)
        for n in (1, 5)
        for context in (100, 200)
    ]
    measured.append(timed("draft", 4, 6, 100, 0.5))
    at_four = BatchCost(measured, 4)
    # Behind 50 and 400 positions the nearest context counts.
    found = at_four.seconds("verify", [1, 3, 5, 1, 5], [100, 150, 200, 50, 400])
    assert found.tolist() == pytest.approx([4 * 2, 4 * 4.5, 4 * 7, 4 * 2, 4 * 7])
    # Two cycles with a draft, behind 100 and 103 positions, and one without, behind 104.
    seconds = at_four.decode_s([5, 5, 0], [5, 3, 1], [3, 1, 1], 100)
    assert seconds == pytest.approx(2 * 0.5 + 4 * ((5 + 1) + (3 + 1.03) + (1 + 1.04)))
    for part, n, told in (
        ("verify", 6, r"batch size 4 for verify of 6 positions: measured are 1\.\.5"),
        ("draft", 4, r"batch size 4 for draft of 4 positions: measured are 6\.\.6"),
    ):
        with pytest.raises(UserError, match=told):
            at_four.seconds(part, [n], [100])
    with pytest.raises(UserError, match="batch size 1 for draft: nothing was measured"):
        BatchCost(measured, 1).seconds("draft", [6], [100])


# --- what a report predicts --------------------------------------------------------------------

# Seconds by batch size, of target forwards by positions and of a block of 4 slots.
BY_HAND = {
    2: ({1: 0.010, 4: 0.014, 8: 0.026}, 0.006),
    8: ({1: 0.020, 4: 0.060, 8: 0.110}, 0.040),
}
CYCLES = {  # of 8 tokens after the first: committed tokens of two prompts, proposed, verified
    PLAIN: (([1] * 8, [1] * 8), 0, 1),
    "dflash4": (([4, 4], [2] * 4), 3, 4),
    "tree7": (([4, 4], [4, 4]), 3, 8),
}


@pytest.fixture
def predicted(tmp_path: Path) -> tuple[Path, Path]:
    """Folders of a replayed sweep of two prompts and of the cost curve that predicted its times."""
    batched = []
    for batch, (verify, draft) in BY_HAND.items():
        batched += [timed("verify", batch, n, 64, seconds) for n, seconds in verify.items()]
        batched.append(timed("draft", batch, 4, 64, draft))
    curve = CostCurve({"engine": "native"}, {"cpu": "EPYC"}, points(), None, batched)
    RunFolder(tmp_path / "cost/c").path.mkdir(parents=True)
    (tmp_path / "cost/c/cost.json").write_text(curve.to_json())
    run = RunFolder(tmp_path / "sweep/run")
    rows = []
    for method, (prompts, drafted, verified) in CYCLES.items():
        for prompt, committed in enumerate(prompts):
            settings = make_settings(prompt, verified, method=method, mode="replay")
            trace = FakeTrace(
                tokens=list(range(9)),
                committed=committed,
                drafted=[drafted] * len(committed),
                verified=[verified] * len(committed),
                copied=[0] * len(committed),
                quoted=[0] * len(committed),
                repeated=[0] * len(committed),
            )
            rows.append(ok_row(settings, trace, prompt_ids=range(3)))
    with open_store(run.path) as store:
        store.append(rows)
    run.keep_settings({"cost": curve.digest()}, {})
    return run.path, tmp_path / "cost/c"


def test_predicted_speedups_by_hand(predicted: tuple[Path, Path]) -> None:
    run, folder = predicted
    curve = load_cost(folder / "cost.json", {})
    lines = batch_lines(read_records(run), curve)
    pooled = lines[lines["set"] == "all"].set_index(["method", "batch"])
    tpot = pooled["predicted_tpot_ms"]
    assert tpot[PLAIN, 2] == pytest.approx(10)
    assert tpot[PLAIN, 8] == pytest.approx(20)
    # 2 and 4 cycles of 14 + 6 ms for 8 tokens, then of 60 + 40 ms; the mean over both prompts.
    assert tpot["dflash4", 2] == pytest.approx((5 + 10) / 2)
    assert tpot["dflash4", 8] == pytest.approx((25 + 50) / 2)
    ratio = pooled["predicted_speedup"]
    assert ratio["dflash4", 2] == pytest.approx(10 / 7.5)
    assert ratio["dflash4", 8] == pytest.approx(20 / 37.5)
    assert ratio["tree7", 2] == pytest.approx(10 / 8)  # 2 cycles of 26 + 6 ms
    assert ratio["tree7", 8] == pytest.approx(20 / 37.5)  # 2 cycles of 110 + 40 ms
    assert (pooled["predicted_speedup_low"]["dflash4", 2], ratio[PLAIN, 8]) == (pytest.approx(1), 1)


def test_a_report_of_both_runs_predicts_and_says_so(
    tmp_path: Path, predicted: tuple[Path, Path]
) -> None:
    folder = reported(tmp_path, *predicted)
    text = (folder / "report.md").read_text()
    (section,) = [each for each in text.split("\n## ") if each.startswith("Predicted speedup at b")]
    assert "| set | method | batch 2 | batch 8 |" in section
    assert "| all | dflash4 | 1.33 1.00-2.00 | 0.53 0.40-0.80 |" in section
    assert "| all | tree7 | 1.25 1.25-1.25 | 0.53 0.53-0.53 |" in section
    assert f"| {PLAIN} |" not in section
    for word in ("prediction", "same phase", "eager forwards", "engine native"):
        assert word in section
    assert "| 8 | draft | 4 | 40.0 |" in text, "the forwards themselves"
    stored = pd.read_csv(folder / "tables/batch-sweep-run.csv")
    assert set(stored["batch"]) == {2, 8}


def test_nothing_is_predicted_by_another_curve_or_one_without_batches(
    tmp_path: Path, predicted: tuple[Path, Path]
) -> None:
    run, folder = predicted
    assert "Predicted speedup at batch" not in (reported(tmp_path, run) / "report.md").read_text()
    file = folder / "cost.json"
    curve = load_cost(file, {})
    for other in (replace(curve, batched=[]), replace(curve, machine={"cpu": "another"})):
        file.write_text(other.to_json())
        text = (reported(tmp_path, run, folder) / "report.md").read_text()
        assert "Predicted speedup at batch" not in text
        assert ("several sequences in ms" in text) == bool(other.batched)


def test_cost_then_sweep_then_report_predicts_every_method(tmp_path: Path) -> None:
    performed(cost.run, "cost", *cost_arguments(tmp_path, BATCHED, "trees=[2,8]"))
    given = f"cost={tmp_path}/cost/run/cost.json", "tree_nodes=[7]"
    records = performed(sweep.run, "sweep", *arguments(tmp_path, *given))
    folder = reported(tmp_path, tmp_path / "sweep/run", tmp_path / "cost/run")
    lines = pd.read_csv(folder / "tables/batch-sweep-run.csv")
    assert set(lines["method"]) == set(records["method"]) >= {PLAIN, "tree7", "dflash16"}
    assert set(lines["batch"]) == {1, 3}
    assert (lines["predicted_tpot_ms"] > 0).all()
