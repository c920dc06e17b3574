"""Spec-Bench: six kinds of task in one file, each a set of its own in tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blockpilot.base.errors import UserError
from blockpilot.prompts.base import UNASSIGNED, Prompt, check_prompts
from blockpilot.prompts.local import LocalRows, Row, user_turns

MT_BENCH = (
    *("writing", "roleplay", "reasoning", "math"),
    *("coding", "extraction", "stem", "humanities"),
)
TASKS = {
    **dict.fromkeys(MT_BENCH, "conversation"),
    "translation": "translation",  # WMT14, German to English
    "summarization": "summaries",  # CNN/DailyMail
    "qa": "questions",  # Natural Questions
    "math_reasoning": "maths",  # GSM8K
    "rag": "retrieval",  # Natural Questions with passages
}
"""Task by category of the published file."""


@dataclass(frozen=True, kw_only=True)
class SpecBenchSet:
    """Prompts of a file with question_id, category and turns, as published.

    A prompt belongs to the set <name>-<task>, so that a table has a line for each task and a limit
    counts in each.
    """

    name: str
    held_out: bool
    path: Path | str | None

    def load(self, path: Path | None = None) -> list[Prompt]:
        """Raises UserError without a file, and for a category that Spec-Bench does not have."""
        chosen = path or self.path
        if chosen is None:
            raise UserError(
                f"prompt set '{self.name}' reads its published question.jsonl: give it with "
                "prompts.path=, or as spec-bench.jsonl in a folder of sets, BLOCKPILOT_PROMPTS"
            )
        rows = LocalRows(path=chosen).rows()
        return check_prompts((self._prompt(row) for row in rows), str(chosen))

    def _prompt(self, row: Row) -> Prompt:
        for key in ("question_id", "category", "turns"):
            if row.values.get(key) is None:
                raise UserError(f"{row.where}: not the layout of Spec-Bench, which has {key}")
        category = row.values["category"]
        if category not in TASKS:
            raise UserError(f"{row.where}: category={category}, allowed are {', '.join(TASKS)}")
        turns, _ = user_turns(row.values["turns"], row.where)
        name = f"{self.name}-{TASKS[category]}"
        return Prompt(f"{name}/{row.values['question_id']}", name, tuple(turns), UNASSIGNED)
