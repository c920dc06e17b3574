"""Where rows live: `<run folder>/rank00/part-000001.parquet` and a manifest beside it.

One process owns a rank folder (a lock file says so) and only ever adds whole parts: written to a
temporary file, synced, renamed. A killed run therefore leaves complete parts and nothing else; the
next one, with any number of ranks, asks `missing_prompts` and goes on. When a store is opened or
ends well its parts are merged into one.

Which rows count, when a folder holds several: per group (prompt and shared settings, see schema)
**only the rows of one session, the newest that wrote to the group without a failure**, because
speedups join within a session; the newest of all where each failed. So a prompt is done when that
session holds every expected key and none failed; otherwise all its methods run again and the new
session's rows supersede the old ones, which stay in the rank files but are no longer read. Write
all rows of a prompt with one `append`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from blockpilot.base.errors import UserError
from blockpilot.base.files import (
    locked,
    make_folder,
    refused,
    remove_leftovers,
    replace_file,
)
from blockpilot.base.json_values import first_line
from blockpilot.records.schema import SCHEMA, SCHEMA_VERSION, clean

T = TypeVar("T")

_STAMP = "%Y%m%dT%H%M%S.%fZ"
_READ_TRIES, _READ_PAUSE_S = 100, 0.05  # a rank that resumes may merge hundreds of parts
_COUNTING = ["key", "group_key", "session_id", "status"]
_ORDER = ["prompt_id", "turn", "method", "block_size", "key"]


def holds_rows(folder: Path) -> bool:
    """Whether a process ever wrote rows into a run folder."""
    return bool(_rank_folders(folder))


def shard(items: Sequence[T], rank: int, world_size: int) -> list[T]:
    """The items of one rank: every `world_size`-th, so that each belongs to exactly one rank.

    Shard the full list first and drop what is done afterwards: ranks start at different moments
    and would otherwise see, and split, different remainders.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}")
    return list(items[rank::world_size])


class Store:
    """Append-only rows of one rank of one run.

    Use it as a context manager: the manifest then ends as `done` or `failed`; a manifest that says
    `running` without a living owner belongs to a killed rank. `settings` is the run's
    configuration and `provenance` comes from `blockpilot.base.provenance.facts`, both JSON values.
    Raises UserError when another run owns the folder, when the folder cannot be written, or when
    it holds foreign files.
    """

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str,
        rank: int,
        world_size: int,
        settings: Mapping[str, Any],
        provenance: Mapping[str, Any],
    ) -> None:
        self.folder = folder
        self.run_id = clean(run_id)
        self.rank = rank
        self.world_size = world_size
        self._rank_folder = folder / f"rank{rank:02d}"
        make_folder(self._rank_folder)
        self._lock = contextlib.ExitStack()
        try:
            self._own_folder()
            remove_leftovers(self._rank_folder)
            _merge_parts(self._rank_folder)
            self._next_part = max(map(_part_number, _parts(self._rank_folder)), default=0) + 1
            self.session_id = _new_session_id(folder, rank)
            self._stamp = _session_columns(provenance) | {
                "schema_version": SCHEMA_VERSION,
                "run_id": self.run_id,
                "session_id": self.session_id,
                "rank": rank,
                "world_size": world_size,
            }
            self._counts = {"ok": 0, "skipped": 0, "failed": 0}
            self._manifest = self._next_manifest(dict(settings), dict(provenance))
            self._write_manifest("running")
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(failed=kind is not None)

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Store rows from the schema's builders as one part, all or none.

        Raises UserError when the system refuses the write; earlier parts are intact.
        """
        stamped = [{**row, **self._stamp} for row in rows]
        if not stamped:
            return
        table = pa.Table.from_pylist(stamped, schema=SCHEMA)
        table.validate(full=True)
        _write_table(self._rank_folder / f"part-{self._next_part:06d}.parquet", table)
        self._next_part += 1
        for row in stamped:
            self._counts[row["status"]] += 1

    def close(self, *, failed: bool = False) -> None:
        """Merge the parts, end the manifest and give the folder free; a second call does nothing.

        After a failure nothing is merged: the parts are readable as they are.
        """
        if self._manifest["sessions"][-1]["status"] != "running":
            return
        try:
            if not failed:
                _merge_parts(self._rank_folder)
            self._write_manifest("failed" if failed else "done")
        except UserError:
            # The error that ended the run matters more than a manifest that cannot be written.
            if not failed:
                raise
        finally:
            self._manifest["sessions"][-1]["status"] = "failed" if failed else "done"
            self._lock.close()

    def _own_folder(self) -> None:
        try:
            self._lock.enter_context(locked(self._rank_folder / "lock", wait=False))
            # Ranks of an earlier, larger run that still live would write the same prompts.
            for other in _rank_folders(self.folder):
                if int(other.name[4:]) >= self.world_size and (other / "lock").exists():
                    with locked(other / "lock", wait=False):
                        pass
        except BlockingIOError as error:
            raise UserError(
                f"another run is writing to {self.folder}: wait for it or choose another run id"
            ) from error

    def _next_manifest(
        self, settings: dict[str, Any], provenance: dict[str, Any]
    ) -> dict[str, Any]:
        earlier = _read_manifest(self._rank_folder / "manifest.json").get("sessions", [])
        session = {
            "session_id": self.session_id,
            "world_size": self.world_size,
            "settings": settings,
            "provenance": provenance,
        }
        return {
            "schema_version": SCHEMA_VERSION,
            "run_id": self.run_id,
            "rank": self.rank,
            "sessions": [*earlier, session],
        }

    def _write_manifest(self, status: str) -> None:
        session = self._manifest["sessions"][-1]
        session |= {"status": status, "n_rows": dict(self._counts), "written_at": _now()}
        text = json.dumps(self._manifest, indent=1, default=str)
        path = self._rank_folder / "manifest.json"
        replace_file(path, lambda stream: stream.write(text.encode()))


def read_table(folder: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Rows of all ranks that count (rule in the module docstring); empty when there are none.

    Raises UserError naming a file that is broken or of another schema.
    """
    wanted = SCHEMA.names if columns is None else list(columns)
    needed = list(dict.fromkeys([*wanted, *_COUNTING]))
    tables = [SCHEMA.empty_table().select(needed)]
    for rank_folder in _rank_folders(folder):
        tables += _read_rank(rank_folder, needed)
    table = pa.concat_tables(tables)
    return table.take(_rows_that_count(table)).select(wanted)


