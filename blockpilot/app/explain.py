"""Errors of Hydra and OmegaConf in one line."""

from __future__ import annotations

import difflib

from hydra.errors import OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException


def explain(error: Exception) -> str:
    """Tell an error of Hydra or OmegaConf in one line, with what would have been allowed."""
    if isinstance(error, OverrideParseException):
        return (
            f"cannot read '{error.override}': write key=value, and quote a value that holds "
            "spaces, commas or brackets, as in 'key=\"a, b\"'"
        )
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.parent_node is not None:
        return _unknown_key(cause)
    lines = str(error).split("\nConfig search path")[0].splitlines()
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key}: {lines[0]}" if error.full_key else lines[0]
    return _one_line(lines)


def _unknown_key(cause: OmegaConfBaseException) -> str:
    keys = sorted(str(key) for key in cause.parent_node or () if key != "hydra")
    near = difflib.get_close_matches(str(cause.key), keys, n=2)
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    parent, _, _ = str(cause.full_key).rpartition(".")
    place = f"keys of {parent}" if parent else "keys"
    return f"unknown key {cause.full_key}{hint}; {place}: {', '.join(keys) or 'none'}"


def _one_line(lines: list[str]) -> str:
    """Join lines into one; indented lines are items of the list that the line before announces."""
    text = ""
    for line in filter(str.strip, lines):
        if not text or text[-1] in ".:":
            separator = " " if text else ""
        else:
            separator = ", " if line[0].isspace() else "; "
        text += separator + line.strip()
    return text
