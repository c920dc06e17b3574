"""What stored work was made with, so that it is never mixed with others, and where it stands."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from blockpilot.base.errors import UserError
from blockpilot.base.files import make_folder, replace_file
from blockpilot.base.json_values import first_line, read_json


def keep_settings(
    file: Path, settings: Mapping[str, Any], *, what: str, parts: Mapping[str, Any] | None = None
) -> None:
    """Write the settings of new work into a JSON file, or compare them with those that stand there.

    `parts` are settings of what later work may add to: new ones are written down beside the old.

    Raises:
        UserError: a setting differs from the one that `what` was made with, naming it, or the file
            is damaged.
    """
    asked = json.loads(json.dumps(settings))  # tuples as the lists that a file gives back
    added = json.loads(json.dumps(dict(parts or {})))
    found: dict[str, Any] = {}
    if file.exists():
        found = read_json(file, what=f"settings of {what}")
        for key, value in {**asked, **added}.items():
            if found.get(key) != value and (key in asked or key in found):
                raise UserError(
                    f"{what} in {file.parent} made with {key}={found.get(key)}, this run has "
                    f"{value}; choose another run_id or paths.outputs"
                )
    now = {**found, **asked, **added}
    if now != found:
        make_folder(file.parent)
        text = json.dumps(now, indent=1).encode()
        replace_file(file, lambda stream: stream.write(text))


def load_state(file: Path, device: torch.device, keys: Iterable[str]) -> dict[str, Any]:
    """A checkpoint on a device. Raises UserError, naming the file, when it is damaged."""
    try:
        state = torch.load(file, weights_only=True, map_location=device)
        if missing := [key for key in keys if key not in state]:
            raise ValueError(f"no {missing[0]}")
    except Exception as error:  # an archive of pickles and tensors fails in a dozen ways
        raise damaged(file, error) from error
    return dict(state)


def damaged(file: Path, error: Exception) -> UserError:
    """The one line that tells a checkpoint which nothing can be continued from."""
    return UserError(
        f"{file}: no readable checkpoint ({first_line(error)}); delete it to train from the start"
    )
