"""Trackers: one run per job, no step lost on resume, never in the way of results."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from blockpilot.app.tracking import NullTracker, WandbTracker, tracked
from blockpilot.base.errors import UserError

CONF = Path(__file__).resolve().parents[1] / "conf" / "tracker"


class FakeRun:
    """A W&B run with the real one's rule: what is logged before the current step is dropped."""

    def __init__(self, server: FakeWandb, options: dict[str, Any]) -> None:
        self.server = server
        self.options = options
        resumed = options["resume"] and options["id"] in server.history
        self.step = server.history[options["id"]][-1][0] + 1 if resumed else 0
        self.exit_code: int | None = None
        self.summary: dict[str, Any] = {}

    def define_metric(self, name: str, step_metric: str, summary: str) -> None:
        assert (name, step_metric, summary) == ("*", "step", "none")

    def log(self, values: dict[str, Any], step: int) -> None:
        assert self.exit_code is None, "logged into a finished run"
        if self.server.broken:
            raise ConnectionError("no route to host")
        if step < self.step:
            self.server.dropped += 1
            return
        self.step = step + 1
        self.server.history.setdefault(self.options["id"], []).append((step, values))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


class FakeWandb:
    def __init__(self) -> None:
        self.runs: list[FakeRun] = []
        self.history: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        self.dropped = 0
        self.broken = False
        self.Settings = SimpleNamespace

    def init(self, **options: Any) -> FakeRun:
        assert all(run.exit_code is not None for run in self.runs), "two runs open at once"
        self.runs.append(FakeRun(self, options))
        return self.runs[-1]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    return fake


def make_tracker(mode: str = "offline") -> WandbTracker:
    return WandbTracker(project="p", mode=mode, entity=None)


@pytest.mark.parametrize(("name", "kind"), [("wandb", WandbTracker), ("none", NullTracker)])
def test_yaml_builds_the_tracker(name: str, kind: type) -> None:
    tracker = instantiate(OmegaConf.load(CONF / f"{name}.yaml"))
    assert isinstance(tracker, kind)
    if isinstance(tracker, WandbTracker):
        assert tracker.mode == "offline"


def test_unknown_mode_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(UserError, match=r"tracker\.mode is 'ofline'; allowed: offline, online"):
        make_tracker("ofline")


def test_jobs_of_one_process_get_a_run_each_finished_also_when_failing(
    wandb: FakeWandb, tmp_path: Path
) -> None:
    tracker = make_tracker()

    def job(number: int, divisor: float) -> None:
        folder = tmp_path / "train" / f"job-{number}"
        with tracked(tracker, folder, config={"a": number}, rank=0):
            tracker.log({"tau": 1.0}, step=0)
            tracker.summarise({"tau": 1.0 / divisor})

    with pytest.raises(ZeroDivisionError):
        job(1, 0.0)
    job(2, 0.4)
    tracker.log({"tau": 9.0}, step=1)  # after the end: goes nowhere
    assert [run.exit_code for run in wandb.runs] == [1, 0]
    assert [run.options["config"] for run in wandb.runs] == [{"a": 1}, {"a": 2}]
    assert {name: len(rows) for name, rows in wandb.history.items()} == {
        "train-job-1": 1,
        "train-job-2": 1,
    }
    assert wandb.runs[1].summary == {"tau": 2.5}


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_resumed_steps_continue_and_none_is_dropped(
    wandb: FakeWandb, tmp_path: Path, mode: str
) -> None:
    # Steps 0..4 were logged when the job died; its checkpoint is of step 2.
    for steps in (range(5), range(3, 8)):
        tracker = make_tracker(mode)
        with tracked(tracker, tmp_path / "train" / "r", config={}, rank=0):
            for step in steps:
                tracker.log({"loss": float(step)}, step=step)
    assert wandb.dropped == 0
    assert {run.options["id"] for run in wandb.runs} == {"train-r"}
    calls = [call for call, _ in wandb.history["train-r"]]
    assert calls == sorted(set(calls))
    assert [values["step"] for _, values in wandb.history["train-r"]] == [
        0,
        1,
        2,
        3,
        4,
        3,
        4,
        5,
        6,
        7,
    ]


