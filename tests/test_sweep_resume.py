"""Interrupted, killed and divided sweeps end with the rows of one that ran through."""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from records_kit import VARYING
from safetensors.torch import load_file
from stages_kit import (
    command,
    entered,
    environment,
    executed,
    performed,
    sweep_arguments,
    write_prompts,
)

from blockpilot.base.errors import UserError
from blockpilot.base.launch import meet
from blockpilot.base.provenance import facts
from blockpilot.prompts.base import Prompt
from blockpilot.records.schema import TIMES
from blockpilot.records.store import Store, read_records
from blockpilot.sweep import __main__ as sweep
from blockpilot.sweep.decoded import DecodedSweep

PROMPTS = [*(f"number {number}" for number in range(11)), ["first", "second"]]


def arguments(folder: Path, *more: str) -> list[str]:
    file = write_prompts(folder / "prompts.jsonl", PROMPTS)
    return sweep_arguments(folder, file, "radius=0", "decoding.max_new_tokens=4", *more)


def rows(records: pd.DataFrame) -> list[dict[str, Any]]:
    """What must not depend on how often a run was interrupted or among how many it was divided."""
    kept = records.drop(columns=[*VARYING, *TIMES, "threads", "versions"])
    kept = kept.astype(object).where(kept.notna(), None)
    return [
        {key: list(value) if hasattr(value, "tolist") else value for key, value in row.items()}
        for row in kept.to_dict("records")
    ]


