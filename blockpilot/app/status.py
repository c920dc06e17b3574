"""How a job stands: status.json in its folder, and error.txt beside it where the job failed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from blockpilot.base.json_values import fitted
from blockpilot.base.launch import world


@dataclass(frozen=True)
class Status:
    """What status.json holds.

    `made_by` are the overrides of the last job that ended well and was no dry run: what later calls
    that are refused leave in the folder is its work.
    """

    status: str  # running | done | failed | interrupted
    error: str | None
    overrides: list[str]
    made_by: list[str] | None = None


def status_file(folder: Path) -> Path:
    """Where this process writes its status; ranks above 0 write files of their own."""
    rank = world().rank
    return folder / (f"status.rank{rank}.json" if rank else "status.json")


def write_status(
    folder: Path,
    status: str,
    overrides: Sequence[str],
    error: str | None = None,
    trace: str | None = None,
) -> None:
    """Write how a job stands into its folder; a `trace` goes to error.txt.

    A failure to write is told, not raised: it must not hide the error that is being written down.
    """
    file = status_file(folder)
    trace_file = file.with_name(file.name.replace("status", "error").replace(".json", ".txt"))
    before = read_status(file)
    made_by = None if before is None else before.made_by
    if status == "done" and "plan=true" not in map(str.lower, overrides):
        made_by = list(overrides)
    facts = asdict(Status(status, error, list(overrides), made_by))
    texts = {file: json.dumps(facts, indent=2) + "\n"}
    if trace is not None:
        texts[trace_file] = trace
    try:
        for path, text in texts.items():
            part = path.with_name(f"{path.name}.part")
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        if trace is None:
            trace_file.unlink(missing_ok=True)
    except OSError as problem:
        print(f"cannot write {problem.filename}: {problem.strerror}", file=sys.stderr, flush=True)


def read_status(file: Path) -> Status | None:
    """What `write_status` wrote into a file; None where there is none that can be read."""
    try:
        return fitted(Status, json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def written_at(folder: Path) -> dict[str, int]:
    """Names of a folder's status files, each with the nanosecond of its last change."""
    return {file.name: file.stat().st_mtime_ns for file in folder.glob("status*.json")}
