"""What surrounds a stage's work: processes, seeds, logging, run ids, and honest exits.

A stage module ends in

    @stage(hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="sweep"),
           SweepConfig)
    def main(cfg: SweepConfig) -> None:
        run(cfg)

`main()` then composes the configuration, checks it, runs every job of a multirun and exits with 0
(done), 1 (a defect, or only part of the work done), 2 (a mistake the user can mend, told in one
line) or 130 (interrupted).
"""

import contextlib
import errno
import functools
import gc
import inspect
import json
import logging
import os
import random
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import filter_overrides
from hydra.errors import HydraException, InstantiationException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.logging import RichHandler

from blockpilot.config import Schema, explain, typed
from blockpilot.errors import UserError

RUN_ID = "BLOCKPILOT_RUN_ID"


class IncompleteError(Exception):
    """Part of the work failed and is on record; told in one line, exit status 1."""


@dataclass(frozen=True)
class World:
    """This process among those of one launch; `local_rank` counts on its own machine."""

    rank: int
    size: int
    local_rank: int


def world() -> World:
    """Read RANK, WORLD_SIZE and LOCAL_RANK, as torchrun sets them; one process without them.

    Raises:
        UserError: the variables are incomplete or contradict each other.
    """
    given = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    told = ", ".join(f"{name}={value}" for name, value in given.items())
    try:
        size = int(given["WORLD_SIZE"] or 1)
        rank = int(given["RANK"] or 0)
        local_rank = int(given["LOCAL_RANK"] or rank)
    except ValueError:
        raise UserError(f"{told}: must be whole numbers") from None
    if not 0 <= rank < size or local_rank < 0 or (size > 1 and given["RANK"] is None):
        raise UserError(f"{told}: must hold 0 <= RANK < WORLD_SIZE; start with torchrun")
    return World(rank, size, local_rank)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@functools.cache
def console() -> Console:
    """Return the terminal that log lines and progress bars share: stderr, so stdout is results."""
    return Console(stderr=True)


def setup_logging() -> None:
    """Send log lines to the terminal: this package's from INFO on, others and other ranks' less."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    root.addHandler(RichHandler(console=console(), show_path=False, log_time_format="[%X]"))
    root.setLevel(logging.WARNING)
    mine = logging.INFO if world().rank == 0 else logging.WARNING
    logging.getLogger("blockpilot").setLevel(mine)


def run_id() -> str:
    """Return the id of this launch, the same in all its processes.

    $BLOCKPILOT_RUN_ID, or time and chance; processes that torchrun started agree on one.

    Raises:
        UserError: there are several processes and no way to agree.
    """
    given = os.environ.get(RUN_ID)
    if given:
        return given
    drawn = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    if world().size == 1:
        return drawn
    if (store := _launch_store()) is None:
        raise UserError(f"several processes need one run id: set {RUN_ID} or start with torchrun")
    # The first to come decides; a restarted rank finds the id of the interrupted run.
    agreed: str = store.compare_set("blockpilot/run_id", "", drawn).decode()
    return agreed


def meet(place: str) -> None:
    """Wait until every process of this launch has come to `place`, a name used once per launch.

    Processes that torchrun did not start have no place to meet and go on.
    """
    if (store := _launch_store()) is None:
        return
    key = f"blockpilot/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{place}"
    if store.add(key, 1) == world().size:
        store.set(f"{key}/all", "here")
    store.wait([f"{key}/all"], timedelta(days=30))


def _launch_store() -> Any:
    """torchrun's own key-value store, which all its processes reach; None without torchrun."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return torch.distributed.TCPStore(  # type: ignore[attr-defined]  # not in its __all__
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=60),
    )


def stage(
    compose: Callable[[Callable[[DictConfig], None]], Callable[[], Any]], schema: type[Schema]
) -> Callable[[Callable[[Schema], None]], Callable[[], None]]:
    """Make the `main` of a stage from its work; see the head of this file.

    Args:
        compose: `hydra.main(...)` with the stage's configuration.
        schema: dataclass that the configuration must fit.
    """

    def decorate(task: Callable[[Schema], None]) -> Callable[[], None]:
        @functools.wraps(task)
        def main() -> None:
            name = f"blockpilot.{Path(inspect.getfile(task)).stem}"
            if os.environ.get("WORLD_SIZE", "1") != "1":
                name += f"[rank {os.environ.get('RANK')}]"
            launch = _Launch(name)

            @functools.wraps(task)
            def job(cfg: DictConfig) -> None:
                _run_job(launch, task, cfg, schema)

            sys.exit(_run_jobs(launch, compose(job)))

        return main

    return decorate


@dataclass(frozen=True)
class _Job:
    """How one job ended: status done, failed or interrupted."""

    number: int | None  # of a multirun, else None
    status: str
    exit_code: int
    told: str | None  # the error in one line


@dataclass
class _Launch:
    """One call of a stage's `main`."""

    name: str
    jobs: list[_Job] = field(default_factory=list)
    planned: list[str] = field(default_factory=list)  # overrides of all jobs of a multirun


