"""The prompts of a run, as it read them.

Records hold hashes only; who compares the prompts of several runs, or reads what was asked, needs
the words.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from blockpilot.base.errors import UserError
from blockpilot.base.files import replace_file
from blockpilot.base.json_values import first_line, fitted
from blockpilot.prompts.base import Prompt


def add_prompts(file: Path, prompts: Sequence[Prompt]) -> None:
    """Add prompts to those of earlier sessions of the run, atomically.

    Raises UserError when an id stood for another conversation there: rows would mix the two.
    """
    known = {prompt.id: prompt for prompt in _read(file)}
    for prompt in prompts:
        if prompt.id in known and known[prompt.id].hash != prompt.hash:
            raise UserError(
                f"prompt {prompt.id} is another conversation than in {file}; choose another run_id"
            )
    known |= {prompt.id: prompt for prompt in prompts}
    lines = [json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in known.values()]
    content = "".join(lines).encode()
    replace_file(file, lambda stream: stream.write(content))


def read_prompts(file: Path) -> list[Prompt]:
    """The prompts of a run. Raises UserError when there are none or the file is damaged."""
    prompts = _read(file)
    if not prompts:
        raise UserError(f"{file.parent} holds no {file.name}: run its sweep again, same run_id")
    return prompts


def _read(file: Path) -> list[Prompt]:
    if not file.exists():
        return []
    prompts: list[Prompt] = []
    try:
        # Not splitlines: a prompt may hold other line breaks, which JSON does not escape.
        for line in filter(None, file.read_text(encoding="utf-8").split("\n")):
            prompts.append(fitted(Prompt, json.loads(line)))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file}: what follows its first {len(prompts)} prompts is none ({first_line(error)}); "
            "delete the file and run the sweep again, same run_id"
        ) from error
    return prompts
