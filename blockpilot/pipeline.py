"""Stage `pipeline`: steps of other stages, one after the other, resumed at the first unfinished.

    python -m blockpilot.pipeline experiment=local_quick
    python -m blockpilot.pipeline experiment=table1 records=local 'extra.sweep=["prompts.limit=4"]'

A step is a stage with the list of its overrides, as after `python -m blockpilot.<stage>`. Steps run
in this process; with `processes=4` those whose stage says so share their work among four, as under
torchrun, and what is timed still has one. <paths.outputs>/pipeline/<run id>/steps.json says which
are done; a step that was interrupted continues as its own stage does, and one whose overrides
changed runs again with all after it.
"""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast, get_type_hints

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from blockpilot.app.config import (
    JobConfig,
    PipelineConfig,
    PipelineRecords,
    as_typed,
    sweep_ids,
    typed,
)
from blockpilot.app.explain import explain
from blockpilot.app.help import stage_module
from blockpilot.app.job import perform, run_job, stage
from blockpilot.base.errors import IncompleteError, UserError
from blockpilot.base.files import make_folder, replace_file
from blockpilot.base.json_values import first_line, fitted
from blockpilot.base.paths import conf_dir

log = logging.getLogger("blockpilot.pipeline")  # __name__ is __main__ under python -m

STAGES = ("distill", "cost", "sweep", "dataset", "train", "evaluate", "report")


@dataclass(frozen=True)
class Step:
    """A stage, its overrides and, once it is done, the seconds that it took."""

    stage: str
    overrides: list[str]
    seconds: float | None = None

    @property
    def command(self) -> str:
        """What a person would type after `python -m blockpilot.`."""
        return shlex.join([self.stage, *self.overrides])


def run(cfg: PipelineConfig) -> list[Step]:
    """Perform the steps that are not done yet; all steps with their seconds.

    With `plan` the steps are listed, and for stages that know it what each will take; nothing is
    done. Raises UserError for a step that is none, before the first one runs, and what a step
    raises, with its command in front.
    """
    folder = Path(cfg.paths.outputs) / "pipeline" / cfg.run_id
    steps = all_steps(cfg)
    composed = [checked(step) for step in steps]  # every mistake in an override shows here
    if cfg.plan:
        _show(steps)
        for number, (step, config) in enumerate(zip(steps, composed, strict=True), start=1):
            if "plan" in config:
                log.info("step %d: %s", number, step.command)
                _module(step).run(checked(replace(step, overrides=[*step.overrides, "plan=true"])))
        return steps
    make_folder(folder)
    file = folder / "steps.json"
    done = _done(file, steps)
    for number in range(len(done), len(steps)):
        step, config = steps[number], composed[number]
        label = f"step {number + 1} of {len(steps)}: {step.command}"
        log.info(label)
        begin = time.monotonic()
        try:
            if cfg.processes > 1 and _shareable(step, config):
                _share(step, cfg.processes)
            else:
                _perform(step, config)
        except (UserError, IncompleteError) as error:
            raise type(error)(f"{label}: {error}") from error
        done.append(replace(step, seconds=round(time.monotonic() - begin, 1)))
        _store(file, done)
    _show(done)
    return done


def all_steps(cfg: PipelineConfig) -> list[Step]:
    """The steps of the records, then the pipeline's own, with all their overrides in one list.

    Raises UserError for what is no step, and for `extra` of a stage that no step runs.
    """
    own = cast("list[Any]", OmegaConf.to_container(cast("Any", cfg.steps)))
    steps = [_step(cfg, each) for each in (*_record_steps(cfg.records), *own)]
    given = {str(name) for name, overrides in cfg.extra.items() if overrides}
    if unknown := sorted(given - {step.stage for step in steps}):
        raise UserError(f"extra: no step runs the stage {unknown[0]}")
    return steps


