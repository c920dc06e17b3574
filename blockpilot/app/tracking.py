"""Experiment tracking: Weights & Biases or nothing, never in the way of results.

Records are the results; a tracker only mirrors them. So every error of the tracking library
becomes one warning, after which the tracker stays silent.

    with tracked(tracker, folder, config=config, rank=rank):
        tracker.log({"train/loss": 2.4}, step=7)  # a curve
        tracker.summarise({"macro tau": 2.1})  # a result
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from blockpilot.base.errors import UserError

logger = logging.getLogger(__name__)

_MODES = ("offline", "online")


class Tracker(Protocol):
    """At most one tracked run per job, between `start` and `finish`."""

    def start(self, folder: Path, *, config: Mapping[str, Any]) -> None:
        """Begin the run of a job with the folder <outputs>/<stage>/<run id>.

        A job of the same stage and run id continues it.
        """

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Curves: values at `step`, which is the x axis and may repeat after a resume."""

    def summarise(self, values: Mapping[str, float]) -> None:
        """Results of the run; nothing else is one, the last value of a curve included."""

    def finish(self, *, failed: bool) -> None:
        """Close the run; without an open run it does nothing."""


@contextlib.contextmanager
def tracked(
    tracker: Tracker, folder: Path, *, config: Mapping[str, Any], rank: int
) -> Iterator[None]:
    """Start the run of the job with this folder on rank 0 and close it however the job ends."""
    if rank == 0:
        tracker.start(folder, config=config)
    failed = True
    try:
        yield
        failed = False
    finally:
        tracker.finish(failed=failed)


class NullTracker:
    """Tracks nothing."""

    def start(self, folder: Path, *, config: Mapping[str, Any]) -> None:
        pass

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        pass

    def summarise(self, values: Mapping[str, float]) -> None:
        pass

    def finish(self, *, failed: bool) -> None:
        pass


def identifiers(values: Mapping[str, float]) -> dict[str, float]:
    """The same values under names that W&B allows for metrics, all different."""
    found: dict[str, float] = {}
    for name, value in values.items():
        allowed = re.sub(r"[^A-Za-z0-9_/]+", "_", name)
        while allowed in found:
            allowed += "_"
        found[allowed] = value
    return found


class WandbTracker:
    """Weights & Biases. Offline runs lie in `<folder>/wandb` and go up with `wandb sync`.

    The run of a job is named by its stage and run id, and the stages of one run id are a group. It
    is opened by the first thing there is to tell, so a job that finds all work done, whose results
    are those already told, adds no run.

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
        self._named: dict[str, Any] | None = None  # what the run will be opened with
        self._run: Any = None
        self._next_call = 0
        self._folder = Path()

    def start(self, folder: Path, *, config: Mapping[str, Any]) -> None:
        self.finish(failed=False)
        stage, group = folder.parent.name, folder.name[-100:]  # W&B: ids of up to 128 characters
        self._folder = folder / "wandb"
        self._named = {
            "id": f"{stage}-{group}",
            "name": f"{stage}-{group}",
            "group": group,
            "job_type": stage,
            "dir": folder,
            "config": dict(config),
        }

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        if self._named is None:
            return
        with self._never_in_the_way():
            run = self._opened()
            run.log({**identifiers(values), "step": step}, step=self._next_call)
            self._next_call += 1
            (self._folder / "next_step").write_text(str(self._next_call))

    def summarise(self, values: Mapping[str, float]) -> None:
        if self._named is None:
            return
        with self._never_in_the_way():
            summary, told = identifiers(values), self._folder / "summary.json"
            text = json.dumps(summary, indent=1)
            if self._run is None and told.exists() and told.read_text() == text:
                return
            self._opened().summary.update(summary)
            told.write_text(text)

    def finish(self, *, failed: bool) -> None:
        run, self._run, self._named = self._run, None, None
        if run is None:
            return
        with self._never_in_the_way():
            run.finish(exit_code=1 if failed else 0)

    def _opened(self) -> Any:
        if self._run is None:
            import wandb  # slow to import, and a broken installation must not stop a run

            assert self._named is not None
            self._run = wandb.init(
                project=self.project,
                entity=self.entity,
                mode=self.mode,  # type: ignore[arg-type]
                resume=None if self.mode == "offline" else "allow",
                reinit="create_new",
                # Nothing that samples the machine, wraps the terminal or asks git while we time.
                settings=wandb.Settings(
                    silent=True, console="off", x_disable_stats=True, disable_git=True
                ),
                **self._named,
            )
            # The last value of a curve is no result: the summary holds what is summarised alone.
            self._run.define_metric("*", step_metric="step", summary="none")
            self._folder.mkdir(parents=True, exist_ok=True)
            counter = self._folder / "next_step"
            stored = int(counter.read_text()) if counter.exists() else 0
            self._next_call = max(stored, self._run.step)
        return self._run

    @contextlib.contextmanager
    def _never_in_the_way(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            logger.warning("tracking stops, results go on: %s: %s", type(error).__name__, error)
            run, self._run, self._named = self._run, None, None
            if run is not None:
                with contextlib.suppress(Exception):
                    run.finish(exit_code=1)
