"""The prompts of a run, as it read them: `prompts.jsonl` in its folder.

Records hold hashes only; who compares the prompts of several runs, or reads what was asked, needs
the words.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from blockpilot.errors import UserError
from blockpilot.prompts.base import Prompt
from blockpilot.records.files import replace_file


def save_prompts(folder: Path, prompts: Sequence[Prompt]) -> None:
    """Add prompts to those of earlier sessions of the run, atomically.

    Raises UserError when an id stood for another conversation there: rows would mix the two.
    """
    known = {prompt.id: prompt for prompt in _read(folder)}
    for prompt in prompts:
        if prompt.id in known and known[prompt.id].hash != prompt.hash:
            raise UserError(
                f"prompt {prompt.id} is another conversation than in {folder}/prompts.jsonl; "
                "choose another run_id"
            )
    known |= {prompt.id: prompt for prompt in prompts}
    lines = [json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in known.values()]
    content = "".join(lines).encode()
    replace_file(folder / "prompts.jsonl", lambda stream: stream.write(content))


def read_prompts(folder: Path) -> list[Prompt]:
    """Prompts of the run in `folder`. Raises UserError when it has none."""
    prompts = _read(folder)
    if not prompts:
        raise UserError(f"{folder} holds no prompts.jsonl: run its sweep again, same run_id")
    return prompts


def _read(folder: Path) -> list[Prompt]:
    file = folder / "prompts.jsonl"
    if not file.exists():
        return []
    # Not splitlines: a prompt may hold other line breaks, which JSON does not escape.
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
    return [Prompt(**{**row, "turns": tuple(row["turns"])}) for row in rows]