def read_records(folder: Path) -> pd.DataFrame:
    """The rows that count as a frame; per-cycle columns hold int32 arrays.

    Nullable integers and booleans come as pandas' own nullable types. Sorted by prompt, turn
    and method, so that the order does not depend on the number of ranks. Raises UserError
    when `folder` is no run folder.
    """
    if not _rank_folders(folder):
        raise UserError(f"{folder} holds no records: give the folder of a run, .../sweep/<run id>")
    frame: pd.DataFrame = read_table(folder).to_pandas()
    for column in SCHEMA:
        if column.nullable and pa.types.is_integer(column.type):
            frame[column.name] = frame[column.name].astype("Int32")
        elif column.nullable and pa.types.is_boolean(column.type):
            frame[column.name] = frame[column.name].astype("boolean")
    return frame.sort_values(_ORDER, ignore_index=True)


def write_parquet(folder: Path) -> Path:
    """Derive `records.parquet` in the run folder, atomically; returns its path.

    Every rank may call it after closing its store: callers take turns, so the last one has read
    everything.
    """
    path = folder / "records.parquet"
    with locked(folder / ".records.lock", wait=True):
        table = read_table(folder)
        _write_table(path, table.sort_by([(name, "ascending") for name in _ORDER]))
    return path


def read_manifests(folder: Path) -> list[dict[str, Any]]:
    """Manifests of all ranks, in the order of the ranks; each lists its sessions, oldest first."""
    found = [_read_manifest(rank / "manifest.json") for rank in _rank_folders(folder)]
    return [manifest for manifest in found if manifest]


def done_keys(rows: pd.DataFrame) -> frozenset[str]:
    """Keys of the rows that did not fail; `rows` are those that count, over all ranks."""
    return frozenset(rows.loc[rows["status"] != "failed", "key"])


def missing_prompts(rows: pd.DataFrame, expected: Mapping[str, Collection[str]]) -> list[str]:
    """Prompt ids whose expected row keys are not all done, in the order of `expected`."""
    done = done_keys(rows)
    return [prompt_id for prompt_id, keys in expected.items() if not done.issuperset(keys)]


