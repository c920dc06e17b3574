"""JSON values that were stored and are read again: what is damaged is told in one line."""

from __future__ import annotations

import json
import math
import types
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from blockpilot.base.errors import UserError

T = TypeVar("T")


def read_json(file: Path, *, what: str) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError, naming the file, when it holds none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file}: no {what} ({first_line(error)}); it must be made again"
        ) from error
    return found


def first_line(error: BaseException) -> str:
    """What an error says, as far as it fits into one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def fitted(kind: type[T], raw: Any) -> T:
    """A dataclass from the JSON values of its fields, tuples from lists.

    Raises ValueError naming a field that is missing, unknown, of another type or not finite.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"{_short(raw)} is no JSON object")
    hints = get_type_hints(kind)
    needed = {
        each.name
        for each in fields(kind)  # type: ignore[arg-type]
        if each.default is MISSING and each.default_factory is MISSING
    }
    if missing := sorted(needed - set(raw)):
        raise ValueError(f"no {missing[0]}")
    if unknown := sorted(set(raw) - set(hints)):
        raise ValueError(f"unknown key {unknown[0]}")
    return kind(**{name: _fitting(hints[name], value, name) for name, value in raw.items()})


def _fitting(hint: Any, value: Any, name: str) -> Any:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        return _fitting(next(each for each in inner if each is not type(None)), value, name)
    if kind is Any:
        return value
    if kind in (tuple, list) and isinstance(value, list):
        return kind(_fitting(inner[0], each, name) for each in value)
    if kind is dict and isinstance(value, dict):
        return {key: _fitting(inner[1], each, name) for key, each in value.items()}
    if is_dataclass(kind):
        return fitted(kind, value)  # type: ignore[arg-type]
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if math.isfinite(value):
            return value
    elif isinstance(value, kind) and (kind is not int or not isinstance(value, bool)):
        return value
    raise ValueError(f"{name} is {_short(value)}, not {getattr(hint, '__name__', hint)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
