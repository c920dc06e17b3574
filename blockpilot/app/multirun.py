"""Which jobs a multirun has: known before the first one begins, in the process that launches them.

Launchers may run jobs in other processes or on other machines, so what is known of a job's end is
what it wrote into its folder.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import filter_overrides
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from blockpilot.app.status import written_at


@dataclass(frozen=True)
class PlannedJob:
    """One job of a multirun, its folder, and the status files that an earlier launch left there."""

    overrides: str
    folder: Path
    before: dict[str, int]  # names and the nanosecond of their last change

    @property
    def written(self) -> dict[str, int]:
        """Status files as they are now, like `before`."""
        return written_at(self.folder)


PLANNED: list[PlannedJob] = []
"""Jobs of the multirun that this process launched last, in their order."""


class JobList(Callback):
    """Hydra calls it when a multirun begins; it fills `PLANNED`."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """List the jobs. Ends the process where the sweeper decides jobs by their results."""
        if not str(config.hydra.sweeper._target_).endswith(".BasicSweeper"):
            # Hydra turns other errors of callbacks into warnings.
            print("error: hydra/sweeper: allowed is basic; jobs return no value", file=sys.stderr)
            raise SystemExit(2)
        # What cannot be composed is told by the sweeper, which does the same next.
        with contextlib.suppress(HydraException, OmegaConfBaseException):
            PLANNED[:] = _planned(config)


def _planned(config: DictConfig) -> list[PlannedJob]:
    loader = GlobalHydra.instance().config_loader()
    swept = {str(key): str(value) for key, value in (config.hydra.sweeper.params or {}).items()}
    given = [f"{key}={value}" for key, value in swept.items()] + list(config.hydra.overrides.task)
    choices: dict[str, list[str]] = {}
    for each in OverridesParser.create(config_loader=loader).parse_overrides(given):
        key = each.get_key_element()
        values = (
            each.sweep_string_iterator()
            if each.is_sweep_override()
            else [each.get_value_element_as_str()]
        )
        choices[key] = [f"{key}={value}" for value in values]
    jobs = []
    for number, overrides in enumerate(itertools.product(*choices.values())):
        composed = loader.load_sweep_config(config, list(overrides))
        with open_dict(composed):
            composed.hydra.job.num = number
            composed.hydra.job.id = number
        place = [OmegaConf.select(composed, f"hydra.sweep.{part}") for part in ("dir", "subdir")]
        job = PlannedJob(" ".join(filter_overrides(overrides)), Path(*map(str, place)), {})
        jobs.append(PlannedJob(job.overrides, job.folder, job.written))
    return jobs
