"""Prompts from a local file: rows of JSON lines, JSON, CSV, Parquet or plain text.

`LocalRows` reads rows and knows where each one stands in the file; `LocalSet` makes prompts of
them, recognising published layouts by their keys. Text files may be gzipped (.gz).
"""

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from blockpilot.base.errors import UserError
from blockpilot.prompts.base import UNASSIGNED, Prompt, check_prompts

SUFFIXES = (".jsonl", ".json", ".txt", ".csv", ".parquet")

ID_KEYS = ("id", "question_id", "prompt_id", "task_id", "unique_id", "instance_id")
CONVERSATION_KEYS = ("turns", "messages", "conversations")
TEXT_KEYS = ("prompt", "question", "problem", "problem_statement", "instruction", "text")

_USER_ROLES = ("user", "human")


@dataclass(frozen=True)
class Row:
    """One record of a source: its index among the records, and where a person finds it."""

    index: int
    where: str
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class LocalRows:
    """The rows of one file, in file order; blank lines are none."""

    path: Path | str

    @property
    def described(self) -> str:
        return str(self.path)

    def rows(self, columns: Sequence[str] = ()) -> Iterator[Row]:
        """All columns, whatever is asked; UserError with file and line for what cannot be read."""
        path = Path(self.path).expanduser()
        suffixes = [suffix.lower() for suffix in path.suffixes]
        zipped = suffixes[-1:] == [".gz"]
        kind = (suffixes[:-1] if zipped else suffixes)[-1:]
        if kind not in [[suffix] for suffix in SUFFIXES] or (zipped and kind == [".parquet"]):
            allowed = ", ".join(SUFFIXES)
            raise UserError(
                f"{path}: not a kind of prompt file; allowed: {allowed} (text also .gz)"
            )
        if not path.is_file():
            raise UserError(f"{path}: no such file")
        try:
            if kind == [".parquet"]:
                yield from _parquet_rows(path)
                return
            opener = gzip.open if zipped else open
            with opener(path, "rt", encoding="utf-8-sig", newline=None) as lines:
                reader = {".txt": _text_rows, ".csv": _csv_rows}.get(kind[0], _json_rows)
                yield from reader(path, lines)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}: not UTF-8 text ({error.reason}, byte {error.start})"
            ) from error
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{path}: cannot be read: {reason}") from error


@dataclass(frozen=True, kw_only=True)
class PackageRows:
    """The rows of a data file inside an installed package, which is not imported."""

    package: str
    file: str
    install: str

    @property
    def described(self) -> str:
        return f"{self.package}/{self.file}"

    def rows(self, columns: Sequence[str] = ()) -> Iterator[Row]:
        """Raises UserError with the command that installs the package if it is missing."""
        spec = find_spec(self.package)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        if not folders:
            raise UserError(
                f"package '{self.package}' is not installed; run `{self.install}`, or name a file"
                " with prompts.path="
            )
        yield from LocalRows(path=Path(folders[0]) / self.file).rows()


@dataclass(frozen=True, kw_only=True)
class LocalSet:
    """Prompts of any file whose layout is recognised by its keys.

    Text is taken as it stands, without a prompt format: to read a published set in the field's
    format, name that set and give its file with `prompts.path=`.
    """

    name: str
    held_out: bool
    path: Path | str | None

    def load(self, path: Path | None = None) -> list[Prompt]:
        chosen = path or self.path
        if chosen is None:
            raise UserError(f"prompt set '{self.name}' reads a file: give it with prompts.path=")
        rows = LocalRows(path=chosen).rows()
        return check_prompts((_recognised(self.name, row) for row in rows), str(chosen))


