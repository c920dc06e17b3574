"""The settings that stored work was made with, so that it is never mixed with work of others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockpilot.errors import UserError
from blockpilot.records.files import make_folder, replace_file


def keep_settings(
    file: Path, settings: Mapping[str, Any], *, what: str, parts: Mapping[str, Any] | None = None
) -> None:
    """Write the settings of new work into a JSON file, or compare them with those that stand there.

    `parts` are settings of what later work may add to: new ones are written down beside the old.

    Raises:
        UserError: a setting differs from the one that `what` was made with, naming it.
    """
    asked = json.loads(json.dumps(settings))  # tuples as the lists that a file gives back
    added = json.loads(json.dumps(dict(parts or {})))
    found: dict[str, Any] = {}
    if file.exists():
        found = json.loads(file.read_text())
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
