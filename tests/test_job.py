"""Laws of a stage's surroundings: processes, devices, exits, and multiruns that hide nothing."""

import errno
import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hydra
import numpy as np
import pytest
import torch

from blockpilot.app import job as jobs
from blockpilot.app.config import StageConfig
from blockpilot.app.status import Status, read_status, write_status
from blockpilot.base.errors import IncompleteError, UserError
from blockpilot.base.launch import RUN_ID, World, run_id, world
from blockpilot.base.paths import conf_dir

STAGE = """
defaults:
  - stage/target
  - _self_
decoding: {max_new_tokens: 8}
paths: {outputs: out}
device: cpu
"""

Call = Callable[..., tuple[int, str]]


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Call]:
    """Run a stage with a task and command-line arguments: its exit status and stderr."""
    (tmp_path / "stage.yaml").write_text(STAGE)
    for group in ("model", "stage"):
        (tmp_path / group).symlink_to(conf_dir() / group)
    monkeypatch.setattr(jobs, "conf_dir", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    handlers = logging.getLogger().handlers[:]

    def run(task: Callable[[StageConfig], None], *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["stage", *arguments])
        with pytest.raises(SystemExit) as left:
            jobs.stage("stage", StageConfig)(task)()
        assert RUN_ID not in os.environ
        return int(left.value.code or 0), capsys.readouterr().err

    yield run
    logging.getLogger().handlers[:] = handlers


def nothing(cfg: StageConfig) -> None:
    """Do no work."""


def status(folder: Path) -> dict[str, str]:
    facts: dict[str, str] = json.loads((folder / "status.json").read_text())
    return facts


def test_a_stage_gets_its_checked_configuration_and_exits_with_0(
    call: Call, tmp_path: Path
) -> None:
    seen = []
    code, told = call(lambda cfg: seen.append(cfg), "seed=7", "run_id=mine", "+model=qwen3-4b")
    assert (code, told) == (0, "")
    assert (seen[0].seed, seen[0].run_id, seen[0].model.name) == (7, "mine", "qwen3-4b")
    assert status(tmp_path / "out/stage/mine")["status"] == "done"


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("+model=nope", "Could not find 'model/nope'; Available options in 'model': gpt-oss-20b, "),
        ("model=qwen3-4b", "To append to your default list use +model=qwen3-4b"),
        ("modle=x", "unknown key modle (did you mean model?); keys: attention, decoding, device"),
        ("+modle=x", "unknown key modle (did you mean model?); keys: attention, decoding, device"),
        (
            "decoding.topk=1",
            "unknown key decoding.topk (did you mean top_k or top_p?); keys of",
        ),
        ("decoding.temperature=-1", "decoding.temperature=-1.0: must be a number >= 0"),
        ("paths.outputs=[a", "cannot read 'paths.outputs=[a': write key=value"),
        ("--config-name=nope", "Cannot find primary config 'nope'"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_no_work(
    call: Call, argument: str, told: str
) -> None:
    def never(cfg: StageConfig) -> None:
        pytest.fail("the stage began to work")

    code, line = call(never, argument)
    assert code == 2
    assert line.startswith("blockpilot.stage: error: ")
    assert told in line
    assert line.count("\n") == 1


def test_a_user_error_is_one_line_and_a_defect_keeps_its_trace(call: Call, tmp_path: Path) -> None:
    def missing(cfg: StageConfig) -> None:
        raise UserError("no such file: prompts.jsonl")

    def partly(cfg: StageConfig) -> None:
        raise IncompleteError("1 of 3 prompts failed")

    def broken(cfg: StageConfig) -> None:
        raise RuntimeError("a defect")

    assert call(missing) == (2, "blockpilot.stage: error: no such file: prompts.jsonl\n")
    assert call(partly) == (1, "blockpilot.stage: error: 1 of 3 prompts failed\n")
    code, told = call(broken, "run_id=broken")
    assert code == 1
    assert "in broken" in told
    assert "RuntimeError: a defect" in told
    assert status(tmp_path / "out/stage/broken")["status"] == "failed"
    assert "in broken" in (tmp_path / "out/stage/broken/error.txt").read_text()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_full_or_read_only_disk_is_one_line(call: Call, number: int) -> None:
    def write(cfg: StageConfig) -> None:
        raise OSError(number, os.strerror(number), "rows.parquet")

    code, told = call(write)
    assert code == 2
    assert told.startswith(f"blockpilot.stage: error: {os.strerror(number)}: rows.parquet;")
    assert told.count("\n") == 1


def test_outputs_that_cannot_be_made_are_one_line(call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, told = call(nothing, "paths.outputs=file/x")
    assert code == 2
    assert "Not a directory" in told
    assert told.count("\n") == 1


def test_an_error_in_a_components_constructor_is_told_as_its_own(call: Call) -> None:
    def build(target: str, **arguments: object) -> Callable[[StageConfig], None]:
        node = {"_target_": f"{__name__}.{target}", **arguments}
        return lambda cfg: hydra.utils.instantiate(node)

    assert call(build("Refusing"))[1].endswith("error: drafter: no mask_token_id\n")
    code, told = call(build("Refusing", chekpoint=1))
    assert code == 2
    assert "unexpected keyword argument 'chekpoint'" in told
    assert told.count("\n") == 1


class Refusing:
    """A component whose checkpoint is broken."""

    def __init__(self) -> None:
        raise UserError("drafter: no mask_token_id")


def test_a_failing_job_hides_no_other(call: Call, tmp_path: Path) -> None:
    def task(cfg: StageConfig) -> None:
        if cfg.seed == 1:
            raise RuntimeError("first defect")
        if cfg.seed == 2:
            raise UserError("second mistake")

    code, told = call(task, "--multirun", "seed=0,1,2,-3,4", "run_id=m")
    assert code == 1
    ended = [status(tmp_path / f"out/stage/m-{number}") for number in range(5)]
    assert [facts["status"] for facts in ended] == ["done", "failed", "failed", "failed", "done"]
    assert "first defect" in ended[1]["error"]
    assert ended[2]["error"] == "second mistake"
    assert "seed=-3" in ended[3]["error"]
    assert "in task" in (tmp_path / "out/stage/m-1/error.txt").read_text()
    assert not (tmp_path / "out/stage/m-0/error.txt").exists()
    summary = told.splitlines()[-6:]
    assert summary[0] == "blockpilot.stage: 5 jobs: 2 done, 3 failed, 0 missing"
    assert summary[1] == "  done     0 (seed=0 run_id=m)"
    assert summary[3] == "  failed   1 (seed=1 run_id=m): RuntimeError: first defect"
    assert summary[4] == "  failed   2 (seed=2 run_id=m): second mistake"
    assert summary[5].startswith("  failed   3 (seed=-3 run_id=m): seed=-3: must be")


def test_an_interrupt_ends_a_multirun_and_names_what_is_missing(call: Call, tmp_path: Path) -> None:
    def task(cfg: StageConfig) -> None:
        if cfg.seed == 1:
            raise KeyboardInterrupt

    call(nothing, "-m", "seed=0,1,2", "run_id=m")  # what it leaves is not this launch's
    code, told = call(task, "-m", "seed=0,1,2", "run_id=m")
    assert code == 130
    assert told.splitlines()[-2:] == [
        "  missing  1 (seed=1 run_id=m)",
        "  missing  2 (seed=2 run_id=m)",
    ]
    assert status(tmp_path / "out/stage/m-1")["status"] == "interrupted"


def test_a_job_that_is_run_again_leaves_no_old_trace(call: Call, tmp_path: Path) -> None:
    def broken(cfg: StageConfig) -> None:
        raise RuntimeError("a defect")

    call(broken, "run_id=again")
    assert call(nothing, "run_id=again")[0] == 0
    assert status(tmp_path / "out/stage/again")["status"] == "done"
    assert not (tmp_path / "out/stage/again/error.txt").exists()


@pytest.mark.parametrize("text", ["", "[1]", '{"status": "done", "made_by": 5}', '{"status": '])
def test_a_damaged_status_is_no_status(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    assert read_status(tmp_path / "status.json") is None
    write_status(tmp_path, "done", ["seed=1"])
    made = Status("done", None, overrides=["seed=1"], made_by=["seed=1"])
    assert read_status(tmp_path / "status.json") == made


def test_every_job_of_a_multirun_starts_alike_under_its_own_run_id(call: Call) -> None:
    threads = torch.get_num_threads()
    seen: dict[str, tuple[float, ...]] = {}

    def task(cfg: StageConfig) -> None:
        draws = (random.random(), float(np.random.rand()), float(torch.rand(())))
        seen[cfg.run_id] = (*draws, cfg.threads or 0, torch.get_num_threads())

    call(task, "--multirun", "seed=5,5", "threads=3,null", "run_id=m")
    assert list(seen) == ["m-0", "m-1", "m-2", "m-3"]
    assert len({draws[:3] for draws in seen.values()}) == 1
    assert [draws[4] for draws in seen.values()] == [3, threads, 3, threads]
    assert torch.get_num_threads() == threads


def test_a_run_id_is_new_each_time_or_the_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_id() != run_id()
    monkeypatch.setenv(RUN_ID, "given")
    assert run_id() == "given"


@pytest.mark.parametrize("given", ["007", "12e4567", "true"])
def test_a_run_id_is_taken_as_typed(call: Call, tmp_path: Path, given: str) -> None:
    seen: list[str] = []
    assert call(lambda cfg: seen.append(cfg.run_id), f"run_id={given}")[0] == 0
    assert call(lambda cfg: seen.append(cfg.run_id), "-m", f"run_id=a,{given}")[0] == 0
    assert seen == [given, "a-0", f"{given}-1"]
    folders = {file.parent.name for file in (tmp_path / "out/stage").glob("*/status.json")}
    assert folders == set(seen)


def test_processes_of_one_launch_agree_on_a_run_id(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(
        "from blockpilot.base.launch import run_id, world\n"
        "print(f'{world().rank}/{world().size} {run_id()}\\n', end='', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)],
        env={**os.environ, "PYTHONPATH": str(Path(jobs.__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    ranks, ids = zip(*(line.split() for line in sorted(done.stdout.splitlines())), strict=True)
    assert ranks == ("0/2", "1/2")
    assert ids[0] == ids[1]


def test_processes_without_a_common_run_id_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert world() == World(rank=1, size=2, local_rank=1)
    with pytest.raises(UserError, match="set BLOCKPILOT_RUN_ID or start with torchrun"):
        run_id()


@pytest.mark.parametrize(
    "env", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "2"}, {"WORLD_SIZE": "two"}]
)
def test_contradicting_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str]
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="WORLD_SIZE="):
        world()
