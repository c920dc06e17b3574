"""One run of a job: a stage's, each of a multirun's, or a step's of a pipeline.

A stage module ends in

    @stage("sweep", SweepConfig)
    def main(cfg: SweepConfig) -> None:
        run(cfg)

    if __name__ == "__main__":
        main()

`main()` composes conf/sweep.yaml, checks it, runs every job of a multirun and exits with 0 (done),
1 (a defect, or only part of the work done), 2 (a mistake the user can mend, told in one line) or
130 (interrupted). Whoever runs a job goes through `run_job`.
"""

import contextlib
import errno
import functools
import gc
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import hydra
import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import filter_overrides
from hydra.errors import HydraException, InstantiationException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from blockpilot.app.config import JobConfig, Schema, as_typed, typed
from blockpilot.app.explain import explain
from blockpilot.app.help import stage_help
from blockpilot.app.multirun import PLANNED, PlannedJob
from blockpilot.app.status import read_status, status_file, write_status
from blockpilot.app.terminal import setup_logging
from blockpilot.base.errors import IncompleteError, UserError
from blockpilot.base.launch import RUN_ID, run_id
from blockpilot.base.paths import conf_dir

Result = TypeVar("Result")


def stage(
    name: str, schema: type[Schema]
) -> Callable[[Callable[[Schema], None]], Callable[[], None]]:
    """Make the `main` of the stage `name` from its work; see the head of this file.

    conf/<name>.yaml is its configuration, `schema` the dataclass that this must fit.
    """

    def decorate(task: Callable[[Schema], None]) -> Callable[[], None]:
        @functools.wraps(task)
        def main() -> None:
            if {"--help", "-h"} & set(sys.argv[1:]):
                print(stage_help(name))
                return
            label = f"blockpilot.{name}"
            if os.environ.get("WORLD_SIZE", "1") != "1":
                label += f"[rank {os.environ.get('RANK')}]"
            codes: list[int] = []  # of the one job of a run, which is always in this process

            @functools.wraps(task)
            def job(cfg: DictConfig) -> None:
                codes.append(_hydra_job(label, task, cfg, schema))

            compose = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=name)
            sys.exit(_run_jobs(label, compose(job), codes))

        return main

    return decorate


def run_job(folder: Path, overrides: Sequence[str], work: Callable[[], Result]) -> Result:
    """Do a job's work and note in its folder how it stands; what it raises is noted and raised.

    Afterwards torch has the threads that it had, and a model that the job loaded is gone: the next
    job of this process loads its own.
    """
    threads = torch.get_num_threads()
    write_status(folder, "running", overrides)
    try:
        result = work()
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        line, trace = (None, None) if interrupted else (message(error), traceback.format_exc())
        status = "interrupted" if interrupted else "failed"
        write_status(folder, status, overrides, line, trace)
        raise
    else:
        write_status(folder, "done", overrides)
        return result
    finally:
        torch.set_num_threads(threads)
        gc.collect()
        torch.cuda.empty_cache()


def perform(run: Callable[[Schema], Result], cfg: Schema) -> Result:
    """A stage's work, seeded and with the threads that its checked configuration asks for."""
    job: JobConfig = cfg
    random.seed(job.seed)
    np.random.seed(job.seed)
    torch.manual_seed(job.seed)
    torch.set_num_threads(job.threads or torch.get_num_threads())
    return run(cfg)


def _run_jobs(label: str, hydra_main: Callable[[], Any], codes: Sequence[int]) -> int:
    """Let Hydra run the jobs; return the exit status."""
    show_traces = os.environ.get("HYDRA_FULL_ERROR") == "1"
    PLANNED.clear()
    sys.argv = [sys.argv[0], *as_typed(sys.argv[1:])]
    code = 0
    try:
        # Hydra raises its errors, where it would print them, when told to show them in full.
        with _environment({RUN_ID: run_id(), "HYDRA_FULL_ERROR": "1"}):
            hydra_main()
    except KeyboardInterrupt:
        _say(f"{label}: interrupted")
        code = 130
    except Exception as error:
        expected = (UserError, HydraException, OmegaConfBaseException, OSError, ValueError)
        # A launcher raises anything when a process of its own is lost; the summary says more.
        if show_traces or not (PLANNED or isinstance(error, expected)):
            raise
        _say(f"{label}: error: {obstacle(error) or explain(error)}")
        code = 2
    if not PLANNED:
        return max([code, *codes])
    done = _summarise(label, PLANNED)
    return 130 if code == 130 else int(code > 0 or not done)


def _hydra_job(
    label: str, task: Callable[[Schema], None], cfg: DictConfig, schema: type[Schema]
) -> int:
    """Run one job that Hydra composed; the exit status that it deserves.

    Hydra shows the first error of a multirun and hides the others, so it gets to see none but an
    interrupt.
    """
    hydra_facts = HydraConfig.get()
    folder = Path(hydra_facts.runtime.output_dir)
    overrides = list(filter_overrides(hydra_facts.overrides.task))
    number = int(hydra_facts.job.num) if hydra_facts.mode == RunMode.MULTIRUN else None
    if number is not None:
        label += f": job {number} ({' '.join(overrides)})"
        if isinstance(cfg.run_id, str):
            cfg.run_id = f"{cfg.run_id}-{number}"

    def work() -> None:
        setup_logging()
        perform(task, typed(cfg, schema))

    try:
        run_job(folder, overrides, work)
    except Exception as error:
        defect = obstacle(error) is None
        if defect and number is None:
            traceback.print_exc()
        _say(f"{label}: error: {message(error)}")
        return 1 if defect or isinstance(error, IncompleteError) else 2
    return 0


def message(error: BaseException) -> str:
    """One line for any error; that of a defect begins with its type."""
    return obstacle(error) or f"{type(error).__name__}: {error}"


def obstacle(error: BaseException) -> str | None:
    """One line for an error that is no defect of the program, else None."""
    cause = error.__cause__
    if isinstance(error, InstantiationException) and cause is not None:
        # Hydra wraps what the constructor of a component raises.
        unknown = isinstance(cause, TypeError) and "unexpected keyword argument" in str(cause)
        return str(cause) if unknown else obstacle(cause)
    if isinstance(error, UserError | IncompleteError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror}: {error.filename or 'results'}; free some space and run again"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{error.strerror}: {error.filename}; change its rights or choose another folder"
    return None


def _summarise(label: str, planned: Sequence[PlannedJob]) -> bool:
    """Say which jobs of a multirun are done, failed and missing (interrupted or never begun).

    Returns whether all are done.
    """
    lines: dict[str, list[str]] = {"done": [], "failed": [], "missing": []}
    for number, job in enumerate(planned):
        file = status_file(job.folder)
        is_new = job.written.get(file.name) != job.before.get(file.name)
        found = read_status(file) if is_new else None
        status = found.status if found is not None and found.status in lines else "missing"
        error = f": {' '.join(found.error.split())}" if found is not None and found.error else ""
        lines[status].append(f"  {status:8} {number} ({job.overrides}){error}")
    counts = ", ".join(f"{len(some)} {status}" for status, some in lines.items())
    _say(f"{label}: {len(planned)} jobs: {counts}")
    for some in lines.values():
        for line in some:
            _say(line)
    return len(lines["done"]) == len(planned)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the duration of a block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
