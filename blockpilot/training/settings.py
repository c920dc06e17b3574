"""The settings that stored work was made with, so that it is never mixed with work of others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockpilot.errors import UserError
from blockpilot.records.files import make_folder, replace_file


def keep_settings(file: Path, settings: Mapping[str, Any], *, what: str) -> None:
    """Write the settings of new work into a JSON file, or compare them with those that stand there.

    Raises:
        UserError: a setting differs from the one that `what` was made with, naming it.
    """
    text = json.dumps(settings, indent=1)
    if not file.exists():
        make_folder(file.parent)
        replace_file(file, lambda stream: stream.write(text.encode()))
        return
    found = json.loads(file.read_text())
    for key, value in json.loads(text).items():
        if found.get(key) != value:
            raise UserError(
                f"{what} in {file.parent} made with {key}={found.get(key)}, this run has {value}; "
                "choose another run_id or paths.outputs"
            )
