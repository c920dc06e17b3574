"""Folders of results: what each holds, a name for it, and the command that made it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockpilot.app.status import read_status
from blockpilot.base.paths import names_of
from blockpilot.records.run_folder import RunFolder

_ABSOLUTE = re.compile(r"(?<![^=\[,:])/[^\],]+")  # a path, alone or in a list of an override
_PARTS = 3  # of a path elsewhere, as outputs/sweep/<run id>


@dataclass(frozen=True)
class Run:
    """A folder of results, what it holds, and a name that no other run of its kind has."""

    folder: RunFolder
    kind: str  # sweep | evaluate | cost
    name: str

    @property
    def file(self) -> str:
        """Name of the files of its section."""
        return f"{self.kind}-{self.name.replace('/', '--')}"

    @property
    def source(self) -> str:
        """Its folder, as a reader elsewhere can use it."""
        return portable(self.folder.path)

    @property
    def command(self) -> str:
        """What made it, from its status.json; its stage alone where that is missing."""
        status = read_status(self.folder.path / "status.json")
        # Of a broken run no job ended well.
        overrides = [] if status is None else status.made_by or status.overrides
        shown = [_ABSOLUTE.sub(lambda path: portable(Path(path[0])), each) for each in overrides]
        return shlex.join(["python", "-m", f"blockpilot.{self.kind}", *shown])


def portable(path: Path) -> str:
    """A path without what only this machine knows: relative to the working folder, or its end."""
    if not path.is_absolute():
        return str(path)
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return "/".join(path.parts[-_PARTS:])


def named_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in order. Raises UserError where one holds nothing to report or is given twice."""
    kinds = [RunFolder(folder).kind for folder in folders]
    names: dict[Path, str] = {}
    for kind in dict.fromkeys(kinds):
        alike = [folder for folder, each in zip(folders, kinds, strict=True) if each == kind]
        names |= zip(alike, names_of(alike, "runs"), strict=True)
    return [
        Run(RunFolder(folder), kind, names[folder])
        for folder, kind in zip(folders, kinds, strict=True)
    ]
