"""Stage `pipeline`: commands of other stages, one after the other, resumed at the first unfinished.

    python -m blockpilot.pipeline experiment=local_quick
    python -m blockpilot.pipeline experiment=local_table1 'extra.sweep=["prompts.limit=4"]'

A step is what a person would type after `python -m blockpilot.`: a stage and its options. Steps run
in this process; with `processes=4` those that replay or distill share their work among four, as
under torchrun, and what is timed still has one. <paths.outputs>/pipeline/<run id>/steps.json says
which are done; a step that was interrupted continues as its own stage does, and one whose command
changed runs again with all after it.
"""

from __future__ import annotations

import importlib
import json
import logging
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from rich.console import Console
from rich.table import Table
from rich.text import Text

from blockpilot.app.config import JobConfig, PipelineConfig, as_typed, explain, typed
from blockpilot.app.help import stage_module
from blockpilot.app.job import perform, run_job, stage
from blockpilot.base.errors import IncompleteError, UserError
from blockpilot.base.files import make_folder, replace_file
from blockpilot.base.json_values import first_line, fitted
from blockpilot.base.paths import conf_dir
from blockpilot.sweep.estimate import mode_of

log = logging.getLogger("blockpilot.pipeline")  # __name__ is __main__ under python -m

STAGES = ("distill", "cost", "sweep", "dataset", "train", "evaluate", "report")


@dataclass(frozen=True)
class Step:
    """One command and, once it is done, the seconds that it took."""

    command: str
    seconds: float | None = None


def run(cfg: PipelineConfig) -> list[Step]:
    """Perform the steps that are not done yet; all steps with their seconds.

    With `plan` the steps are told, and by the stages that know it what each will take; nothing is
    done. Raises UserError for a step that is no
    command of a stage, before the first one runs, and what a step raises, told with its command.
    """
    folder = Path(cfg.paths.outputs) / "pipeline" / cfg.run_id
    commands = [shlex.split(step) for step in (*cfg.records.steps, *cfg.steps)]
    for words in commands:
        if not words or words[0] not in STAGES:
            raise UserError(f"steps: '{' '.join(words)}' must begin with {', '.join(STAGES)}")
    given = {str(name) for name, options in cfg.extra.items() if options}
    if unknown := sorted(given - {words[0] for words in commands}):
        raise UserError(f"extra: no step runs the stage {unknown[0]}")
    here = f"paths.outputs={cfg.paths.outputs}"
    commands = [[*words, here, *cfg.extra.get(words[0], [])] for words in commands]
    composed = [_composed(words) for words in commands]  # every mistake in an option shows here
    wanted = [Step(shlex.join(words)) for words in commands]
    if cfg.plan:
        _show(wanted)
        for number, words in enumerate(commands, start=1):
            if "plan" in composed[number - 1]:
                log.info("step %d: %s", number, wanted[number - 1].command)
                _module(words[0]).run(_composed([*words, "plan=true"]))
        return wanted
    make_folder(folder)
    file = folder / "steps.json"
    done = _done(file, wanted)
    for number in range(len(done), len(wanted)):
        told = f"step {number + 1} of {len(wanted)}: {wanted[number].command}"
        log.info(told)
        begin = time.monotonic()
        try:
            if cfg.processes > 1 and _shareable(commands[number][0], composed[number]):
                _share(commands[number], cfg.processes)
            else:
                _perform(commands[number], composed[number])
        except (UserError, IncompleteError) as error:
            raise type(error)(f"{told}: {error}") from error
        done.append(Step(wanted[number].command, round(time.monotonic() - begin, 1)))
        _store(file, done)
    _show(done)
    return done


def _done(file: Path, wanted: Sequence[Step]) -> list[Step]:
    """Leading steps that an earlier run finished, as far as their commands are still the same."""
    if not file.exists():
        return []
    try:
        stored = [fitted(Step, each) for each in json.loads(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{file}: no list of steps ({first_line(error)}); delete it to begin with the first"
        ) from error
    done: list[Step] = []
    for old, new in zip(stored, wanted, strict=False):
        if old.command != new.command:
            break
        done.append(old)
    if done:
        log.info("%d of %d steps are done", len(done), len(wanted))
    return done


def _store(file: Path, done: Sequence[Step]) -> None:
    text = json.dumps([asdict(step) for step in done], indent=1) + "\n"
    replace_file(file, lambda stream: stream.write(text.encode()))


def _module(stage_name: str) -> ModuleType:
    return importlib.import_module(stage_module(stage_name))


def _composed(words: Sequence[str]) -> Any:
    """The checked configuration of a command; UserError that names the command."""
    schema: type[JobConfig] = get_type_hints(_module(words[0]).run)["cfg"]
    running = GlobalHydra.instance().is_initialized()  # under `main`, with the same folder
    finder = (
        nullcontext()
        if running
        else hydra.initialize_config_dir(str(conf_dir()), version_base="1.3")
    )
    try:
        with finder:
            return typed(hydra.compose(words[0], as_typed(words[1:])), schema)
    except (UserError, HydraException) as error:
        told = error if isinstance(error, UserError) else explain(error)
        raise UserError(f"{shlex.join(words)}: {told}") from error


def _shareable(stage_name: str, cfg: Any) -> bool:
    """Whether a step may have several processes: beside each other they would spoil its times."""
    return stage_name == "distill" or (stage_name == "sweep" and mode_of(cfg) == "replay")


def _share(words: Sequence[str], processes: int) -> None:
    """Run a command in processes of their own, which know of each other and keep its status."""
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    ended = subprocess.run([*launcher, "-m", f"blockpilot.{words[0]}", *words[1:]])
    if ended.returncode:
        raise IncompleteError(f"its processes ended with exit status {ended.returncode}")


def _perform(words: Sequence[str], cfg: JobConfig) -> None:
    """Run a command as its own `main` would, its status in the folder of its results."""
    folder = Path(cfg.paths.outputs) / words[0] / cfg.run_id
    make_folder(folder)
    run_job(folder, words[1:], lambda: perform(_module(words[0]).run, cfg))


def _show(steps: Sequence[Step]) -> None:
    table = Table("step", "minutes", "python -m blockpilot. ...")
    for number, step in enumerate(steps, start=1):
        minutes = "-" if step.seconds is None else f"{step.seconds / 60:.1f}"
        table.add_row(str(number), minutes, Text(step.command))
    Console().print(table)


@stage("pipeline", PipelineConfig)
def main(cfg: PipelineConfig) -> None:
    """Entry point."""
    run(cfg)


if __name__ == "__main__":
    main()
