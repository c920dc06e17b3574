"""The pipeline: commands in order, resumed after a kill, and every experiment in debug size."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from stages_kit import (
    TINY,
    command,
    composed,
    environment,
    performed,
    sweep_arguments,
    write_prompts,
)
from test_learning import SMALL, arguments

from blockpilot import pipeline, train
from blockpilot.app.config import TrainConfig
from blockpilot.base.errors import IncompleteError, UserError
from blockpilot.base.paths import conf_dir
from blockpilot.pipeline import Step
from blockpilot.prompts.base import Prompt
from blockpilot.prompts.composed import ComposedSet
from blockpilot.prompts.docstrings import DocstringSet
from blockpilot.sweep import __main__ as sweep

HEAD = re.compile(r"-m blockpilot\.pipeline experiment=([\w-]+)$", re.MULTILINE)
EXPERIMENTS = [
    file.stem
    for file in sorted((conf_dir() / "experiment").glob("*.yaml"))
    if HEAD.search(file.read_text())
]


def listed(*words: str) -> str:
    """A list of overrides as Hydra reads it on a command line."""
    return json.dumps(words)


def stepped(*steps: tuple[str, Sequence[str]]) -> str:
    """The override `steps=` of stages with their overrides."""
    return f"steps=[{','.join(f'{{{stage}:{listed(*words)}}}' for stage, words in steps)}]"


def given(folder: Path, *more: str) -> list[str]:
    """A pipeline of four tiny steps."""
    outputs = f"{folder}/{{}}/run"
    sweep = [option for option in arguments(folder) if not option.startswith("paths.outputs")]
    steps = stepped(
        ("sweep", sweep),
        ("dataset", ["run_id=run", f"runs=[{outputs.format('sweep')}]"]),
        ("train", ["run_id=run", f"dataset={outputs.format('dataset')}", *SMALL]),
        ("report", ["run_id=run", f"runs=[{outputs.format('sweep')}]"]),
    )
    return [f"paths.outputs={folder}", "run_id=pipe", steps, *more]


def test_steps_run_once_in_their_order_and_leave_their_state(tmp_path: Path) -> None:
    done = performed(pipeline.run, "pipeline", *given(tmp_path))
    assert [step.stage for step in done] == ["sweep", "dataset", "train", "report"]
    assert all(step.seconds is not None for step in done)
    stored = json.loads((tmp_path / "pipeline/pipe/steps.json").read_text())
    assert stored == [asdict(step) for step in done]
    status = json.loads((tmp_path / "sweep/run/status.json").read_text())
    assert (status["status"], status["error"]) == ("done", None)
    assert "mode=replay" in status["overrides"]
    assert (tmp_path / "report/run/report.html").exists()


def test_steps_of_another_form_are_refused_with_their_file(tmp_path: Path) -> None:
    file = tmp_path / "pipeline/pipe/steps.json"
    file.parent.mkdir(parents=True)
    file.write_text('[{"command": "sweep run_id=run", "seconds": 1.0}]')
    with pytest.raises(UserError, match=r"steps\.json: no list of steps .*; delete it") as caught:
        performed(pipeline.run, "pipeline", *given(tmp_path))
    assert "\n" not in str(caught.value)


def test_what_is_done_is_not_repeated_and_a_changed_step_is_with_all_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    real = pipeline._perform

    def watched(step: Step, cfg: Any) -> None:
        ran.append(step.stage)
        if ran == ["sweep", "dataset", "train"]:
            raise KeyboardInterrupt
        real(step, cfg)

    monkeypatch.setattr(pipeline, "_perform", watched)
    with pytest.raises(KeyboardInterrupt):
        performed(pipeline.run, "pipeline", *given(tmp_path))
    performed(pipeline.run, "pipeline", *given(tmp_path))
    assert ran == ["sweep", "dataset", "train", "train", "report"]
    ran.clear()
    performed(pipeline.run, "pipeline", *given(tmp_path, 'extra.dataset=["label=soft"]'))
    assert ran == ["dataset", "train", "report"]


def test_a_step_that_fails_is_told_with_its_command_and_keeps_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(cfg: TrainConfig) -> None:
        raise UserError("no luck today")

    monkeypatch.setattr(train, "run", broken)
    with pytest.raises(UserError, match=r"^step 3 of 4: train run_id=run .*: no luck today$"):
        performed(pipeline.run, "pipeline", *given(tmp_path))
    assert len(json.loads((tmp_path / "pipeline/pipe/steps.json").read_text())) == 2
    status = json.loads((tmp_path / "train/run/status.json").read_text())
    assert (status["status"], status["error"]) == ("failed", "no luck today")


def test_what_replays_shares_its_work_and_what_is_timed_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone: list[str] = []
    monkeypatch.setattr(pipeline, "_perform", lambda step, cfg: alone.append(step.stage))
    performed(pipeline.run, "pipeline", *given(tmp_path, "processes=2"))
    assert alone == ["dataset", "train", "report"]
    rows = pd.read_parquet(tmp_path / "sweep/run/records.parquet")
    assert set(rows["rank"]) == {0, 1}
    assert set(rows["world_size"]) == {2}
    lookup = "drafter._target_=blockpilot.drafters.prompt_lookup.PromptLookupDrafter"
    for number, option in enumerate(("mode=decode", lookup)):  # lookup cannot be replayed
        alone.clear()
        timed = [*given(tmp_path, "processes=2"), f"extra.sweep={listed(option)}"]
        performed(pipeline.run, "pipeline", *timed, f"run_id=timed{number}")
        assert alone == ["sweep", "dataset", "train", "report"]


def test_processes_that_fail_are_told_with_their_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(IncompleteError, match=r"^step 1 of 4: sweep .*: its processes ended with "):
        performed(pipeline.run, "pipeline", *given(tmp_path, "processes=2"))


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ("[dance]", "steps: dance: must be one stage with .*; stages: distill, cost, sweep"),
        ("[{dance:[]}]", r"steps: {'dance': \[\]}: must be one stage"),
        ("[{sweep:[],train:[]}]", "must be one stage"),
        ("[{sweep:[7]}]", "steps: 7 is no override"),
        ("[{sweep:[[run_id=x],[[radius=-1]]]}]", "sweep run_id=x radius=-1 .*: radius=-1: must be"),
        ("[{sweep:[run_id=x,raduis=1]}]", "sweep run_id=x raduis=1 .*raduis"),
        ('[{sweep:[run_id=x,"prompts=[a"]}]', r"sweep run_id=x 'prompts=\[a' .*cannot read"),
    ],
)
def test_mistakes_are_told_before_the_first_step(tmp_path: Path, steps: str, error: str) -> None:
    steps = re.sub(r"(\w+=[\w-]+)", r'"\1"', steps)
    with pytest.raises(UserError, match=error) as caught:
        performed(
            pipeline.run, "pipeline", "run_id=p", f"paths.outputs={tmp_path}", f"steps={steps}"
        )
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_further_options_need_a_step_of_their_stage(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="extra: no step runs the stage evaluate"):
        performed(pipeline.run, "pipeline", *given(tmp_path, 'extra.evaluate=["seed=1"]'))


def test_a_plan_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_prompts(tmp_path / "p.jsonl", ["a"])
    steps = stepped(("sweep", sweep_arguments(tmp_path, file)))
    performed(pipeline.run, "pipeline", "run_id=p", steps, "plan=true")
    told = capsys.readouterr().out
    assert "prompts=local" in told
    assert "target forwards, at most" in told, "the sweep's own plan"
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


def test_a_killed_pipeline_continues(tmp_path: Path) -> None:
    """SIGKILL inside a step after the first; what was measured before is not measured again."""
    process = subprocess.Popen(
        command("pipeline", *given(tmp_path)),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    state, deadline = tmp_path / "pipeline/pipe/steps.json", time.monotonic() + 120
    while not state.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert state.exists(), "the first step never ended"
    records = tmp_path / "sweep/run/records.parquet"
    before = records.stat().st_mtime_ns
    done = performed(pipeline.run, "pipeline", *given(tmp_path))
    assert len(done) == 4
    assert records.stat().st_mtime_ns == before
    assert (tmp_path / "train/run/predictor/config.json").exists()


# --- the experiments -----------------------------------------------------------------------------

ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "say {n}", "answer": "#### 1"},
    "gsm8k-train": {"question": "tell {n}", "answer": "#### 1"},
    "math500": {"problem": "say {n}", "unique_id": "test/{n}.json"},
    "aime24": {"id": "{n}", "problem": "say {n}"},
    "mbpp": {"task_id": "{n}", "prompt": "say {n}", "test_list": ["t"]},
    "swe-bench": {"instance_id": "a-{n}", "problem_statement": "say {n}"},
    "mt-bench": {"question_id": "{n}", "category": "c", "turns": ["say {n}", "and {n}"]},
    "sharegpt": {"id": "{n}", "conversations": [{"from": "human", "value": "write {n}"}]},
    "wsc": {"idx": "{n}", "text": "T {n}", "span2_text": "a", "span1_text": "b"},
    "copa": {
        "idx": "{n}",
        "premise": "P {n}",
        "choice1": "a",
        "choice2": "b",
        "question": "cause",
    },
    "humaneval": {"task_id": "HumanEval/{n}", "prompt": "def f{n}():"},
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Outputs of all experiments, so that each finds the sweeps which another one made, beside a
    folder with 150 rows of every published set."""
    folder = tmp_path_factory.mktemp("experiments")
    (folder / "sets").mkdir()
    for name, row in ROWS.items():
        lines = [json.dumps(row).replace("{n}", str(n)) for n in range(150)]
        (folder / "sets" / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


_LOADS = {kind: kind.load for kind in (DocstringSet, ComposedSet)}
_FEW: dict[str, list[Prompt]] = {}


def few(prompt_set: Any, path: Path | None = None) -> list[Prompt]:
    """Instead of a set's `load`: 150 of its short prompts, read once."""
    if prompt_set.name not in _FEW:
        loaded = _LOADS[type(prompt_set)](prompt_set, path)
        _FEW[prompt_set.name] = [p for p in loaded if len(p.turns[0]) < 150][:150]
    return _FEW[prompt_set.name]


# One seed: it draws the random target too.
SAMPLED = "ablation_k records=local-t1 records.seeds=[0]"


# Between them they run every stage in every way; the overrides of the others are composed.
RUN = ("local_pilot", "local_quick", "reference", "table1", SAMPLED)


@pytest.mark.parametrize("choice", [each for each in EXPERIMENTS if each not in RUN])
def test_every_other_experiment_composes_with_all_its_steps(choice: str) -> None:
    steps = pipeline.all_steps(composed("pipeline", f"experiment={choice}"))
    assert [pipeline.checked(step) for step in steps]
    assert steps[-1].stage == "report"


@pytest.mark.parametrize("choice", RUN)
def test_an_experiment_runs_in_debug_size(
    choice: str, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKPILOT_PROMPTS", str(shared / "sets"))
    # Tables of tables: seconds each.
    monkeypatch.setattr(sweep, "show", lambda records: pd.DataFrame())
    for kind in _LOADS:
        monkeypatch.setattr(kind, "load", few)
    pair = [*TINY, "model.architecture.max_position_embeddings=512", "drafter.checkpoint=random"]
    pair += [
        "tracker=none",
        "model.drafters.eagle3=random",
        "dtype=float32",
        f"decoding.max_new_tokens={20 if choice == 'local_pilot' else 5}",  # more than a block
    ]
    grid = (
        ["sizes=[1,6,16]"] if choice == "local_pilot" else ["sizes=[1,4,19]", "trees=[2,8,16,64]"]
    )
    extra = {
        "sweep": [*pair, "prompts.limit=2", "replay.batch_size=8"],
        "cost": [*pair, "repeats=1", "contexts=[16]", *grid],
        "train": ["tracker=none", "device=cpu", "epochs=1", "predictor.hidden=4"],
        "evaluate": ["tracker=none"],
        "dataset": [],
    }
    experiment = [f"paths.outputs={shared}", *f"experiment={choice}".split()]
    used = {step.stage for step in pipeline.all_steps(composed("pipeline", *experiment))}
    options = [f"extra.{stage}={listed(*extra[stage])}" for stage in used & set(extra)]
    done = performed(pipeline.run, "pipeline", *experiment, *options)
    assert done[-1].stage == "report"
    run_id = done[-1].overrides[0].removeprefix("run_id=")
    assert "<table" in (shared / "report" / run_id / "report.html").read_text()


@pytest.mark.parametrize(
    ("choice", "sweeps"),
    [
        ("local", ["local-policy", "local-validation", "local-test"]),
        (
            "qwen3-t1 records.model=qwen3-8b records.seeds=[0,2]",
            [
                f"qwen3-8b-t1-{split}-{seed}"
                for seed in (0, 2)
                for split in ("policy", "validation", "test")
            ],
        ),
    ],
)
def test_records_are_a_sweep_per_split_and_seed(choice: str, sweeps: list[str]) -> None:
    cfg = composed("pipeline", "experiment=ablation_k", *f"records={choice}".split())
    steps = pipeline.all_steps(cfg)
    run_ids = [step.overrides[0] for step in steps if step.stage == "sweep"]
    assert run_ids == [f"run_id={run_id}" for run_id in sweeps]
    folders = ",".join(f"outputs/sweep/{run_id}" for run_id in sweeps)
    assert cfg.records.runs == folders
    (first, *_) = [step for step in steps if step.stage == "dataset"]
    assert f"runs=[{folders}]" in first.overrides
