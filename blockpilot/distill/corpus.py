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


class Corpus:
    """The conversations of some shards, in their order."""

    def __init__(self, shards: Sequence[Path]) -> None:
        self._handles: dict[Path, Any] = {}
        self.prompt_ids: list[str] = []  # of the conversations
        self._rows: list[tuple[str, list[int], int, Path, int, int]] = []
        for file in shards:
            self._read(file)
        if not self._rows:
            raise UserError("no response has two tokens or more: nothing to train or measure on")

    def _read(self, file: Path) -> None:
        start = answered = 0
        for row in read_shard(file):
            ids = row["prompt_ids"] + row["response_ids"]
            place = (file.with_suffix(".safetensors"), start, answered)
            start += len(ids) - 1
            answered += len(row["response_ids"])
            if len(row["response_ids"]) >= 2:  # an anchor needs a successor
                self.prompt_ids.append(row["prompt_id"])
                self._rows.append((row["prompt_set"], ids, len(row["prompt_ids"]), *place))
        tensors = file.with_suffix(".safetensors")
        if tensors.exists():
            self._handles[tensors] = _opened(tensors, {"features": start, "hidden": answered})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        prompt_set, ids, prompt_length, file, start, answered = self._rows[index]
        features = hidden = None
        if (stored := self._handles.get(file)) is not None:
            features = stored.get_slice("features")[start : start + len(ids) - 1]
            end = answered + len(ids) - prompt_length
            hidden = stored.get_slice("hidden")[answered:end]
        return Example(prompt_set, torch.tensor(ids), prompt_length, features, hidden)

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

    def frequent_tokens(self, n: int, size: int) -> Tensor:
        """The at most `n` ids below `size` that occur most often in responses, increasing."""
        times = torch.zeros(size, dtype=torch.int64)
        for _, ids, prompt_length, *_ in self._rows:
            times += torch.bincount(torch.tensor(ids[prompt_length:]), minlength=size)
        most = times.sort(descending=True, stable=True).indices[: min(n, int((times > 0).sum()))]
        return most.sort().values

    def response_vocabulary(self, size: int) -> Tensor:
        """Ids [K] that occur in any response, increasing."""
        seen = torch.zeros(size, dtype=torch.bool)
        for _, ids, prompt_length, *_ in self._rows:
            seen[ids[prompt_length:]] = True
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
