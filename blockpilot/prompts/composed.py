"""Prompts composed from templates and topics: many varied requests from little text.

They exist to train drafters: what is wanted is the target's answers in many registers, and
nobody's benchmark is touched. The file holds blocks of templates and topics that fit together.
"""

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from blockpilot.base.errors import UserError
from blockpilot.prompts.base import UNASSIGNED, Prompt, check_prompts


@dataclass(frozen=True, kw_only=True)
class ComposedSet:
    """Every template of every block with every topic of that block, ordered by conversation hash.

    The order makes any first N of them a fair sample of all.
    """

    name: str
    held_out: bool
    file: str

    def load(self, path: Path | None = None) -> list[Prompt]:
        if path is not None:
            raise UserError(f"prompt set '{self.name}' is composed and cannot be read from {path}")
        resource = files("blockpilot.prompts") / "data" / self.file
        blocks = tomllib.loads(resource.read_text("utf-8"))["block"]
        prompts = (
            Prompt(
                id=f"{self.name}/{block['name']}-{t}-{k}",
                set=self.name,
                turns=(template.replace("{topic}", topic),),
                split=UNASSIGNED,
            )
            for block in blocks
            for t, template in enumerate(block["templates"])
            for k, topic in enumerate(block["topics"])
        )
        return check_prompts(sorted(prompts, key=lambda prompt: prompt.hash), self.file)