def _rows_that_count(table: pa.Table) -> pa.Array:
    """Positions of the rows of one session per group; a row stored twice counts once."""
    frame = table.select(_COUNTING).to_pandas()
    failed = frame["status"].eq("failed").groupby([frame["group_key"], frame["session_id"]])
    # Sessions sort by their time: those without a failure after all others.
    rank = failed.transform("max").map({True: "0", False: "1"}) + frame["session_id"]
    frame = frame[rank == rank.groupby(frame["group_key"]).transform("max")]
    return _positions(frame.drop_duplicates(["session_id", "key"], keep="last"))


def _positions(frame: pd.DataFrame) -> pa.Array:
    return pa.array(frame.index.to_numpy(), pa.int64())


def _read_rank(folder: Path, columns: list[str]) -> list[pa.Table]:
    # The owner may merge parts between listing and reading; the merged part then holds all rows.
    for _ in range(_READ_TRIES):
        with contextlib.suppress(FileNotFoundError):
            return [_read_part(part, columns) for part in _parts(folder)]
        time.sleep(_READ_PAUSE_S)
    raise UserError(f"{folder}: files vanish while they are read; is another program cleaning up?")


def _read_part(path: Path, columns: list[str]) -> pa.Table:
    try:
        with pq.ParquetFile(path) as part:
            schema = part.schema_arrow
            if schema.equals(SCHEMA):
                return part.read(columns=columns).select(columns)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise UserError(f"{path} is no readable parquet file ({first_line(error)})") from error
    version = (schema.metadata or {}).get(b"blockpilot_schema_version", b"none").decode()
    differing = sorted(set(SCHEMA).symmetric_difference(schema), key=lambda column: column.name)
    raise UserError(
        f"{path} holds records of another schema (version {version}, this is {SCHEMA_VERSION}; "
        f"columns that differ: {', '.join(dict.fromkeys(c.name for c in differing)) or 'order'})"
    )


def _merge_parts(folder: Path) -> None:
    """One part instead of many. The merged part replaces the last one, then the others go.

    Killed in between, rows lie there twice and count once.
    """
    parts = _parts(folder)
    if len(parts) < 2:
        return
    table = pa.concat_tables([_read_part(part, SCHEMA.names) for part in parts])
    unique = table.select(["session_id", "key"]).to_pandas().drop_duplicates(keep="last")
    _write_table(parts[-1], table.take(_positions(unique)))
    for part in parts[:-1]:
        try:
            part.unlink()
        except OSError as error:
            raise refused(part, error) from error


def _write_table(path: Path, table: pa.Table) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    content = sink.getvalue()
    replace_file(path, lambda stream: stream.write(content))


def _rank_folders(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("rank*") if path.name[4:].isdigit() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name[4:]))


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"), key=_part_number)


def _part_number(path: Path) -> int:
    try:
        return int(path.stem.removeprefix("part-"))
    except ValueError as error:
        raise UserError(f"{path} is not a records file of this program: remove it") from error


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest, empty when there is none."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        manifest["sessions"][0]["session_id"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{path} is no manifest of this program: remove it") from error
    return dict(manifest)


def _new_session_id(folder: Path, rank: int) -> str:
    """A time stamp that sorts after every session of the folder, also when the clock went back."""
    sessions = [s["session_id"] for m in read_manifests(folder) for s in m["sessions"]]
    moment = datetime.now(UTC)
    if sessions:
        newest = datetime.strptime(max(sessions).split("-")[0], _STAMP).replace(tzinfo=UTC)
        moment = max(moment, newest + timedelta(microseconds=1))
    return f"{moment.strftime(_STAMP)}-r{rank:02d}"


def _session_columns(provenance: Mapping[str, Any]) -> dict[str, Any]:
    versions = {"python": provenance["python"], "blockpilot": provenance["version"]}
    versions |= {name: provenance[name] for name in ("git_commit", "git_dirty")}
    versions |= provenance["libraries"]
    columns = {name: provenance[name] for name in ("host", "cpu", "gpu", "threads")}
    return columns | {"versions": json.dumps(versions, sort_keys=True)}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
