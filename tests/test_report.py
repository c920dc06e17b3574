"""The report: its tables by hand, figures that exist, one page that needs nothing else."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from records_kit import make_settings, make_trace, open_store
from stages_kit import performed
from test_tables import rows_of, stored

from blockpilot import report
from blockpilot.decoding.cost import CostCurve, CostPoint
from blockpilot.errors import UserError
from blockpilot.records.schema import ok_row
from blockpilot.reporting.evaluation import timed_table
from blockpilot.reporting.figures import figures
from blockpilot.reporting.paper import paper_table
from blockpilot.reporting.published import MEAN, published
from blockpilot.reporting.tables import sweep_table
from blockpilot.runtime import write_status

GOLDEN = """\
| method | code | maths | mean |
| --- | --- | --- | --- |
| plain | 1.00 / 1.00 | 1.00 / 1.00 | 1.00 / 1.00 |
| dflash4 | 4.00 / 4.00 | 4.00 / 4.00 | 4.00 / 4.00 |
| dflash8 | 3.29 / 5.00 | 8.00 / 8.00 | 5.64 / 6.50 |
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A sweep of three prompts in two sets, as a finished stage leaves it."""
    folder = tmp_path / "sweep" / "run"
    stored(folder, rows_of(0, "maths") + rows_of(1, "code") + rows_of(2, "code"))
    write_status(folder, "done", ["radius=2", "prompts=[a,b]"])
    return folder


def reported(tmp_path: Path, *runs: Path) -> Path:
    listed = ",".join(map(str, runs))
    return performed(
        report.run, "report", f"runs=[{listed}]", "run_id=r", f"paths.outputs={tmp_path}"
    )


def test_the_main_table_is_golden_and_says_where_it_comes_from(tmp_path: Path, run: Path) -> None:
    text = (reported(tmp_path, run) / "report.md").read_text()
    assert GOLDEN in text
    assert f"From `{run}`, made by `python -m blockpilot.sweep radius=2 'prompts=[a,b]'`." in text


def test_a_later_call_that_did_nothing_is_not_cited(tmp_path: Path, run: Path) -> None:
    write_status(run, "failed", ["radius=-1"], "radius=-1: must be >= 0")
    write_status(run, "done", ["radius=3", "plan=true"])
    text = (reported(tmp_path, run) / "report.md").read_text()
    assert "made by `python -m blockpilot.sweep radius=2 'prompts=[a,b]'`." in text


def test_the_page_needs_nothing_else_and_the_numbers_are_in_csv(tmp_path: Path, run: Path) -> None:
    folder = reported(tmp_path, run)
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(list(folder.glob("figures/*.png"))) == 6
    assert "http" not in page
    lines = pd.read_csv(folder / "tables/sweep-run.csv")
    wanted = sweep_table(report.read_records(run), by_set=True)
    pd.testing.assert_frame_equal(lines, wanted, check_dtype=False)


def test_the_same_records_give_the_same_bytes(tmp_path: Path, run: Path) -> None:
    folder = reported(tmp_path, run)
    before = {file: file.read_bytes() for file in folder.rglob("*.*") if file.is_file()}
    reported(tmp_path, run)
    assert {file: file.read_bytes() for file in before} == before


def test_replayed_rows_have_predicted_speedups_in_brackets_and_no_times(tmp_path: Path) -> None:
    rows = []
    for prompt in range(2):
        for size, commits in ((1, [1] * 8), (4, [4, 4])):
            settings = make_settings(prompt, size, mode="replay")
            row = ok_row(settings, make_trace(commits), prompt_ids=range(3))
            rows.append(row | {"predicted_decode_s": 0.5 * len(commits) * (1 if size == 1 else 2)})
    records = stored(tmp_path / "run", rows)
    table = paper_table(sweep_table(records, by_set=True), "t", 0.0).set_index("method")
    assert table.loc["dflash4", "set"] == "(2.00) / 4.00"
    assert "time_of_a_cycle" not in [name for name, *_ in figures(records)]


def test_figures_over_sizes_leave_other_drafters_of_the_same_size_out(tmp_path: Path) -> None:
    rows = rows_of(0, "maths") + rows_of(1, "code") + rows_of(2, "code")
    alone = {name for name, *_ in figures(stored(tmp_path / "a", rows))}
    for prompt in range(3):
        settings = make_settings(prompt, 8, method="lookup", drafter="prompt_lookup")
        rows.append(ok_row(settings, make_trace([1] * 8), prompt_ids=range(3)))
    drawn = {name: figure for name, _, figure in figures(stored(tmp_path / "b", rows))}
    assert alone == set(drawn)
    (line, *_) = drawn["accepted_by_slot"].axes[0].lines
    assert line.get_ydata()[0] == 1, "lookup accepted nothing"


def test_the_cost_of_trees_is_not_mixed_with_that_of_chains(tmp_path: Path) -> None:
    folder = tmp_path / "cost" / "c"
    folder.mkdir(parents=True)
    curve = CostCurve({}, {}, [cost_point(8, 0.05), cost_point(8, 0.07, tree=True)])
    (folder / "cost.json").write_text(curve.to_json())
    text = (reported(tmp_path, folder) / "report.md").read_text()
    assert "| chain | 8 | 50.0 |" in text
    assert "| tree | 8 | 70.0 |" in text


def cost_point(size: int, seconds: float, *, tree: bool = False) -> CostPoint:
    parts = dict.fromkeys(("draft_s", "verify_s", "policy_s", "other_s"), 0.0)
    quartiles = {"cycle_s_q25": seconds, "cycle_s_q75": seconds}
    return CostPoint(
        block_size=size, context=64, repeats=1, cycle_s=seconds, **quartiles, **parts, tree=tree
    )


def test_published_numbers_stand_under_the_methods_that_papers_name(tmp_path: Path) -> None:
    assert published("qwen3-4b", 0.0, "blockpilot", MEAN).tau == 6.59
    assert published("qwen3-4b", 0.0, "dflash16", "gsm8k").speedup == 5.15
    assert published("qwen3-8b", 0.0, "eagle3_60", "mt-bench").tau == 3.26
    assert published("qwen3-4b", 1.0, "eagle3_16", MEAN).speedup == 1.72
    for nothing in (
        ("qwen3-4b", 0.0, "eagle3_16", MEAN),
        ("qwen3-4b", 1.0, "dflash16", "gsm8k"),
        ("qwen3-4b", 0.0, "dflash8", MEAN),
        ("smollm2-135m", 0.0, "dflash16", MEAN),
    ):
        assert published(*nothing) is None
    rows = []
    for size in (1, 16):
        settings = make_settings(0, size, prompt_set="gsm8k")
        trace = make_trace([size] * (16 // size), decode_s=1.6 / size)
        rows.append(ok_row(settings, trace, prompt_ids=range(3)))
    records = stored(tmp_path / "run", rows)
    table = paper_table(sweep_table(records, by_set=True), "qwen3-4b", 0.0).set_index("method")
    assert list(table.index) == ["plain", "dflash16", "dflash16, published"]
    assert list(table.loc["dflash16, published"]) == ["5.15 / 6.53", "3.99 / 6.31"]


def test_an_evaluation_and_a_cost_curve_have_tables_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "evaluate" / "e"
    folder.mkdir(parents=True)
    line = {
        "method": "mine",
        "prompt_set": "all",
        "prompts": 9,
        "unit": "tau",
        "fixed_size": 8,
        "gain": 2.5,
        "difference": 0.1234,
        "recovered": float("nan"),
        "accuracy": 0.25,
    }
    pd.DataFrame([line]).to_csv(folder / "evaluation.csv", index=False)
    text = (reported(tmp_path, folder) / "report.md").read_text()
    assert "| all | 9 | mine | 2.500 | +0.123 | 25% |" in text
    assert "the policy split's best fixed size (8)" in text


def test_predictors_of_all_evaluations_stand_in_one_table(tmp_path: Path) -> None:
    runs = []
    for k, gain in ((1, 0.01), (2, -0.02)):
        runs.append(tmp_path / "evaluate" / f"k{k}")
        runs[-1].mkdir(parents=True)
        lines = [
            {"method": "best fixed", "prompt_set": "all", "difference": 0.0},
            {"method": "net", "prompt_set": "maths", "difference": 7.0, "features": "logits"},
            {"method": "net", "prompt_set": "all", "difference": gain, "features": "logits"},
        ]
        lines = [{"unit": "tau", "fixed_size": 8, "sizes": f"7 {k}", **line} for line in lines]
        pd.DataFrame(lines).to_csv(runs[-1] / "evaluation.csv", index=False)
    text = (reported(tmp_path, *runs) / "report.md").read_text()
    assert text.index("## Predictors compared, all prompts") < text.index("## Evaluation k1")
    assert "| evaluation | unit | sizes | method | features | difference |" in text
    rows = "| k1 | tau | 7 1 | net | logits | +0.010 |\n| k2 | tau | 7 2 | net | logits | -0.020 |"
    assert f" --- |\n{rows}\n\n" in text
    alone = (reported(tmp_path, runs[0]) / "report.md").read_text()
    assert "Predictors compared" not in alone, "one predictor compares with nothing"


def test_measured_times_have_a_table_that_can_be_read(tmp_path: Path) -> None:
    rows = [row for prompt in range(4) for row in rows_of(prompt, "maths")]
    folder = tmp_path / "evaluate" / "e"
    folder.mkdir(parents=True)
    line = {"prompt_set": "all", "method": "mine", "unit": "tau", "fixed_size": 8, "gain": 2.5}
    pd.DataFrame([line]).to_csv(folder / "evaluation.csv", index=False)
    timed_table(stored(tmp_path / "run", rows), "dflash4").to_csv(folder / "timed.csv", index=False)
    text = (reported(tmp_path, folder) / "report.md").read_text()
    heads = ("set", "method", "B", "mode", "tau macro 95%", "speedup 95%", "over best fixed 95%")
    assert f"| {' | '.join(heads)} | drafting 95% |" in text
    cells = ("5.00 2.00-8.00", "3.12 2.00-8.00", "0.78 0.50-2.00")
    assert f"| all | dflash8 | 8 | draft | {' | '.join(cells)} |" in text


def test_one_name_in_two_modes_is_two_lines(tmp_path: Path) -> None:
    rows = rows_of(0, "maths")
    cut = make_settings(0, 4, block_mode="verify", prompt_set="maths")
    rows.append(ok_row(cut, make_trace([2] * 4), prompt_ids=range(3)))
    records = stored(tmp_path / "run", rows)
    names = list(paper_table(sweep_table(records, by_set=True), "t", 0.0)["method"])
    assert names == ["plain", "dflash4, B = 4, draft", "dflash8", "dflash4, B = 4, verify"]
    with pytest.raises(UserError, match="method dflash4 has rows of two sizes or modes"):
        timed_table(records, "dflash8")


def test_a_folder_with_nothing_to_report_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"runs: {tmp_path} holds no records, evaluation.csv or"):
        reported(tmp_path, tmp_path)
    with open_store(tmp_path / "empty"):
        pass
    with pytest.raises(UserError, match="empty holds no rows"):
        reported(tmp_path, tmp_path / "empty")
    with pytest.raises(UserError, match=r"runs=\[\]: give folders"):
        reported(tmp_path)