def test_errors_of_the_library_are_one_warning_and_stop_nothing(
    wandb: FakeWandb, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = make_tracker()
    wandb.broken = True
    with (
        caplog.at_level(logging.WARNING),
        tracked(tracker, tmp_path / "train" / "r", config={}, rank=0),
    ):
        for step in range(3):
            tracker.log({"tau": 1.0}, step=step)
        tracker.summarise({"tau": 1.0})
    assert len(caplog.records) == 1
    assert "no route to host" in caplog.text
    assert wandb.runs[0].exit_code == 1


def test_a_run_is_named_by_its_stage_in_the_group_of_its_run_id(
    wandb: FakeWandb, tmp_path: Path
) -> None:
    for stage in ("sweep", "train"):
        tracker = make_tracker()
        with tracked(tracker, tmp_path / stage / "k2", config={}, rank=0):
            tracker.summarise({"x": 1.0})
    found = [
        [run.options[key] for key in ("id", "name", "group", "job_type")] for run in wandb.runs
    ]
    assert found == [[f"{stage}-k2", f"{stage}-k2", "k2", stage] for stage in ("sweep", "train")]


def test_metrics_are_named_by_identifiers_that_stay_different(
    wandb: FakeWandb, tmp_path: Path
) -> None:
    tracker = make_tracker()
    with tracked(tracker, tmp_path / "sweep" / "r", config={}, rank=0):
        tracker.log({"macro tau/a-b": 1.0}, step=0)
        tracker.summarise({"tau/libraspec-exact": 1.0, "tau/tree7, B = 8": 2.0, "tau/a b": 3.0})
        tracker.summarise({"tau/a-b": 1.0, "tau/a_b": 2.0})
    (run,) = wandb.runs
    names = {"tau/libraspec_exact", "tau/tree7_B_8", "tau/a_b", "tau/a_b_"}
    assert set(run.summary) == names
    assert (run.summary["tau/a_b"], run.summary["tau/a_b_"]) == (1.0, 2.0)
    assert list(wandb.history["sweep-r"][0][1]) == ["macro_tau/a_b", "step"]


def test_a_job_that_has_nothing_new_to_tell_opens_no_run(wandb: FakeWandb, tmp_path: Path) -> None:
    for values in ({"tau": 2.0}, {"tau": 2.0}, {"tau": 2.5}):
        tracker = make_tracker()
        with tracked(tracker, tmp_path / "sweep" / "r", config={}, rank=0):
            tracker.summarise(values)
    with tracked(make_tracker(), tmp_path / "sweep" / "idle", config={}, rank=0):
        pass
    assert [run.summary for run in wandb.runs] == [{"tau": 2.0}, {"tau": 2.5}]


def test_only_rank_0_opens_a_run(wandb: FakeWandb, tmp_path: Path) -> None:
    tracker = make_tracker()
    with tracked(tracker, tmp_path / "train" / "r", config={}, rank=1):
        tracker.log({"tau": 1.0}, step=0)
        tracker.summarise({"tau": 1.0})
    assert not wandb.runs


def test_real_offline_run_keeps_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("WANDB_MODE", "WANDB_DIR", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    tracker = make_tracker()
    folder = tmp_path / "train" / "job7"
    folder.mkdir(parents=True)
    with tracked(tracker, folder, config={"a": [1]}, rank=0):
        for step in range(3):
            tracker.log({"tau": 1.5}, step=step)
        tracker.summarise({"macro tau": 2.5})
    assert not [r for r in caplog.records if r.name == "blockpilot.app.tracking"]
    (stored,) = (folder / "wandb").glob("offline-run-*-train-job7/*.wandb")
    deadline = time.monotonic() + 10  # the library's own process writes the file
    while stored.read_bytes().count(b"tau") < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert stored.read_bytes().count(b"tau") >= 3
    assert (folder / "wandb" / "next_step").read_text() == "3"