def _record_steps(records: PipelineRecords) -> Iterator[Any]:
    """What conf/records asks for, as steps: its first ones, then a sweep per seed and split."""
    plain: Any = OmegaConf.to_container(cast("Any", records))
    yield from plain["steps"]
    run_ids = sweep_ids(records.name, records.sweeps, records.seeds)
    sweeps = itertools.product(records.seeds, plain["sweeps"].values())
    for run_id, (seed, overrides) in zip(run_ids, sweeps, strict=True):
        yield {"sweep": [f"run_id={run_id}", f"seed={seed}", overrides]}


def _step(cfg: PipelineConfig, raw: Any) -> Step:
    """A step of the configuration: one stage with a list of overrides (else UserError)."""
    (name, overrides), *more = raw.items() if isinstance(raw, dict) and raw else [(None, None)]
    if name not in STAGES or not isinstance(overrides, list) or more:
        raise UserError(
            f"steps: {raw}: must be one stage with a list of overrides; stages: {', '.join(STAGES)}"
        )
    shared = [f"paths.outputs={cfg.paths.outputs}", *cfg.extra.get(name, [])]
    return Step(name, [*_flat(overrides), *shared])


def _flat(overrides: Sequence[Any]) -> Iterator[str]:
    """Overrides out of lists in lists; UserError for what is neither a list nor text."""
    for each in overrides:
        if isinstance(each, list):
            yield from _flat(each)
        elif isinstance(each, str):
            yield each
        else:
            raise UserError(f"steps: {each} is no override: must be text as key=value")


def _done(file: Path, steps: Sequence[Step]) -> list[Step]:
    """Leading steps that an earlier run finished, as far as they are still the same."""
    if not file.exists():
        return []
    try:
        stored = [fitted(Step, each) for each in json.loads(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{file}: no list of steps ({first_line(error)}); delete it to begin with the first"
        ) from error
    done: list[Step] = []
    for old, new in zip(stored, steps, strict=False):
        if replace(old, seconds=None) != new:
            break
        done.append(old)
    if done:
        log.info("%d of %d steps are done", len(done), len(steps))
    return done


def _store(file: Path, done: Sequence[Step]) -> None:
    text = json.dumps([asdict(step) for step in done], indent=1) + "\n"
    replace_file(file, lambda stream: stream.write(text.encode()))


def _module(step: Step) -> ModuleType:
    return importlib.import_module(stage_module(step.stage))


def checked(step: Step) -> Any:
    """The checked configuration of a step; UserError that names its command."""
    schema: type[JobConfig] = get_type_hints(_module(step).run)["cfg"]
    running = GlobalHydra.instance().is_initialized()  # under `main`, with the same folder
    finder = (
        nullcontext()
        if running
        else hydra.initialize_config_dir(str(conf_dir()), version_base="1.3")
    )
    try:
        with finder:
            return typed(hydra.compose(step.stage, as_typed(step.overrides)), schema)
    except (UserError, HydraException) as error:
        reason = error if isinstance(error, UserError) else explain(error)
        raise UserError(f"{step.command}: {reason}") from error


def _shareable(step: Step, cfg: Any) -> bool:
    """Whether a step may have several processes: as its stage says, else one."""
    shareable = getattr(_module(step), "shareable", None)
    return shareable is not None and bool(shareable(cfg))


def _share(step: Step, processes: int) -> None:
    """Run a step in processes of their own, which know of each other and keep its status."""
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    ended = subprocess.run([*launcher, "-m", f"blockpilot.{step.stage}", *step.overrides])
    if ended.returncode:
        raise IncompleteError(f"its processes ended with exit status {ended.returncode}")


def _perform(step: Step, cfg: JobConfig) -> None:
    """Run a step as its stage's own `main` would, its status in the folder of its results."""
    folder = Path(cfg.paths.outputs) / step.stage / cfg.run_id
    make_folder(folder)
    run_job(folder, step.overrides, lambda: perform(_module(step).run, cfg))


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
