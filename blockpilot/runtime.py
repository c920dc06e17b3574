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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import filter_overrides
from hydra.errors import HydraException, InstantiationException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.logging import RichHandler

from blockpilot.config import Schema, as_typed, explain, typed
from blockpilot.errors import UserError
from blockpilot.multirun import PLANNED, PlannedJob
from blockpilot.stored import fitted

RUN_ID = "BLOCKPILOT_RUN_ID"
WAIT = timedelta(days=30)
"""For other processes of a launch: their work takes as long as it takes, and who dies ends all."""


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
    store.wait([f"{key}/all"], WAIT)


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
            codes: list[int] = []  # of the one job of a run, which is always in this process

            @functools.wraps(task)
            def job(cfg: DictConfig) -> None:
                codes.append(_run_job(name, task, cfg, schema))

            sys.exit(_run_jobs(name, compose(job), codes))

        return main

    return decorate


def _run_jobs(name: str, hydra_main: Callable[[], Any], codes: Sequence[int]) -> int:
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
        _say(f"{name}: interrupted")
        code = 130
    except Exception as error:
        told = (UserError, HydraException, OmegaConfBaseException, OSError, ValueError)
        # A launcher raises anything when a process of its own is lost; the summary says more.
        if show_traces or not (PLANNED or isinstance(error, told)):
            raise
        _say(f"{name}: error: {obstacle(error) or explain(error)}")
        code = 2
    if not PLANNED:
        return max([code, *codes])
    done = _summarise(name, PLANNED)
    return 130 if code == 130 else int(code > 0 or not done)


def _run_job(
    name: str, task: Callable[[Schema], None], cfg: DictConfig, schema: type[Schema]
) -> int:
    """Run one job, note in its folder how it ended, and return the exit status that it deserves.

    Hydra shows the first error of a multirun and hides the others, so it gets to see none but an
    interrupt.
    """
    hydra_facts = HydraConfig.get()
    folder = Path(hydra_facts.runtime.output_dir)
    overrides = list(filter_overrides(hydra_facts.overrides.task))
    number, label = None, name
    if hydra_facts.mode == RunMode.MULTIRUN:
        number = int(hydra_facts.job.num)
        label += f": job {number} ({' '.join(overrides)})"
    threads = torch.get_num_threads()
    status, code, told, trace = "done", 0, None, None
    try:
        setup_logging()
        write_status(folder, "running", overrides)
        if number is not None and isinstance(cfg.run_id, str):
            cfg.run_id = f"{cfg.run_id}-{number}"
        checked = typed(cfg, schema)
        seed_everything(checked.seed)
        torch.set_num_threads(checked.threads or threads)
        task(checked)
    except KeyboardInterrupt:
        status = "interrupted"
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
        write_status(folder, status, overrides, told, trace)
        torch.set_num_threads(threads)
        # The model of this job must be gone before the next one loads its own.
        gc.collect()
        torch.cuda.empty_cache()
    return code


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


def _summarise(name: str, planned: Sequence[PlannedJob]) -> bool:
    """Say which jobs of a multirun are done, failed and missing (interrupted or never begun).

    Returns whether all are done.
    """
    lines: dict[str, list[str]] = {"done": [], "failed": [], "missing": []}
    for number, job in enumerate(planned):
        file = job.folder / _status_file()
        ours = job.written.get(file.name) != job.before.get(file.name)
        facts = read_status(file) if ours else {}
        status = facts["status"] if facts.get("status") in lines else "missing"
        error = f": {' '.join(facts['error'].split())}" if facts.get("error") else ""
        lines[status].append(f"  {status:8} {number} ({job.overrides}){error}")
    counts = ", ".join(f"{len(some)} {status}" for status, some in lines.items())
    _say(f"{name}: {len(planned)} jobs: {counts}")
    for some in lines.values():
        for line in some:
            _say(line)
    return len(lines["done"]) == len(planned)


def _status_file() -> str:
    """Ranks above 0 write files of their own."""
    rank = world().rank
    return f"status.rank{rank}.json" if rank else "status.json"


@dataclass(frozen=True)
class _Status:
    """What a status file holds."""

    status: str
    error: str | None
    overrides: list[str]
    made_by: list[str] | None = None


def write_status(
    folder: Path,
    status: str,
    overrides: list[str],
    error: str | None = None,
    trace: str | None = None,
) -> None:
    """Write how a job stands into its folder: status.json, and error.txt where there is a trace.

    `made_by` are the overrides of the last job that ended well and was no plan: what later calls
    that are refused leave in the folder is its work. A failure to write is told, not raised: it
    must not hide the error that is being written down.
    """
    name = _status_file()
    trace_file = folder / name.replace("status", "error").replace(".json", ".txt")
    made_by = read_status(folder / name).get("made_by")
    if status == "done" and "plan=true" not in map(str.lower, overrides):
        made_by = overrides
    facts = {"status": status, "error": error, "overrides": overrides, "made_by": made_by}
    files = {folder / name: json.dumps(facts, indent=2) + "\n"}
    if trace is not None:
        files[trace_file] = trace
    try:
        for file, text in files.items():
            part = file.with_name(f"{file.name}.part")
            part.write_text(text, encoding="utf-8")
            part.replace(file)
        if trace is None:
            trace_file.unlink(missing_ok=True)
    except OSError as problem:
        _say(f"cannot write {problem.filename}: {problem.strerror}")


def read_status(file: Path) -> dict[str, Any]:
    """What `write_status` wrote into a file; nothing where there is none that can be read."""
    try:
        return vars(fitted(_Status, json.loads(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError):
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
