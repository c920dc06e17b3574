"""Loads the prompt sets of a run together: splits first, limits after."""

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from blockpilot.base.errors import UserError
from blockpilot.prompts.base import SPLITS, Prompt, PromptSet
from blockpilot.prompts.splits import assign_splits

log = logging.getLogger(__name__)


def load_prompts(
    sets: Mapping[str, PromptSet],
    *,
    limit: int | None,
    path: Path | str | None,
    split: str | None,
    folder: Path | str | None = None,
) -> list[Prompt]:
    """The prompts of all sets, in the order of the sets and of their sources.

    Args:
        sets: what conf/prompts/*.yaml builds, by name.
        limit: at most so many prompts of each set, or task of one, after the split; None for all.
        path: file to read the one set from, in the set's published layout.
        split: keep only this split; None keeps all four.
        folder: where copies of sets may lie as <set>.<suffix>, in their published layout; sets
            without a copy are read from their own source.

    Raises:
        UserError: no set, `path` with several sets, an unknown split, or nothing left.
    """
    if not sets:
        raise UserError("no prompt set chosen; name one or more with prompts=[...]")
    if split is not None and split not in SPLITS:
        raise UserError(f"prompts.split={split} is unknown; allowed: {', '.join(SPLITS)} or null")
    if limit is not None and limit < 1:
        raise UserError(f"prompts.limit={limit} leaves no prompts; give a number >= 1, or null")
    if path is not None and len(sets) > 1:
        raise UserError(
            f"prompts.path belongs to one set, but {len(sets)} are chosen ({', '.join(sets)});"
            " choose the one whose layout the file has, or prompts=local for a file of your own"
        )
    loaded: list[Prompt] = []
    parts: dict[str, set[str]] = {}  # what a set calls its prompts: itself, or tasks of it
    for name, prompt_set in sets.items():
        file = Path(path) if path is not None else _copy_in(folder, prompt_set.name)
        found = prompt_set.load(file)
        parts[name] = {prompt.set for prompt in found}
        loaded += found
    held_out = set().union(*(parts[name] for name in sets if sets[name].held_out))
    assigned = assign_splits(loaded, held_out)
    kept: list[Prompt] = []
    taken: Counter[str] = Counter()
    for prompt in assigned:
        if split in (None, prompt.split) and (limit is None or taken[prompt.set] < limit):
            taken[prompt.set] += 1
            kept.append(prompt)
    if not kept:
        sizes = Counter(prompt.split for prompt in assigned)
        there = ", ".join(f"{name} {sizes[name]}" for name in SPLITS)
        why = f"; held out for test: {', '.join(sorted(held_out))}" if held_out else ""
        raise UserError(f"prompts.split={split} leaves no prompts (there are: {there}{why})")
    for name in sets:
        if not any(taken[part] for part in parts[name]):
            log.warning("prompt set '%s' has no prompts in split '%s'", name, split)
    return kept


def _copy_in(folder: Path | str | None, name: str) -> Path | None:
    """The file of a set in a folder of copies, if there is one. Raises UserError for several."""
    if folder is None:
        return None
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise UserError(f"prompts.folder={folder}: no such folder")
    found = sorted(file for file in place.iterdir() if file.name.split(".")[0] == name)
    if len(found) > 1:
        raise UserError(
            f"prompts.folder={folder}: {' and '.join(f.name for f in found)} are one set"
        )
    return found[0] if found else None
