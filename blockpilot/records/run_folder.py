"""The folder of a run of `sweep`, `cost` or `evaluate`: what lies in it, and under which names.

Further files of a stage (of `dataset`, `train`, `distill`, `report`, `pipeline`) are named there.

<outputs>/<stage>/<run id>/
    status.json, error.txt           how the last call stands (`app.status`)
    settings.json                    what all rows share, and what each method means
    rank00/, rank01/, ...            rows as each process wrote them (`records.store`)
    records.parquet                  the rows that count, derived
    prompts.jsonl                    the prompts in words
    prefill/, replay/                tensors per prompt and turn
    learnt/                          tensors per method whose drafter learns: its latest update
    cost.json                        of the stage `cost`
    evaluation.csv, timed.csv        of the stage `evaluate`, of predictors
    ladder.csv                       of the stage `evaluate`, of pilots
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.base.json_values import first_line, read_json
from blockpilot.decoding.anchors import Replay
from blockpilot.prompts.base import Prompt
from blockpilot.records import prompts as texts
from blockpilot.records import store
from blockpilot.records.prefill import Prefill, read_prefill, write_prefill, write_tensors
from blockpilot.records.replays import Text, read_replay, write_replay
from blockpilot.records.schema import Settings, clean, group_key
from blockpilot.records.settings import keep_settings

EVALUATION = "evaluation.csv"

_NAME_LENGTH = 60  # file systems allow 255 bytes


@dataclass(frozen=True)
class RunFolder:
    """A run's results by what they are."""

    path: Path

    @property
    def cost_curve(self) -> Path:
        """File of a measured cost curve."""
        return self.path / "cost.json"

    @property
    def evaluation(self) -> Path:
        """File of the lines of an evaluation."""
        return self.path / EVALUATION

    @property
    def timed_evaluation(self) -> Path:
        """File of the lines of a timed sweep within an evaluation."""
        return self.path / "timed.csv"

    @property
    def ladder(self) -> Path:
        """File of what each part of pilots adds."""
        return self.path / "ladder.csv"

    @property
    def kind(self) -> str:
        """Which stage's results lie here: sweep, evaluate or cost. UserError for none of them."""
        kinds = {
            "sweep": store.holds_rows(self.path),
            "evaluate": self.evaluation.exists() or self.ladder.exists(),
            "cost": self.cost_curve.exists(),
        }
        for stage, is_here in kinds.items():
            if is_here:
                return stage
        raise UserError(
            f"runs: {self.path} holds no records, {self.evaluation.name} or {self.cost_curve.name}"
        )

    def keep_settings(self, shared: Mapping[str, Any], methods: Mapping[str, Any]) -> None:
        """Write down what all rows share and what methods mean, or compare it with what stands.

        Methods may be added. UserError naming the first setting that differs.
        """
        keep_settings(self.path / "settings.json", shared, what="rows", parts=methods)

    @property
    def predicted_by(self) -> str | None:
        """Digest of the cost curve that the times of a replayed sweep were predicted by."""
        file = self.path / "settings.json"
        digest = read_json(file, what="settings").get("cost") if file.exists() else None
        return None if digest is None else str(digest)

    def columns(self, names: Sequence[str]) -> pa.Table:
        """Some columns of the rows that count; empty when there are none (UserError: damaged)."""
        return store.read_table(self.path, names)

    def records(self) -> pd.DataFrame:
        """The rows that count, all columns, in one order (UserError: none, or damaged)."""
        return store.read_records(self.path)

    def derive_parquet(self) -> Path:
        """Write the rows that count as one file, for notebooks; its path."""
        return store.write_parquet(self.path)

    def target_parameters(self) -> int:
        """Parameters of the target whose answers were measured here."""
        try:
            newest = store.read_manifests(self.path)[0]["sessions"][-1]
            return int(newest["provenance"]["target_parameters"])
        except (LookupError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.path}: manifest.json describes no target ({first_line(error)}); run its "
                "sweep again"
            ) from error

    def keep_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Add prompts in words; UserError where an id stood for another conversation."""
        texts.add_prompts(self.path / "prompts.jsonl", prompts)

    def prompts(self) -> list[Prompt]:
        """The prompts of all sessions (UserError: none, or damaged)."""
        return texts.read_prompts(self.path / "prompts.jsonl")

    def keep_prefill(self, settings: Settings, prefill: Prefill) -> Path:
        """Write what the target said at the end of a prompt; the same file for all its methods."""
        file = self._tensors("prefill", settings.prompt_id, settings.turn, group_key(settings))
        write_prefill(file, settings, prefill)
        return file

    def prefill(self, row: Mapping[str, Any]) -> Prefill:
        """What belongs to a row (UserError: none, or damaged)."""
        return read_prefill(self._tensors_of("prefill", row), row["prompt_id"])

    @property
    def has_replays(self) -> bool:
        """Whether a replayed sweep kept its anchors here."""
        return (self.path / "replay").is_dir()

    def keep_replay(
        self, settings: Settings, text: Text, replay: Replay, features: Tensor | None
    ) -> Path:
        """Write what a replay knows of every anchor; the same file for all methods of a prompt."""
        file = self._tensors("replay", settings.prompt_id, settings.turn, group_key(settings))
        write_replay(file, settings, text, replay, features)
        return file

    def replay(self, row: Mapping[str, Any]) -> tuple[Text, Replay, Tensor | None]:
        """Text, replay and features that belong to a row (UserError: none, or damaged)."""
        return read_replay(self._tensors_of("replay", row), row["prompt_id"])

    def keep_learnt(self, method: str, tensors: dict[str, Tensor]) -> None:
        """Write what the drafter of a method has learnt, in the place of what it had before."""
        write_tensors(self._learnt(method), tensors, {"method": method})

    def learnt(self, method: str) -> dict[str, Tensor] | None:
        """What the drafter of a method had learnt, None where nothing (UserError: damaged)."""
        file = self._learnt(method)
        if not file.exists():
            return None
        try:
            return load_file(file)
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file} is broken ({first_line(error)}); use another run_id"
            ) from error

    def _learnt(self, method: str) -> Path:
        return self.path / "learnt" / f"{method}.safetensors"

    def _tensors_of(self, kind: str, row: Mapping[str, Any]) -> Path:
        return self._tensors(kind, row["prompt_id"], int(row["turn"]), row["group_key"])

    def _tensors(self, kind: str, prompt_id: str, turn: int, group: str) -> Path:
        """One prompt and turn; any number of ranks and sessions gives it the same name."""
        # The hash keeps names apart that the slug maps to one.
        slug = re.sub(r"[^A-Za-z0-9._-]+", "_", clean(prompt_id)).strip("._")[:_NAME_LENGTH]
        digest = hashlib.sha256(f"{group}/{turn}".encode()).hexdigest()[:16]
        return self.path / kind / f"{slug or 'prompt'}-t{turn}-{digest}.safetensors"
