"""The sweep when things go wrong: one line that says what, nothing lost, an honest exit status."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from stages_kit import entered, performed, sweep_arguments, write_prompts

from blockpilot.base.errors import IncompleteError, UserError
from blockpilot.decoding.target import Target
from blockpilot.records.store import Store, read_records
from blockpilot.sweep import __main__ as sweep
from blockpilot.sweep import decoded, rows
from blockpilot.sweep.tables import sweep_table

PROMPTS = ["two and two", "why? ~", "tell me", "the end"]
SICK = "local/p01"


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    file = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
    return sweep_arguments(tmp_path, file, "radius=0", "decoding.max_new_tokens=4")


def statuses(records: pd.DataFrame) -> dict[str, set[str]]:
    return {name: set(rows["status"]) for name, rows in records.groupby("prompt_id")}


def decode_with(change: Callable[..., Any]) -> Callable[..., Any]:
    """`decode` for the sweep, where `change(ids, budget, trace)` looks at what comes out."""
    decode = decoded.decode

    def changed(target: Any, method: Any, ids: Any, choose: Any, budget: int, **more: Any) -> Any:
        trace = decode(target, method, ids, choose, budget, **more)
        change(ids, budget, method, trace)
        return trace

    return changed


def test_a_prompt_that_fails_is_a_row_and_the_same_run_id_finishes_it(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(ids: list[int], budget: int, method: Any, trace: Any) -> None:
        if len(ids) == len(PROMPTS[1]) and method.drafter.name == "dflash":
            raise RuntimeError("out of memory")

    monkeypatch.setattr(decoded, "decode", decode_with(fail))
    with pytest.raises(IncompleteError, match=r"failed prompts: 1 \(local/p01\).*same run_id"):
        performed(sweep.run, "sweep", *arguments)
    folder = tmp_path / "sweep" / "run"
    before = read_records(folder)
    others = {f"local/p{n:02d}": {"ok"} for n in (0, 2, 3)}
    assert statuses(before) == {SICK: {"failed"}, **others}
    failed = before[before["prompt_id"] == SICK]
    assert set(failed["error"]) == {"RuntimeError: out of memory"}
    assert len(failed) == 2, "all methods of a failed prompt run again, in one session"
    assert len(pd.read_parquet(folder / "records.parquet")) == len(before) == 8
    assert f"1 prompt failed, first {SICK}" in "".join(sweep_table(before).attrs["caption"])
    monkeypatch.undo()
    after = performed(sweep.run, "sweep", *arguments)
    assert statuses(after) == {SICK: {"ok"}, **others}
    assert (after.groupby("prompt_id")["session_id"].nunique() == 1).all()
    again = after[after["session_id"] != before["session_id"].iloc[0]]
    assert set(again["prompt_id"]) == {SICK}


def test_logits_that_are_not_finite_are_a_failed_row(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = sweep.load_target

    def broken(cfg: Any) -> Target:
        target = load(cfg)
        (tilde,) = target.tokenizer("~")["input_ids"]
        target.model.get_input_embeddings().weight.data[tilde] = float("nan")
        return target

    monkeypatch.setattr(sweep, "load_target", broken)
    with pytest.raises(IncompleteError, match=f"failed prompts: 1 .{SICK}"):
        performed(sweep.run, "sweep", *arguments)
    records = read_records(tmp_path / "sweep" / "run")
    assert statuses(records)[SICK] == {"failed"}
    assert "not finite at new token 1" in records["error"].dropna().iloc[0]
    assert (records["status"] == "ok").sum() == 6


def test_a_conversation_that_cannot_be_rendered_hides_no_other(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = rows.render

    def refusing(tokenizer: Any, messages: Any, *how: Any) -> list[int]:
        if "two" in messages[-1]["content"]:
            raise UserError("the model's chat template refuses the messages")
        return render(tokenizer, messages, *how)

    monkeypatch.setattr(rows, "render", refusing)
    with pytest.raises(IncompleteError, match=r"failed prompts: 1 \(local/p00\)"):
        performed(sweep.run, "sweep", *arguments)
    records = read_records(tmp_path / "sweep" / "run")
    assert statuses(records)["local/p00"] == {"failed"}
    assert (records["status"] == "ok").sum() == 6


def test_an_output_that_rounding_does_not_explain_is_reported(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(ids: list[int], budget: int, method: Any, trace: Any) -> None:
        if method.drafter.name == "dflash" and len(ids) == len(PROMPTS[1]):
            trace.tokens[2] += 1

    monkeypatch.setattr(decoded, "decode", decode_with(spoil))
    with pytest.raises(IncompleteError, match=f"outputs differ .*: {SICK} with dflash16"):
        performed(sweep.run, "sweep", *arguments)
    records = read_records(tmp_path / "sweep" / "run")
    parted = records[records["divergence_at"].notna()]
    assert list(parted["prompt_id"]) == [SICK]
    assert parted["divergence_at"].iloc[0] == 2
    assert parted["divergence_margin"].iloc[0] > sweep.EXACT_MARGIN
    table = sweep_table(records).set_index("method")
    assert table["equal_to_plain"]["dflash16"] == pytest.approx(3 / 4)
    monkeypatch.undo()
    with pytest.raises(IncompleteError, match=f"outputs differ .*: {SICK} with dflash16"):
        performed(sweep.run, "sweep", *arguments)  # finds nothing to do, and the row still there


def test_a_full_disk_stops_in_one_line_and_loses_nothing(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, append = os.fsync, Store.append
    stored: list[str] = []

    def full(descriptor: int) -> None:
        if len(stored) >= 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    def appending(store: Any, rows: Any) -> None:
        rows = list(rows)
        append(store, rows)
        stored.append(rows[0]["prompt_id"])

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(Store, "append", appending)
    with pytest.raises(UserError, match=r"No space left on device.*stored before is intact"):
        performed(sweep.run, "sweep", *arguments)
    folder = tmp_path / "sweep" / "run"
    assert set(statuses(read_records(folder))) == set(stored) == {"local/p00", SICK}
    assert not list(folder.rglob("*.tmp"))
    monkeypatch.undo()
    records = performed(sweep.run, "sweep", *arguments)
    assert set(records["status"]) == {"ok"}
    assert records["session_id"].nunique() == 2


def test_outputs_that_cannot_be_written_are_one_line(arguments: list[str], tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    if os.access(locked, os.W_OK):  # root may write everywhere but here
        locked = Path("/sys")
    if not locked.is_dir():
        pytest.skip("no folder that this user cannot write to")
    with pytest.raises(UserError, match=r"cannot write .*choose a writable folder") as caught:
        performed(sweep.run, "sweep", *arguments, f"paths.outputs={locked}/blockpilot")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("+modle=x", "unknown key modle (did you mean mode or model?)"),
        ("+model=nope", "Could not find 'model/nope'; Available options in 'model': gpt-oss-20b, "),
        ("sizes=[0]", "sizes=[0]: must be a list of sizes >= 1"),
        ("sizes=[x]", "sizes[0]: Value 'x'"),
        ("radius=-1", "radius=-1: must be a number >= 0"),
        ("block_mode=x", "block_mode=x: must be draft, verify"),
        ("drafter=nope", "Could not find 'drafter/nope'"),
        ("prompts=nope", "Could not find 'prompts/nope'"),
        ("prompts.path=nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("prompts.path=empty.jsonl", "empty.jsonl: no prompts in it"),
        ("prompts.split=tset", "prompts.split=tset is unknown; allowed: distill, policy, "),
        ("prompts.limit=0", "prompts.limit=0: must be a number >= 1"),
        ("+drafter.chekpoint=x", "unexpected keyword argument 'chekpoint'"),
    ],
)
def test_a_mistake_is_one_line_before_a_weight_is_loaded(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mistake: str,
    told: str,
) -> None:
    (tmp_path / "empty.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "load_target", lambda cfg: pytest.fail("a weight was loaded"))
    code = entered(monkeypatch, sweep.main, *arguments, mistake)
    line = capsys.readouterr().err
    assert code == 2
    assert line.startswith("blockpilot.sweep: error: ")
    assert told in line
    assert line.count("\n") == 1


def test_a_split_without_prompts_says_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "load_target", lambda cfg: pytest.fail("a weight was loaded"))
    outputs = f"paths.outputs={tmp_path}"
    code = entered(
        monkeypatch, sweep.main, "prompts=humaneval", "prompts.split=policy", "run_id=run", outputs
    )
    assert code == 2
    assert "prompts.split=policy leaves no prompts (there are: " in capsys.readouterr().err


def test_a_failed_prompt_makes_the_exit_status_1(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(ids: list[int], budget: int, method: Any, trace: Any) -> None:
        if len(ids) == len(PROMPTS[1]):
            raise RuntimeError("out of memory")

    monkeypatch.setattr(decoded, "decode", decode_with(fail))
    assert entered(monkeypatch, sweep.main, *arguments) == 1
    told = capsys.readouterr()
    assert f"error: failed prompts: 1 ({SICK})" in told.err
    assert "dflash16" in told.out, "the table of what was measured"
