"""Multiruns whose jobs run in other processes tell the same as those of Hydra's own launcher."""

import json
from pathlib import Path

import pytest
from stages_kit import command, executed

JOBS = ["-m", "plan=true", "seed=0,-1", "run_id=m"]
SUMMARY = """blockpilot.pipeline: 2 jobs: 1 done, 1 failed, 0 missing
  done     0 (plan=True seed=0 run_id=m)
  failed   1 (plan=True seed=-1 run_id=m): seed=-1: must be a whole number"""


@pytest.mark.parametrize(
    "launcher",
    [["joblib", "hydra.launcher.n_jobs=2"], ["submitit_local"]],
    ids=lambda each: each[0],
)
def test_jobs_of_another_launcher_are_told_with_their_errors(
    launcher: list[str], tmp_path: Path
) -> None:
    arguments = [*JOBS, "hydra/launcher=" + launcher[0], *launcher[1:]]
    code, _, told = executed(command("pipeline", *arguments), tmp_path)
    assert code == 1
    assert SUMMARY in told
    places = [tmp_path / f"outputs/pipeline/m-{number}" for number in range(2)]
    ended = [json.loads((place / "status.json").read_text())["status"] for place in places]
    assert ended == ["done", "failed"]
    assert [(place / "error.txt").exists() for place in places] == [False, True]
