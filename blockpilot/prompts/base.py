"""What a prompt is, and what a prompt set has to offer.

A set turns its source (hub rows, a file, package data) into `Prompt` values in a stable order.
It knows nothing of limits and splits: `blockpilot.prompts.load` applies both, over all the sets
of a run together.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from blockpilot.base.errors import UserError

DISTILL, POLICY, VALIDATION, TEST = SPLITS = ("distill", "policy", "validation", "test")
UNASSIGNED = ""
"""`Prompt.split` of a prompt that `assign_splits` has not seen yet."""


@dataclass(frozen=True)
class Prompt:
    """One conversation of which only the user's side is given.

    Attributes:
        id: "<set>/<stable key>", unique within a run.
        set: name of the prompt set.
        turns: user messages, already in the prompt format of the set.
        split: one of `SPLITS`, or `UNASSIGNED` as it leaves a set.
        system: system message, or None.
    """

    id: str
    set: str
    turns: tuple[str, ...]
    split: str
    system: str | None = None

    @cached_property
    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of system message and turns.

        The id and the set do not enter: the same conversation has the same hash wherever it
        comes from, so sampler noise and splits follow the text.
        """
        text = json.dumps([self.system, *self.turns], ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


class PromptSet(Protocol):
    """A component that delivers the prompts of one set.

    `name` is the first part of every prompt id; `held_out` says that the whole set is one the
    field tests on. Built from conf/prompts/<name>.yaml with keyword arguments.
    """

    @property
    def name(self) -> str: ...

    @property
    def held_out(self) -> bool: ...

    def load(self, path: Path | None = None) -> list[Prompt]:
        """All prompts in a stable order, `split` unassigned; from the file `path` if given.

        Raises:
            UserError: the source is missing, empty, malformed, or cannot be a file.
        """
        ...


def check_prompts(prompts: Iterable[Prompt], where: str) -> list[Prompt]:
    """The prompts of one set as a list, after the checks that hold for every source.

    Raises:
        UserError: there is none, or an id occurs twice (records are keyed by it).
    """
    checked = list(prompts)
    if not checked:
        raise UserError(f"{where}: no prompts in it")
    seen: set[str] = set()
    for prompt in checked:
        if prompt.id in seen:
            raise UserError(f"{where}: prompt id '{prompt.id}' occurs twice; ids must be unique")
        seen.add(prompt.id)
    return checked
