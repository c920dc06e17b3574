"""Experiment tracking: Weights & Biases or nothing, never in the way of results.

Records are the results; a tracker only mirrors them. So every error of the tracking library
becomes one warning, after which the tracker stays silent.

    with tracked(tracker, run_id=run_id, folder=folder, config=config, rank=rank):
        tracker.log({"tau": 2.4}, step=7)
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from blockpilot.errors import UserError

logger = logging.getLogger(__name__)

_MODES = ("offline", "online")


class Tracker(Protocol):
    """One tracked run per job, between `start` and `finish`."""

    def start(self, *, run_id: str, folder: Path, config: Mapping[str, Any]) -> None:
        """Open the run of this job; the same `run_id` continues an earlier one."""

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Curves: values at `step`, which is the x axis and may repeat after a resume."""

    def summarise(self, values: Mapping[str, Any]) -> None:
        """Final numbers of the run."""

    def finish(self, *, failed: bool) -> None:
        """Close the run; without an open run it does nothing."""


@contextlib.contextmanager
def tracked(
    tracker: Tracker, *, run_id: str, folder: Path, config: Mapping[str, Any], rank: int
) -> Iterator[None]:
    """Open the job's run on rank 0 and close it however the job ends."""
    if rank == 0:
        tracker.start(run_id=run_id, folder=folder, config=config)
    failed = True
    try:
        yield
        failed = False
    finally:
        tracker.finish(failed=failed)


class NullTracker:
    """Tracks nothing."""

    def start(self, *, run_id: str, folder: Path, config: Mapping[str, Any]) -> None:
        pass

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        pass

    def summarise(self, values: Mapping[str, Any]) -> None:
        pass

    def finish(self, *, failed: bool) -> None:
        pass


class WandbTracker:
    """Weights & Biases. Offline runs lie in `<folder>/wandb` and go up with `wandb sync`.

    W&B drops what is logged at or before its last step, which a job resumed from a checkpoint does.
    So W&B's own step only counts log calls, goes on over resumes (a file beside the run keeps it,
    since an offline run cannot ask the server), and the caller's step is a logged value that all
    charts use as x axis.
    """

    def __init__(self, *, project: str, mode: str, entity: str | None) -> None:
        if mode not in _MODES:
            raise UserError(f"tracker.mode is {mode!r}; allowed: {', '.join(_MODES)}")
        self.project = project
        self.mode = mode
        self.entity = entity
        self._run: Any = None
        self._next_call = 0
        self._counter = Path()

    def start(self, *, run_id: str, folder: Path, config: Mapping[str, Any]) -> None:
        self.finish(failed=False)
        with self._never_in_the_way():
            import wandb  # slow to import, and a broken installation must not stop a run

            run = wandb.init(
                project=self.project,
                entity=self.entity,
                mode=self.mode,  # type: ignore[arg-type]
                id=re.sub(r"[^A-Za-z0-9_.-]+", "-", run_id)[-128:],
                name=run_id,
                resume=None if self.mode == "offline" else "allow",
                dir=folder,
                config=dict(config),
                reinit="create_new",
                # Nothing that samples the machine, wraps the terminal or asks git while we time.
                settings=wandb.Settings(
                    silent=True, console="off", x_disable_stats=True, disable_git=True
                ),
            )
            self._run = run
            run.define_metric("*", step_metric="step")
            self._counter = folder / "wandb" / "next_step"
            stored = int(self._counter.read_text()) if self._counter.exists() else 0
            self._next_call = max(stored, run.step)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        if self._run is None:
            return
        with self._never_in_the_way():
            self._run.log({**values, "step": step}, step=self._next_call)
            self._next_call += 1
            self._counter.parent.mkdir(parents=True, exist_ok=True)
            self._counter.write_text(str(self._next_call))

    def summarise(self, values: Mapping[str, Any]) -> None:
        if self._run is None:
            return
        with self._never_in_the_way():
            self._run.summary.update(dict(values))

    def finish(self, *, failed: bool) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        with self._never_in_the_way():
            run.finish(exit_code=1 if failed else 0)

    @contextlib.contextmanager
    def _never_in_the_way(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            logger.warning("tracking stops, results go on: %s: %s", type(error).__name__, error)
            run, self._run = self._run, None
            if run is not None:
                with contextlib.suppress(Exception):
                    run.finish(exit_code=1)
