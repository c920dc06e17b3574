"""Reading of stored responses: token ids in memory, target features by slices of mapped files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from torch import Tensor

from blockpilot.errors import UserError


@dataclass(frozen=True)
class Example:
    """One conversation: ids [T] of prompt and response; features [T - 1, F] where stored."""

    prompt_set: str
    ids: Tensor
    prompt_length: int
    features: Tensor | None


class Corpus:
    """The conversations of some shards, in their order."""

    def __init__(self, shards: Sequence[Path]) -> None:
        self._rows: list[tuple[str, list[int], int, Path, int]] = []
        for file in shards:
            self._read(file)
        if not self._rows:
            raise UserError("no response has two tokens or more: nothing to train or measure on")
        self._handles: dict[Path, Any] = {}

    def _read(self, file: Path) -> None:
        start = 0
        for row in pq.read_table(file).to_pylist():
            ids = row["prompt_ids"] + row["response_ids"]
            place = (file.with_suffix(".safetensors"), start)
            start += len(ids) - 1
            if len(row["response_ids"]) >= 2:  # an anchor needs a successor
                self._rows.append((row["prompt_set"], ids, len(row["prompt_ids"]), *place))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        prompt_set, ids, prompt_length, file, start = self._rows[index]
        features = None
        if file.exists():
            if file not in self._handles:
                self._handles[file] = safe_open(file, "pt").__enter__()
            rows = self._handles[file].get_slice("features")
            features = rows[start : start + len(ids) - 1]
        return Example(prompt_set, torch.tensor(ids), prompt_length, features)

    @property
    def response_tokens(self) -> int:
        """Tokens that the target wrote."""
        return sum(len(ids) - prompt_length for _, ids, prompt_length, *_ in self._rows)

    def counts(self) -> dict[str, tuple[int, int]]:
        """Prompts and response tokens per prompt set."""
        totals: dict[str, tuple[int, int]] = {}
        for name, ids, prompt_length, *_ in self._rows:
            prompts, tokens = totals.get(name, (0, 0))
            totals[name] = prompts + 1, tokens + len(ids) - prompt_length
        return totals

    def response_vocabulary(self, size: int) -> Tensor:
        """Ids [K] that occur in any response, increasing."""
        seen = torch.zeros(size, dtype=torch.bool)
        for _, ids, prompt_length, *_ in self._rows:
            seen[ids[prompt_length:]] = True
        return seen.nonzero()[:, 0]