def user_turns(messages: Any, where: str) -> tuple[list[str], str | None]:
    """User messages and system message of a conversation.

    Args:
        messages: list of user messages (strings), or of {role, content} or {from, value} records,
            of which only the user's (or human's) and the system's are kept; blank ones are
            dropped.
        where: file and line, for the error.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise UserError(f"{where}: expected a list of messages, got {_kind(messages)}")
    turns: list[str] = []
    system: str | None = None
    for message in messages:
        role, content = "user", message
        if isinstance(message, Mapping):
            role = message.get("role", message.get("from"))
            content = message.get("content", message.get("value"))
        if not isinstance(content, str) or not isinstance(role, str):
            raise UserError(
                f"{where}: a message must be text, {{role, content}} or {{from, value}},"
                f" got {_kind(message)}"
            )
        check_text(content, where)
        if role == "system":
            system = content
        elif role in _USER_ROLES and content.strip():
            turns.append(content)
    return turns, system


def check_text(text: str, where: str) -> None:
    """Refuses half surrogate pairs, which JSON can express and UTF-8 (hash, tokenizer) cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: text is not valid Unicode ({error.reason})") from error


def _recognised(name: str, row: Row) -> Prompt:
    values = row.values
    key = next((values[k] for k in ID_KEYS if values.get(k) not in (None, "")), row.index)
    for column in chain(CONVERSATION_KEYS, TEXT_KEYS):
        if values.get(column) is not None:
            break
    else:
        known = ", ".join((*CONVERSATION_KEYS, *TEXT_KEYS))
        found = ", ".join(map(str, values)) or "none"
        raise UserError(f"{row.where}: no known layout: keys {found}; one of {known} is needed")
    content = values[column]
    turns, system = user_turns([content] if isinstance(content, str) else content, row.where)
    if not turns:
        raise UserError(f"{row.where}: '{column}' holds no user message")
    if column == "instruction" and values.get("input"):
        turns[0] = f"{turns[0]}\n\n{values['input']}"
    return Prompt(f"{name}/{key}", name, tuple(turns), UNASSIGNED, system)


def _json_rows(path: Path, lines: Iterator[str]) -> Iterator[Row]:
    """JSON lines, or one JSON array, told apart by the first character that is no space."""
    numbered = ((n, line) for n, line in enumerate(lines, start=1) if line.strip())
    first = next(numbered, None)
    if first is None:
        return
    if first[1].lstrip().startswith("["):
        text = "\n" * (first[0] - 1) + first[1] + "".join(lines)
        for index, values in enumerate(_parsed(text, f"{path}", first_line=1)):
            yield _row(index, f"{path}: record {index}", values)
        return
    for index, (number, line) in enumerate(chain([first], numbered)):
        where = f"{path}:{number}"
        yield _row(index, where, _parsed(line, f"{path}", first_line=number))


def _parsed(text: str, path: str, *, first_line: int) -> Any:
    try:
        return json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise UserError(f"{path}:{line}: not valid JSON: {error.msg}") from error
    except RecursionError as error:
        raise UserError(f"{path}:{first_line}: JSON is nested too deeply") from error


def _row(index: int, where: str, values: Any) -> Row:
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: expected a JSON object, got {_kind(values)}")
    return Row(index, where, values)


def _text_rows(path: Path, lines: Iterator[str]) -> Iterator[Row]:
    index = 0
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield Row(index, f"{path}:{number}", {"prompt": line.strip()})
            index += 1


def _csv_rows(path: Path, lines: Iterator[str]) -> Iterator[Row]:
    reader = csv.DictReader(lines, strict=True)
    try:
        for index, values in enumerate(reader):
            where = f"{path}:{reader.line_num}"
            if None in values or None in values.values():
                raise UserError(f"{where}: number of fields differs from the header's")
            yield Row(index, where, values)
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: not valid CSV: {error}") from error


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except pa.ArrowException as error:
        raise UserError(f"{path}: not a Parquet file: {error}") from error
    for index, values in enumerate(table.to_pylist()):
        yield Row(index, f"{path}: row {index}", values)


def _kind(value: Any) -> str:
    return type(value).__name__
