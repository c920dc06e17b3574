"""Responses that the target itself writes, the only text a drafter learns from.

Every shard is a parquet file with a safetensors file of what the target computed beside it, its
features and the inputs of its LM head; both appear by rename, so an interrupted run continues with
the next missing shard.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save

from blockpilot.base.errors import UserError
from blockpilot.base.files import replace_file
from blockpilot.base.json_values import first_line
from blockpilot.base.launch import world
from blockpilot.decoding.answers import Answer, answer
from blockpilot.decoding.sampling import KeyedSampler
from blockpilot.decoding.target import Target
from blockpilot.prompts.base import Prompt
from blockpilot.records.settings import keep_settings

log = logging.getLogger(__name__)

SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("prompt_hash", pa.string()),
        ("prompt_set", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
    ]
)
_WINDOW = 8  # batches whose prompts are sorted by length together


@dataclass(frozen=True)
class ResponseSettings:
    """What the text of the responses depends on; a folder holds one such setting."""

    target: str
    target_fingerprint: str
    tokenizer: str
    revision: str | None
    dtype: str
    thinking: bool | None
    template_date: str
    temperature: float
    seed: int
    max_new_tokens: int
    feature_layers: tuple[int, ...]
    batch_size: int


@dataclass(frozen=True)
class Request:
    """A prompt ready for the target."""

    prompt: Prompt
    ids: list[int]


def batches(ready: Sequence[Request], batch_size: int) -> list[list[Request]]:
    """Batches of prompts of similar length: within windows, so that the mix stays fair."""
    window = batch_size * _WINDOW
    ordered: list[Request] = []
    for start in range(0, len(ready), window):
        ordered += sorted(ready[start : start + window], key=lambda r: len(r.ids))
    return [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]


def open_folder(folder: Path, settings: ResponseSettings) -> None:
    """Create the folder or check that it was made with the same settings."""
    keep_settings(folder / "settings.json", asdict(settings), what="responses")


def shard_file(folder: Path, index: int) -> Path:
    """Parquet file of a batch; its features have the suffix .safetensors."""
    return folder / f"shard-{index:05d}.parquet"


def answer_all(
    target: Target,
    sets: Mapping[str, Sequence[Request]],
    folder: Path,
    settings: ResponseSettings,
) -> list[Path]:
    """Shards of the target's responses, every prompt set's in its folder.

    Every rank writes its share of the batches; the shards of the others may not be there yet.
    """
    ranks = world()
    shards: list[Path] = []
    for name, ready in sets.items():
        open_folder(folder / name, settings)
        work = batches(ready, settings.batch_size)
        # In turn over all sets: of many small ones, the first rank would have every batch.
        for index in range((ranks.rank - len(shards)) % ranks.size, len(work), ranks.size):
            begin = time.monotonic()
            if tokens := write_responses(target, work[index], folder / name, index, settings):
                pace = tokens / (time.monotonic() - begin)
                log.info(
                    "%s %s: batch %d/%d, %.0f tokens/s",
                    *(folder.name, name, index + 1, len(work), pace),
                )
        shards += [shard_file(folder / name, index) for index in range(len(work))]
    return shards


def write_responses(
    target: Target,
    batch: Sequence[Request],
    folder: Path,
    index: int,
    settings: ResponseSettings,
) -> int:
    """Answer one batch and store its shard; response tokens written, 0 if it stood there."""
    file = shard_file(folder, index)
    if file.exists():
        _check_shard(file, batch)
        return 0
    sampler = KeyedSampler(
        temperature=settings.temperature,
        seed=settings.seed,
        prompt_hashes=[request.prompt.hash for request in batch],
    )
    answers = answer(
        target,
        [request.ids for request in batch],
        sampler,
        settings.max_new_tokens,
        settings.feature_layers,
    )
    _write_shard(file, batch, answers)
    return sum(len(each.tokens) for each in answers)


def read_shard(file: Path) -> list[dict[str, Any]]:
    """Rows of a shard. Raises UserError when it is damaged."""
    try:
        table = pq.read_table(file)
        if not table.schema.equals(SCHEMA):
            raise ValueError("other columns")
        return list(table.to_pylist())
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(
            f"{file}: no readable responses ({first_line(error)}); delete it and run again"
        ) from error


def _check_shard(file: Path, batch: Sequence[Request]) -> None:
    stored = [row["prompt_ids"] for row in read_shard(file)]
    if stored != [request.ids for request in batch]:
        raise UserError(
            f"{file} holds responses to other prompts than this run asks for; "
            "choose another run_id or delete the folder"
        )


def _write_shard(
    file: Path,
    batch: Sequence[Request],
    answers: Sequence[Answer],
) -> None:
    # The parquet file comes last: where it stands, the features stand too.
    features = [each.features for each in answers if each.features is not None]
    if features:
        hidden = torch.cat([each.hidden for each in answers])
        packed = save({"features": torch.cat(features), "hidden": hidden})
        replace_file(file.with_suffix(".safetensors"), lambda stream: stream.write(packed))
    table = pa.table(
        {
            "prompt_id": [r.prompt.id for r in batch],
            "prompt_hash": [r.prompt.hash for r in batch],
            "prompt_set": [r.prompt.set for r in batch],
            "prompt_ids": [r.ids for r in batch],
            "response_ids": [each.tokens for each in answers],
        },
        schema=SCHEMA,
    )
    replace_file(file, lambda stream: pq.write_table(table, stream))