def prefills(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {file.name: load_file(file) for file in (folder / "prefill").iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of an uninterrupted sweep."""
    folder = tmp_path_factory.mktemp("whole")
    records = performed(sweep.run, "sweep", *arguments(folder))
    assert set(records["status"]) == {"ok"}
    return folder / "sweep" / "run"


def assert_same(folder: Path, whole: Path, n_prompts: int = len(PROMPTS)) -> None:
    """Rows, records.parquet and prefill of a run equal those of the uninterrupted one."""
    records = read_records(whole)
    names = sorted(set(records["prompt_id"]))[:n_prompts]
    records = records[records["prompt_id"].isin(names)]
    assert rows(read_records(folder)) == rows(records)
    stored = pd.read_parquet(folder / "records.parquet")
    assert list(stored["key"]) == list(records["key"])
    wanted = {
        name: tensors
        for name, tensors in prefills(whole).items()
        if any(name.startswith(prompt.replace("/", "_")) for prompt in names)
    }
    found = prefills(folder)
    assert set(found) == set(wanted)
    for name, tensors in wanted.items():
        for key, tensor in tensors.items():
            assert torch.equal(found[name][key], tensor)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("decoding.temperature=0.5", "temperature=1.0, this run has 0.5"),
        ("decoding.max_new_tokens=5", "max_new_tokens=4, this run has 5"),
        ("dtype=float32", "dtype=float64, this run has float32"),
        ("mode=replay", "mode=decode, this run has replay"),
    ],
)
def test_rows_of_other_settings_are_refused_before_anything_is_measured(
    whole: Path, change: str, told: str
) -> None:
    given = [*arguments(whole.parents[1]), change]
    with pytest.raises(UserError, match=f"rows in .* made with {told}; choose another run_id"):
        performed(sweep.run, "sweep", *given)


def test_times_of_another_machine_are_refused(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "facts", lambda device: {**facts(device), "cpu": "an abacus"})
    with pytest.raises(UserError, match=r"rows in .* made with cpu=.*, this run has an abacus"):
        performed(sweep.run, "sweep", *arguments(whole.parents[1]))


def test_fewer_methods_than_before_are_told(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    performed(sweep.run, "sweep", *arguments(tmp_path), "prompts.limit=1", "sizes=[3]")
    assert "have no" not in caplog.text
    performed(sweep.run, "sweep", *arguments(tmp_path), "prompts.limit=2")
    assert "prompts measured now have no ['dflash3'], as rows of before" in caplog.text


class Watch:
    """Counts what is measured and stored; interrupts before or after a chosen store."""

    def __init__(self, patch: pytest.MonkeyPatch, stop_at: int | None, *, before: bool) -> None:
        self.measured: list[str] = []
        self.stored = 0
        append, decode_rows = Store.append, DecodedSweep._rows

        def appending(store: Any, given: Iterable[Any]) -> None:
            self.stored += 1
            if before and self.stored == stop_at:
                raise KeyboardInterrupt
            append(store, given)
            if self.stored == stop_at:
                raise KeyboardInterrupt

        def measuring(one: Any, prompt: Prompt) -> Any:
            self.measured.append(prompt.id)
            return decode_rows(one, prompt)

        patch.setattr(Store, "append", appending)
        patch.setattr(DecodedSweep, "_rows", measuring)


@pytest.mark.parametrize("before", [True, False], ids=["before the rename", "after it"])
@pytest.mark.parametrize("stop_at", [1, 5])
def test_an_interrupted_run_ends_like_an_uninterrupted_one(
    whole: Path, tmp_path: Path, stop_at: int, before: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch, stop_at, before=before)
        with pytest.raises(KeyboardInterrupt):
            performed(sweep.run, "sweep", *arguments(tmp_path))
    finished = watch.measured[: stop_at - 1] if before else watch.measured
    folder = tmp_path / "sweep" / "run"
    assert set(read_records(folder)["prompt_id"]) == set(finished)
    with pytest.MonkeyPatch.context() as patch:
        again = Watch(patch, None, before=False)
        performed(sweep.run, "sweep", *arguments(tmp_path))
    assert not set(again.measured) & set(finished), "a finished prompt was measured again"
    assert len(again.measured) + len(finished) == len(PROMPTS)
    assert_same(folder, whole)


def test_a_finished_run_measures_nothing_more(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    performed(sweep.run, "sweep", *arguments(tmp_path, "prompts.limit=2"))
    before = (tmp_path / "sweep/run/records.parquet").read_bytes()
    watch = Watch(monkeypatch, None, before=False)
    performed(sweep.run, "sweep", *arguments(tmp_path, "prompts.limit=2"))
    assert watch.measured == []
    assert (tmp_path / "sweep/run/records.parquet").read_bytes() == before
    performed(sweep.run, "sweep", *arguments(tmp_path))
    assert len(watch.measured) == len(PROMPTS) - 2
    assert_same(tmp_path / "sweep/run", whole)


def test_a_run_that_is_killed_at_a_random_time_ends_like_an_uninterrupted_one(
    whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "sweep" / "run"
    process = subprocess.Popen(
        command("sweep", *arguments(tmp_path)),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 240
    while not list(folder.glob("rank00/part-*")) and time.monotonic() < deadline:
        assert process.poll() is None, "the sweep ended without a row"
        time.sleep(0.02)
    wait = random.Random().uniform(0, 0.5)
    time.sleep(wait)
    process.kill()
    process.wait()
    finished = set(read_records(folder)["prompt_id"])
    with pytest.MonkeyPatch.context() as patch:
        again = Watch(patch, None, before=False)
        performed(sweep.run, "sweep", *arguments(tmp_path))
    assert not set(again.measured) & finished, f"killed after {wait} s"
    assert_same(folder, whole)


def rank(patch: pytest.MonkeyPatch, number: int, size: int) -> None:
    """From now on this process is one rank of several that some other launcher started."""
    for name, value in {"RANK": number, "WORLD_SIZE": size, "LOCAL_RANK": number}.items():
        patch.setenv(name, str(value))


@pytest.mark.parametrize("n_prompts", [1, 3, len(PROMPTS)])
def test_two_ranks_measure_what_one_process_does(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_prompts: int
) -> None:
    """With one prompt the second rank is empty, which is fine."""
    for number in (1, 0):
        rank(monkeypatch, number, 2)
        performed(sweep.run, "sweep", *arguments(tmp_path, f"prompts.limit={n_prompts}"))
    folder = tmp_path / "sweep" / "run"
    records = read_records(folder)
    assert set(records["world_size"]) == {2}
    shares = [set(records.loc[records["rank"] == n, "prompt_id"]) for n in (0, 1)]
    assert [len(share) for share in shares] == [(n_prompts + 1) // 2, n_prompts // 2]
    assert not shares[0] & shares[1]
    assert_same(folder, whole, n_prompts)


def test_one_process_finishes_what_a_lost_rank_left(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank(monkeypatch, 1, 2)
    performed(sweep.run, "sweep", *arguments(tmp_path))
    done = set(read_records(tmp_path / "sweep/run")["prompt_id"])
    assert len(done) == len(PROMPTS) // 2
    rank(monkeypatch, 0, 1)
    watch = Watch(monkeypatch, None, before=False)
    performed(sweep.run, "sweep", *arguments(tmp_path))
    assert set(watch.measured) == set(read_records(whole)["prompt_id"]) - done
    assert_same(tmp_path / "sweep/run", whole)


def test_torchrun_splits_the_prompts(whole: Path, tmp_path: Path) -> None:
    given = command("sweep", *arguments(tmp_path, "prompts.limit=5"), processes=2)
    code, shown, told = executed(given, tmp_path)
    assert code == 0, told
    folder = tmp_path / "sweep" / "run"
    records = read_records(folder)
    assert set(records["world_size"]) == {2}
    assert records.groupby("rank")["prompt_id"].nunique().to_dict() == {0: 3, 1: 2}
    assert_same(folder, whole, 5)
    for name in ("rank00", "rank01"):
        manifest = json.loads((folder / name / "manifest.json").read_text())
        assert [session["status"] for session in manifest["sessions"]] == ["done"]
        assert list((folder / name).glob("part-*.parquet"))
    # One table, by the rank that waits for the other, over the prompts of both.
    table = [line.split() for line in shown.splitlines() if line.startswith("plain")]
    assert [line[2] for line in table] == ["5"]


def test_every_job_of_a_multirun_has_a_run_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["-m", *arguments(tmp_path, "prompts.limit=1", "radius=0,1")]
    given.remove("radius=0")
    assert entered(monkeypatch, sweep.main, *given) == 0
    assert "2 jobs: 2 done, 0 failed, 0 missing" in capsys.readouterr().err
    for job, sizes in enumerate([{1, 16}, {1, 15, 16, 17}]):
        folder = tmp_path / "sweep" / f"run-{job}"
        assert json.loads((folder / "status.json").read_text())["status"] == "done"
        records = pd.read_parquet(folder / "records.parquet")
        assert set(records["block_size"]) == sizes
        assert set(records["run_id"]) == {f"run-{job}"}


def test_ranks_wait_for_each_other_before_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the table lacks rows, and a rank that leaves with an error ends the others."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    rank(monkeypatch, 0, 2)
    meet("somewhere")  # no torchrun, no waiting
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    first = threading.Thread(target=meet, args=("run/measured",))
    first.start()
    first.join(0.3)
    assert first.is_alive()
    meet("run/measured")
    first.join(30)
    assert not first.is_alive()
