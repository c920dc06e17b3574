"""Published sets: rows of a source, put into the prompt format that the field uses for them."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from blockpilot.base.errors import UserError
from blockpilot.prompts.base import UNASSIGNED, Prompt, check_prompts
from blockpilot.prompts.local import LocalRows, Row, check_text, user_turns

log = logging.getLogger(__name__)

_FIELD = re.compile(r"\{(\w+(?:\.\w+)*)\}")


class RowSource(Protocol):
    """Where rows come from: `HubRows`, `LocalRows` or `PackageRows`."""

    @property
    def described(self) -> str: ...

    def rows(self, columns: Sequence[str] = ()) -> Iterator[Row]: ...


@dataclass(frozen=True, kw_only=True)
class TabularSet:
    """One prompt per row.

    Attributes:
        name: name of the set.
        held_out: the field tests on this set, so all of it is test.
        path: file to read instead of `source`, in the set's published layout; null for none.
        source: where the rows come from otherwise.
        ids: columns that may hold the published id, first one present wins; empty: row index.
        templates: prompt formats; the first one whose {columns} are all present and not empty
            is used. {a.b} is field b of column a; a list of texts is joined with line breaks. Empty
            with `turns`.
        turns: columns that may hold the conversation (list of user messages, or of
            {role, content} or {from, value} records), first one present wins. Empty with
            `templates`.
        max_turns: keep only so many user messages of a conversation; null keeps all.
    """

    name: str
    held_out: bool
    path: Path | str | None
    source: RowSource
    ids: Sequence[str]
    templates: Sequence[str]
    turns: Sequence[str]
    max_turns: int | None

    def __post_init__(self) -> None:
        if bool(self.templates) == bool(self.turns):
            raise UserError(f"prompt set '{self.name}': give either templates or turns, not both")

    def load(self, path: Path | None = None) -> list[Prompt]:
        file = path or self.path
        source: RowSource = self.source if file is None else LocalRows(path=file)
        fields = [_FIELD.findall(template) for template in self.templates]
        in_templates = (field.partition(".")[0] for group in fields for field in group)
        columns = [*self.ids, *self.turns, *in_templates]
        prompts = [self._prompt(row) for row in source.rows(columns)]
        spoken = [prompt for prompt in prompts if prompt.turns]
        if len(spoken) < len(prompts):
            log.warning(
                "prompt set '%s': left out %d of %d conversations without a user message",
                self.name,
                len(prompts) - len(spoken),
                len(prompts),
            )
        return check_prompts(spoken, source.described)

    def _prompt(self, row: Row) -> Prompt:
        if self.turns:
            column = self._first_present(self.turns, row)
            turns, _ = user_turns(row.values[column], row.where)
            turns = turns[: self.max_turns]
        else:
            turns = [self._formatted(row)]
        key = next((row.values[i] for i in self.ids if _filled(row.values.get(i))), row.index)
        return Prompt(f"{self.name}/{key}", self.name, tuple(turns), UNASSIGNED)

    def _formatted(self, row: Row) -> str:
        for template in self.templates:
            fields = _FIELD.findall(template)
            if all(_filled(_value(row, field)) for field in fields):
                return _FIELD.sub(lambda m: _as_text(_value(row, m[1]), row.where), template)
        raise self._mismatch(row, [field for t in self.templates for field in _FIELD.findall(t)])

    def _first_present(self, columns: Sequence[str], row: Row) -> str:
        for column in columns:
            if row.values.get(column) is not None:
                return column
        raise self._mismatch(row, columns)

    def _mismatch(self, row: Row, needed: Sequence[str]) -> UserError:
        found = ", ".join(str(k) for k, v in row.values.items() if _filled(v)) or "nothing"
        wanted = ", ".join(dict.fromkeys(needed))
        return UserError(
            f"{row.where}: not the layout of prompt set '{self.name}', which reads {wanted};"
            f" found {found} (prompts=local reads any known layout)"
        )


def _value(row: Row, field: str) -> Any:
    value: Any = row.values
    for name in field.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _filled(value: Any) -> bool:
    return value is not None and value != "" and value != []


def _as_text(value: Any, where: str) -> str:
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, Sequence) or not all(isinstance(line, str) for line in lines):
        raise UserError(f"{where}: expected text, got {type(value).__name__}")
    text = "\n".join(lines)
    check_text(text, where)
    return text