def _run_jobs(launch: _Launch, hydra_main: Callable[[], Any]) -> int:
    """Let Hydra run the jobs; return the exit status."""
    show_traces = os.environ.get("HYDRA_FULL_ERROR") == "1"
    try:
        # Hydra raises its errors, where it would print them, when told to show them in full.
        with _environment({RUN_ID: run_id(), "HYDRA_FULL_ERROR": "1"}):
            hydra_main()
        code = max((job.exit_code for job in launch.jobs), default=0)
    except KeyboardInterrupt:
        _say(f"{launch.name}: interrupted")
        code = 130
    except (UserError, HydraException, OmegaConfBaseException, OSError, ValueError) as error:
        if show_traces:
            raise
        _say(f"{launch.name}: error: {obstacle(error) or explain(error)}")
        code = 2
    if launch.planned:
        _summarise(launch)
        code = 1 if code == 2 else code
    return code


def _run_job(
    launch: _Launch, task: Callable[[Schema], None], cfg: DictConfig, schema: type[Schema]
) -> None:
    """Run one job and note how it ended; raises nothing but an interrupt.

    Hydra shows the first error of a multirun and hides the others, so it gets to see none.
    """
    hydra_facts = HydraConfig.get()
    folder = Path(hydra_facts.runtime.output_dir)
    overrides = list(filter_overrides(hydra_facts.overrides.task))
    number, label = None, launch.name
    if hydra_facts.mode == RunMode.MULTIRUN:
        number = int(hydra_facts.job.num)
        label += f": job {number} ({' '.join(overrides)})"
        launch.planned = launch.planned or _planned_jobs()
        cfg.run_id = f"{cfg.run_id}-{number}"
    threads = torch.get_num_threads()
    status, code, told, trace = "done", 0, None, None
    try:
        setup_logging()
        write_status(folder, "running", overrides)
        checked = typed(cfg, schema)
        seed_everything(checked.seed)
        torch.set_num_threads(checked.threads or threads)
        task(checked)
    except KeyboardInterrupt:
        status, code = "interrupted", 130
        raise
    except Exception as error:
        status, told, trace = "failed", obstacle(error), traceback.format_exc()
        code = 1 if told is None or isinstance(error, IncompleteError) else 2
        if told is None:
            told = f"{type(error).__name__}: {error}"
            if number is None:
                _say(trace)
        _say(f"{label}: error: {told}")
    finally:
        launch.jobs.append(_Job(number, status, code, told))
        write_status(folder, status, overrides, told, trace)
        torch.set_num_threads(threads)
        # The model of this job must be gone before the next one loads its own.
        gc.collect()
        torch.cuda.empty_cache()


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


def _planned_jobs() -> list[str]:
    """Overrides of every job of this multirun, in order: Hydra tells a job only its own."""
    sweeper = HydraConfig.get().sweeper
    if not sweeper._target_.endswith(".BasicSweeper"):
        return []
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    given = get_args_parser().parse_args().overrides
    overrides = [f"{key}={value}" for key, value in (sweeper.params or {}).items()] + given
    batches = BasicSweeper.split_arguments(parser.parse_overrides(overrides), None)
    return [" ".join(filter_overrides(job)) for batch in batches for job in batch]


def _summarise(launch: _Launch) -> None:
    """Say which jobs of a multirun are done, failed and missing (interrupted or never begun)."""
    ended = {job.number: job for job in launch.jobs}
    lines: dict[str, list[str]] = {"done": [], "failed": [], "missing": []}
    for number, overrides in enumerate(launch.planned):
        job = ended.get(number)
        status = job.status if job and job.status in lines else "missing"
        error = f": {job.told}" if job and job.told else ""
        lines[status].append(f"  {status:8} {number} ({overrides}){error}")
    counts = ", ".join(f"{len(some)} {status}" for status, some in lines.items())
    _say(f"{launch.name}: {len(launch.planned)} jobs: {counts}")
    for some in lines.values():
        for line in some:
            _say(line)


def write_status(
    folder: Path,
    status: str,
    overrides: list[str],
    error: str | None = None,
    trace: str | None = None,
) -> None:
    """Write how a job stands into its folder: status.json, and error.txt where there is a trace.

    `made_by` are the overrides of the last job that ended well and was no plan: what later calls
    that are refused leave in the folder is its work. Ranks above 0 write files of their own. A
    failure to write is told, not raised: it must not hide the error that is being written down.
    """
    rank = world().rank
    suffix = f".rank{rank}" if rank else ""
    made_by = read_status(folder / f"status{suffix}.json").get("made_by")
    if status == "done" and "plan=true" not in overrides:
        made_by = overrides
    facts = {"status": status, "error": error, "overrides": overrides, "made_by": made_by}
    files = {f"status{suffix}.json": json.dumps(facts, indent=2) + "\n"}
    if trace is not None:
        files[f"error{suffix}.txt"] = trace
    try:
        for name, text in files.items():
            part = folder / f"{name}.part"
            part.write_text(text, encoding="utf-8")
            part.replace(folder / name)
        if trace is None:
            (folder / f"error{suffix}.txt").unlink(missing_ok=True)
    except OSError as problem:
        _say(f"cannot write {problem.filename}: {problem.strerror}")


def read_status(file: Path) -> dict[str, Any]:
    """What `write_status` wrote into a file; nothing where there is none that can be read."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


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
