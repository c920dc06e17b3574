"""Prompts written for this project and shipped inside the package."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain, zip_longest
from pathlib import Path

from blockpilot.base.errors import UserError
from blockpilot.prompts.base import UNASSIGNED, Prompt, check_prompts


@dataclass(frozen=True, kw_only=True)
class BundledSet:
    """The prompts of blockpilot/prompts/data/<kind>.jsonl, one of each kind in turn.

    Attributes:
        name: name of the set.
        held_out: whether all of it is test.
        formats: prompt format for each kind to load; {turn} stands for the user message.
    """

    name: str
    held_out: bool
    formats: Mapping[str, str]

    def load(self, path: Path | None = None) -> list[Prompt]:
        if path is not None:
            raise UserError(f"prompt set '{self.name}' is bundled and cannot be read from {path}")
        kinds = [self._of_kind(kind, template) for kind, template in self.formats.items()]
        mixed = (prompt for prompt in chain(*zip_longest(*kinds)) if prompt is not None)
        return check_prompts(mixed, f"prompt set '{self.name}'")

    def _of_kind(self, kind: str, template: str) -> Iterator[Prompt]:
        data = files("blockpilot.prompts") / "data"
        resource = data / f"{kind}.jsonl"
        if not resource.is_file():
            names = sorted(file.name for file in data.iterdir() if file.name.endswith(".jsonl"))
            known = [name.removesuffix(".jsonl") for name in names]
            raise UserError(
                f"prompt set '{self.name}': no bundled kind '{kind}'; allowed: {', '.join(known)}"
            )
        for line in resource.read_text("utf-8").splitlines():
            values = json.loads(line)
            turns = tuple(template.replace("{turn}", turn) for turn in values["turns"])
            yield Prompt(f"{self.name}/{values['id']}", self.name, turns, UNASSIGNED)
