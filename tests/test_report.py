"""The report: its tables by hand, figures that exist, one page that needs nothing else."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure
from records_kit import make_settings, make_trace, open_store
from stages_kit import performed
from test_tables import rows_of, stored

from blockpilot.app.status import write_status
from blockpilot.base.errors import UserError
from blockpilot.costs.curve import CostCurve, CostPoint
from blockpilot.evaluate.comparison import timed_table
from blockpilot.evaluate.verdicts import of_sweep, of_timed
from blockpilot.records.schema import ok_row
from blockpilot.records.store import read_records
from blockpilot.report import __main__ as report
from blockpilot.report.figures import figures
from blockpilot.report.paper import paper_table
from blockpilot.report.published import MEAN, published
from blockpilot.report.runs import portable
from blockpilot.sweep.tables import PROVENANCE, sweep_table

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


def drawn(records: pd.DataFrame) -> list[tuple[str, str, Figure]]:
    """The figures of a sweep."""
    return list(figures(records, sweep_table(records, by_set=True)))


def test_the_main_table_is_golden_and_says_where_it_comes_from(tmp_path: Path, run: Path) -> None:
    text = (reported(tmp_path, run) / "report.md").read_text()
    assert GOLDEN in text
    assert (
        f"From `{portable(run)}`, made by `python -m blockpilot.sweep radius=2 'prompts=[a,b]'`."
        in text
    )


def test_a_later_call_that_did_nothing_is_not_cited(tmp_path: Path, run: Path) -> None:
    write_status(run, "failed", ["radius=-1"], "radius=-1: must be >= 0")
    write_status(run, "done", ["radius=3", "plan=true"])
    text = (reported(tmp_path, run) / "report.md").read_text()
    assert "made by `python -m blockpilot.sweep radius=2 'prompts=[a,b]'`." in text


def test_the_page_needs_nothing_else_and_the_numbers_are_in_csv(tmp_path: Path, run: Path) -> None:
    folder = reported(tmp_path, run)
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(list(folder.glob("figures/*.png"))) == 7
    assert "http" not in page
    lines = pd.read_csv(folder / "tables/sweep-run.csv")
    wanted = sweep_table(read_records(run), by_set=True)
    pd.testing.assert_frame_equal(lines, wanted, check_dtype=False)


def test_every_section_says_machine_commit_dtype_and_command(tmp_path: Path, run: Path) -> None:
    curve = CostCurve(
        {"dtype": "bfloat16"}, {"cpu": "EPYC", "git_commit": "12ab"}, [cost_point(8, 0.05)]
    )
    cost = tmp_path / "cost" / "c"
    cost.mkdir(parents=True)
    (cost / "cost.json").write_text(curve.to_json())
    provenance = {name: f"the {name}" for name in PROVENANCE}
    scored = evaluated(tmp_path / "evaluate" / "e", gained("mine", 0.1, **provenance))
    text = (reported(tmp_path, run, cost, scored) / "report.md").read_text()
    sections = text.split("\n## ")[1:]
    assert len(sections) == 4, "the sweep has two"
    for section in sections:
        assert "made by `python -m blockpilot." in section
        for name in ("machine", "commit", "dtype"):
            assert f"{name}: " in section
    assert "machine: EPYC; commit: 12ab; dtype: bfloat16." in text
    assert str(tmp_path) not in text, "a path of this machine"


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("outputs/sweep/a", "outputs/sweep/a"),
        (f"{Path.cwd()}/outputs/sweep/a", "outputs/sweep/a"),
        ("/home/someone/outputs/sweep/a", "outputs/sweep/a"),
    ],
)
def test_a_path_is_shown_as_another_machine_can_use_it(path: str, shown: str) -> None:
    assert portable(Path(path)) == shown


def test_names_are_text_in_the_page_and_one_cell_in_markdown(tmp_path: Path) -> None:
    folder = reported(tmp_path, evaluated(tmp_path / "evaluate" / "e", gained("<b>|&", 0.1)))
    assert "<td>&lt;b&gt;|&amp;</td>" in (folder / "report.html").read_text()
    assert "| <b>\\|& |" in (folder / "report.md").read_text()


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
    assert "time_of_a_cycle" not in [name for name, *_ in drawn(records)]


def test_the_headline_figure_shows_the_speedups_of_the_table(tmp_path: Path) -> None:
    """Measured with their intervals, per set; predicted ones where nothing was timed."""
    rows = [row for p in range(6) for row in rows_of(p, "maths" if p % 2 else "code")]
    records = stored(tmp_path, rows)
    lines = sweep_table(records, by_set=True)
    predicted = {f"predicted_{name}": lines[name] for name in lines if name.startswith("speedup")}
    untimed = lines.assign(**predicted, speedup=float("nan"))
    for table, word in ((lines, "Measured"), (untimed, "Predicted")):
        name, caption, figure = next(figures(records, table))
        assert name == "speedup_by_method"
        assert caption.startswith(word)
        bars = {bar.get_label(): bar for bar in figure.axes[0].containers}
        assert list(bars) == ["code", "maths"]
        for prompt_set, bar in bars.items():
            own = lines[lines["set"].eq(prompt_set) & lines["method"].ne("plain")]
            assert bar[0].get_xdata().tolist() == own["speedup"].tolist()
            ends = [segment[:, 0].tolist() for segment in bar[2][0].get_segments()]
            wanted = own[["speedup_low", "speedup_high"]].to_numpy()
            assert ends == [pytest.approx(pair) for pair in wanted]
    nothing = untimed.assign(predicted_speedup=float("nan"))
    assert "speedup_by_method" not in [name for name, *_ in figures(records, nothing)]


def test_figures_over_sizes_leave_other_drafters_of_the_same_size_out(tmp_path: Path) -> None:
    rows = rows_of(0, "maths") + rows_of(1, "code") + rows_of(2, "code")
    alone = {name for name, *_ in drawn(stored(tmp_path / "a", rows))}
    for prompt in range(3):
        own = {"method": "lookup", "drafter": "prompt_lookup"}
        settings = make_settings(prompt, 8, prompt_set="code" if prompt else "maths", **own)
        rows.append(ok_row(settings, make_trace([1] * 8), prompt_ids=range(3)))
    both = {name: figure for name, _, figure in drawn(stored(tmp_path / "b", rows))}
    assert alone == set(both)
    (line, *_) = both["accepted_by_slot"].axes[0].lines
    assert line.get_ydata()[0] == 1, "lookup accepted nothing"


def test_the_cost_of_trees_is_not_mixed_with_that_of_chains(tmp_path: Path) -> None:
    folder = tmp_path / "cost" / "c"
    folder.mkdir(parents=True)
    curve = CostCurve({}, {}, [cost_point(8, 0.05), cost_point(8, 0.07, "tree")])
    (folder / "cost.json").write_text(curve.to_json())
    text = (reported(tmp_path, folder) / "report.md").read_text()
    assert "| chain | 8 | 50.0 |" in text
    assert "| tree | 8 | 70.0 |" in text


def cost_point(size: int, seconds: float, kind: str = "chain") -> CostPoint:
    parts = dict.fromkeys(("draft_s", "verify_s", "policy_s", "other_s"), 0.0)
    quartiles = {"cycle_s_q25": seconds, "cycle_s_q75": seconds}
    return CostPoint(
        block_size=size, context=64, repeats=1, cycle_s=seconds, **quartiles, **parts, kind=kind
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


def gained(method: str, difference: float, **more: object) -> dict[str, object]:
    """A line of an evaluation over all prompts."""
    interval = {"difference_low": difference - 0.02, "difference_high": difference + 0.03}
    line = {"prompt_set": "all", "prompts": 9, "method": method, "unit": "tau", "fixed_size": 8}
    line |= {"gain": 2.5 + difference, "baseline": 2.5, "difference": difference, **interval}
    return line | {"detectable": 0.05, **more}


def evaluated(folder: Path, *lines: dict[str, object]) -> Path:
    """A folder as the stage `evaluate` leaves it."""
    folder.mkdir(parents=True)
    pd.DataFrame(lines).to_csv(folder / "evaluation.csv", index=False)
    return folder


def test_each_difference_stands_beside_its_own_baseline(tmp_path: Path) -> None:
    crossed = {"gain": 2.61, "baseline": 2.67}
    folder = evaluated(
        tmp_path / "evaluate" / "e",
        gained("best fixed", 0.0, accuracy=0.5),
        gained("mine", 0.123, accuracy=0.25, recovered=float("nan")),
        gained("cross-fitted oracle", -0.06, **crossed),
    )
    text = (reported(tmp_path, folder) / "report.md").read_text()
    heads = (
        "| prompt_set | prompts | method | tau | baseline | difference | detectable | accuracy |"
    )
    assert heads in text
    assert "| all | 9 | best fixed | 2.500 | 2.500 | - | 0.050 | 50% |" in text
    assert "| all | 9 | mine | 2.623 | 2.500 | +0.123 (+0.103 to +0.153) | 0.050 | 25% |" in text
    crossed_line = "| 2.610 | 2.670 | -0.060 (-0.080 to -0.030) | 0.050 | - |"
    assert f"| all | 9 | cross-fitted oracle {crossed_line}" in text
    assert "The policy split's best fixed size is 8." in text


def test_an_evaluation_of_another_version_is_refused(tmp_path: Path) -> None:
    line = {name: value for name, value in gained("x", 0.1).items() if name != "baseline"}
    folder = evaluated(tmp_path / "evaluate" / "e", line)
    with pytest.raises(
        UserError, match=r"evaluation\.csv: no readable table \(no column baseline\)"
    ):
        reported(tmp_path, folder)


def test_predictors_of_all_evaluations_stand_in_one_table(tmp_path: Path) -> None:
    runs = [
        evaluated(
            tmp_path / "evaluate" / f"k{k}",
            gained("best fixed", 0.0, sizes=f"7 {k}"),
            gained("net", 7.0, features="logits", sizes=f"7 {k}", prompt_set="maths"),
            gained("net", difference, features="logits", sizes=f"7 {k}"),
        )
        for k, difference in ((1, 0.01), (2, -0.1))
    ]
    text = (reported(tmp_path, *runs) / "report.md").read_text()
    assert text.index("## Predictors compared, all prompts") < text.index("## Evaluation k1")
    heads = "evaluation | sizes | prompts | method | tau | baseline | difference"
    assert f"| {heads} | detectable |" in text
    first = "| k1 | 7 1 | 9 | net | 2.510 | 2.500 | +0.010 (-0.010 to +0.040) | 0.050 |"
    second = "| k2 | 7 2 | 9 | net | 2.400 | 2.500 | -0.100 (-0.120 to -0.070) | 0.050 |"
    assert f" --- |\n{first}\n{second}\n\n" in text
    assert "Predictors: features logits." in text
    alone = (reported(tmp_path, runs[0]) / "report.md").read_text()
    assert "Predictors compared" not in alone, "one predictor compares with nothing"


def test_runs_of_one_folder_name_have_sections_and_files_of_their_own(tmp_path: Path) -> None:
    runs = [
        evaluated(tmp_path / machine / "evaluate" / "k2", gained("net", gain, features="logits"))
        for machine, gain in (("old", 0.01), ("new", 0.02))
    ]
    folder = reported(tmp_path, *runs)
    text = (folder / "report.md").read_text()
    for machine, gain in (("old", 2.51), ("new", 2.52)):
        assert text.count(f"## Evaluation {machine}/evaluate/k2, tau") == 1
        assert f"| {machine}/evaluate/k2 | 9 | net |" in text
        lines = pd.read_csv(folder / "tables" / f"evaluate-{machine}--evaluate--k2.csv")
        assert lines["gain"].tolist() == [gain]
    same = tmp_path / "old" / "evaluate" / ".." / "evaluate" / "k2"
    with pytest.raises(UserError, match=r"runs: .*k2 is given twice"):
        reported(tmp_path, runs[0], same)


def test_a_verdict_heads_the_report(tmp_path: Path, run: Path) -> None:
    folder = evaluated(
        tmp_path / "evaluate" / "e",
        gained("net", 0.01, features="logits"),
        gained("worse", -0.1, features="hidden"),
        gained("cross-fitted oracle", 0.9),
    )
    report_folder = reported(tmp_path, run, folder)
    text = (report_folder / "report.md").read_text()
    verdicts = [
        "- Decoded sweep run: dflash4, the best of 2 methods on these very prompts, is 4.00 "
        "times as fast as plain decoding (4.00 to 4.00, 95%) by measured time: faster with 3 "
        "prompts",
        "- Evaluation e, tau on unseen prompts: the learned size net gains +0.4% tau (-0.4% to "
        "+1.6%, 95%) against block 8: no difference shown with 9 prompts (2.0% would show)",
        "- Evaluation e, tau on unseen prompts: the learned size worse gains -4.0% tau (-4.8% to "
        "-2.8%, 95%) against block 8: less tau with 9 prompts",
    ]
    head = text[: text.index("\n## ")]
    assert head.splitlines()[2:5] == verdicts
    assert f"<strong>{verdicts[1][2:]}</strong>" in (report_folder / "report.html").read_text()
    bare = evaluated(tmp_path / "evaluate" / "bare", gained("cross-fitted oracle", 0.9))
    text = (reported(tmp_path, bare) / "report.md").read_text()
    assert "the cross-fitted oracle gains +36.0% tau" in text
    assert "against block 8, both on halves of answers: more tau with 9 prompts" in text


def test_a_verdict_rests_on_what_was_measured(tmp_path: Path) -> None:
    rows = [row for prompt in range(4) for row in rows_of(prompt)]
    lines = sweep_table(stored(tmp_path / "a", rows))
    unpaired = lines.assign(speedup=float("nan"))
    (verdict,) = of_sweep(unpaired)
    assert "commits 5.00 tokens per cycle (2.00 to 8.00, 95%)" in verdict
    assert verdict.endswith("nothing was timed")
    assert of_sweep(lines[lines["method"] == "plain"]) == []
    for prompt in range(4):
        settings = make_settings(prompt, 8, method="blockpilot", policy="blockpilot@12ab")
        trace = make_trace([8, 8], decode_s=0.1 * (1 + 0.1 * prompt))
        rows.append(ok_row(settings, trace, prompt_ids=range(3)))
    (verdict,) = of_timed(timed_table(stored(tmp_path / "b", rows), "dflash4"))
    assert verdict.startswith(
        "the learned size blockpilot is 4.00 times as fast as dflash4 (4.00 to"
    )
    assert verdict.endswith("by measured time: faster with 4 prompts")
    (verdict,) = of_sweep(sweep_table(stored(tmp_path / "one", rows_of(0))))
    assert "(no interval) by measured time: no difference shown with 1 prompt" in verdict


def test_measured_times_have_a_table_that_can_be_read(tmp_path: Path) -> None:
    rows = [row for prompt in range(4) for row in rows_of(prompt, "maths")]
    folder = evaluated(tmp_path / "evaluate" / "e", gained("mine", 0.1))
    table = timed_table(stored(tmp_path / "run", rows), "dflash4")
    table.to_csv(folder / "timed.csv", index=False)
    text = (reported(tmp_path, folder) / "report.md").read_text()
    heads = ("set", "method", "B", "mode", "n", "tau macro 95%", "TPOT ms", "speedup 95%")
    assert f"| {' | '.join(heads)} | over best fixed 95% | drafting |" in text
    cells = ("4", "5.00 2.00-8.00", "36.9", "3.12 2.00-8.00", "0.78 0.50-2.00")
    assert f"| all | dflash8 | 8 | draft | {' | '.join(cells)} |" in text
    (ratio,) = table[table["set"].eq("all") & table["method"].eq("dflash8")]["over_fixed"]
    tpot = table[table["set"] == "all"].set_index("method")["tpot_ms"]
    assert ratio == pytest.approx(tpot["dflash4"] / tpot["dflash8"], rel=1e-12)


def test_times_are_compared_over_the_answers_that_all_baselines_have(tmp_path: Path) -> None:
    rows = [row for prompt in range(4) for row in rows_of(prompt)]
    lacking = rows_of(4, sizes=(1, 8))  # a prompt that the best fixed size never had
    table = timed_table(stored(tmp_path / "run", rows + lacking), "dflash4")
    assert any("lack of plain or dflash4: 1 of the prompts" in t for t in table.attrs["caption"])
    assert set(table["prompts"]) == {4}
    others = table[table["method"] != "dflash4"]
    followed = others["fixed_tpot_ms"] / others["tpot_ms"]
    assert followed.tolist() == pytest.approx(others["over_fixed"].tolist(), rel=1e-12)


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
