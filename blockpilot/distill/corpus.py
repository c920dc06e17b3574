"""Reading of stored responses: token ids in memory, target features by slices of mapped files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.base.json_values import first_line
from blockpilot.distill.responses import read_shard


@dataclass(frozen=True)
class Example:
    """One conversation: ids [T] of prompt and response, and what was stored of its R new tokens."""

    prompt_set: str
    ids: Tensor
    prompt_length: int
    features: Tensor | None  # [T - 1, F]
    hidden: Tensor | None = None  # [R, D], inputs of the LM head that chose the response's tokens


@dataclass(frozen=True)
class _Row:
    """A conversation of a corpus, and where its tensors begin in the file of its shard."""

    prompt_set: str
    ids: list[int]
    prompt_length: int
    file: Path
    first_feature: int
    first_hidden: int

    @property
    def response(self) -> list[int]:
        return self.ids[self.prompt_length :]


class Corpus:
    """The conversations of some shards, in their order."""

    def __init__(self, shards: Sequence[Path]) -> None:
        self._handles: dict[Path, Any] = {}
        self.prompt_ids: list[str] = []  # of the conversations
        self._rows: list[_Row] = []
        for file in shards:
            self._read(file)
        if not self._rows:
            raise UserError("no response has two tokens or more: nothing to train or measure on")

    def _read(self, file: Path) -> None:
        tensors = file.with_suffix(".safetensors")
        n_features = n_hidden = 0
        for row in read_shard(file):
            ids = row["prompt_ids"] + row["response_ids"]
            if len(row["response_ids"]) >= 2:  # an anchor needs a successor
                self.prompt_ids.append(row["prompt_id"])
                length = len(row["prompt_ids"])
                self._rows.append(
                    _Row(row["prompt_set"], ids, length, tensors, n_features, n_hidden)
                )
            n_features += len(ids) - 1
            n_hidden += len(row["response_ids"])
        if tensors.exists():
            self._handles[tensors] = _opened(tensors, {"features": n_features, "hidden": n_hidden})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        row = self._rows[index]
        features = hidden = None
        if (stored := self._handles.get(row.file)) is not None:
            start, end = row.first_feature, row.first_feature + len(row.ids) - 1
            features = stored.get_slice("features")[start:end]
            start, end = row.first_hidden, row.first_hidden + len(row.response)
            hidden = stored.get_slice("hidden")[start:end]
        return Example(row.prompt_set, torch.tensor(row.ids), row.prompt_length, features, hidden)

    @property
    def response_tokens(self) -> int:
        """Tokens that the target wrote."""
        return sum(len(row.response) for row in self._rows)

    def counts(self) -> dict[str, tuple[int, int]]:
        """Prompts and response tokens per prompt set."""
        totals: dict[str, tuple[int, int]] = {}
        for row in self._rows:
            prompts, tokens = totals.get(row.prompt_set, (0, 0))
            totals[row.prompt_set] = prompts + 1, tokens + len(row.response)
        return totals

    def frequent_tokens(self, n: int, size: int) -> Tensor:
        """The at most `n` ids below `size` that occur most often in responses, increasing."""
        times = torch.zeros(size, dtype=torch.int64)
        for row in self._rows:
            times += torch.bincount(torch.tensor(row.response), minlength=size)
        most = times.sort(descending=True, stable=True).indices[: min(n, int((times > 0).sum()))]
        return most.sort().values

    def response_vocabulary(self, size: int) -> Tensor:
        """Ids [K] that occur in any response, increasing."""
        seen = torch.zeros(size, dtype=torch.bool)
        for row in self._rows:
            seen[row.response] = True
        return seen.nonzero()[:, 0]


def _opened(file: Path, rows: dict[str, int]) -> Any:
    """A mapped file of tensors with so many rows each. Raises UserError when it is damaged."""
    try:
        stored = safe_open(file, "pt").__enter__()
        for name, n in rows.items():
            if stored.get_slice(name).get_shape()[:1] != [n]:
                raise ValueError(f"{name} has not the {n} rows that its responses need")
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"{file}: no readable features ({first_line(error)}); delete it and its .parquet file "
            "and run again"
        ) from error
    return stored
