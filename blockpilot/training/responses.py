"""Responses that the target itself writes, the only text a drafter learns from.

Prompts go through batched `generate` with the keyed sampler, so a response is what the decode loop
would have produced. Every shard is a parquet file with a safetensors file of target features beside
it; both appear by rename, so an interrupted run continues with the next missing shard.

Letters: R prompts of a batch, P padded prompt length, T generated length, F feature width.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from blockpilot.decoding.features import FeatureTap
from blockpilot.decoding.sampling import KeyedLogitsProcessor, KeyedSampler
from blockpilot.decoding.target import Target
from blockpilot.errors import UserError
from blockpilot.prompts.base import Prompt
from blockpilot.prompts.render import render

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
    revision: str | None
    dtype: str
    temperature: float
    seed: int
    max_new_tokens: int
    feature_layers: tuple[int, ...]
    batch_size: int
    prompts: str  # digest of the prompt hashes, in order


@dataclass(frozen=True)
class Request:
    """A prompt ready for the target."""

    prompt: Prompt
    ids: list[int]


def requests(target: Target, prompts: Iterable[Prompt], thinking: bool | None) -> list[Request]:
    """First turns rendered; in an order that mixes the sets, so that any prefix is a fair mix."""
    ready = []
    for prompt in sorted(prompts, key=lambda p: p.hash):
        messages = [{"role": "user", "content": prompt.turns[0]}]
        if prompt.system is not None:
            messages.insert(0, {"role": "system", "content": prompt.system})
        ready.append(Request(prompt, render(target.tokenizer, messages, thinking)))
    return ready


def batches(ready: Sequence[Request], batch_size: int) -> list[list[Request]]:
    """Batches of prompts of similar length: within windows, so that the mix stays fair."""
    window = batch_size * _WINDOW
    ordered: list[Request] = []
    for start in range(0, len(ready), window):
        ordered += sorted(ready[start : start + window], key=lambda r: len(r.ids))
    return [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]


def open_folder(folder: Path, settings: ResponseSettings) -> None:
    """Create the folder or check that it was made with the same settings."""
    file = folder / "settings.json"
    wanted = json.dumps(asdict(settings), indent=1)
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(wanted)
        return
    found = json.loads(file.read_text())
    for key, value in json.loads(wanted).items():
        if found.get(key) != value:
            raise UserError(
                f"responses in {folder} were made with {key}={found.get(key)}, this run has "
                f"{value}; choose another paths.outputs or run id"
            )


def shard_file(folder: Path, index: int) -> Path:
    """Parquet file of a batch; its features have the suffix .safetensors."""
    return folder / f"shard-{index:05d}.parquet"


def write_responses(
    target: Target,
    work: Sequence[Sequence[Request]],
    folder: Path,
    settings: ResponseSettings,
    mine: Callable[[int], bool],
    progress: Callable[[int], None],
) -> None:
    """Answer all batches of this rank that have no shard yet; `progress` gets tokens per shard."""
    for index, batch in enumerate(work):
        file = shard_file(folder, index)
        if file.exists() or not mine(index):
            continue
        responses, features = respond(target, batch, settings)
        try:
            _write_shard(file, batch, responses, features)
        except OSError as error:
            raise UserError(f"cannot write {file}: {error.strerror}") from error
        progress(sum(map(len, responses)))


@torch.inference_mode()
def respond(
    target: Target, batch: Sequence[Request], settings: ResponseSettings
) -> tuple[list[list[int]], list[Tensor] | None]:
    """Responses, stop token included, and features [len(prompt) + len(response) - 1, F] of each.

    The last token of a response has no features: it was never fed to the target.
    """
    lengths = torch.tensor([len(r.ids) for r in batch])
    width = int(lengths.max())
    stop = sorted(target.stop_ids)
    ids = torch.full((len(batch), width), stop[0])
    mask = torch.zeros_like(ids)
    for row, request in enumerate(batch):
        ids[row, width - len(request.ids) :] = torch.tensor(request.ids)
        mask[row, width - len(request.ids) :] = 1
    sampler = KeyedSampler(
        temperature=settings.temperature,
        seed=settings.seed,
        prompt_hashes=[r.prompt.hash for r in batch],
    )
    padding = (width - lengths).to(target.device)
    tapped = bool(settings.feature_layers)
    with FeatureTap(target.layers, settings.feature_layers) if tapped else nullcontext() as tap:
        output = target.model.generate(
            input_ids=ids.to(target.device),
            attention_mask=mask.to(target.device),
            # A fresh config: a checkpoint's own sampling defaults would act beside the sampler.
            generation_config=GenerationConfig(
                max_new_tokens=settings.max_new_tokens,
                do_sample=False,
                eos_token_id=stop,
                pad_token_id=stop[0],
            ),
            logits_processor=[KeyedLogitsProcessor(sampler, padding)],
            cache=target.new_cache(width + settings.max_new_tokens),
        )
        captured = tap.take().cpu() if tap is not None else None  # [R, P + T - 1, F]
    responses = [_cut(row, target.stop_ids) for row in output[:, width:].tolist()]
    if captured is None:
        return responses, None
    features = [
        captured[row, width - len(request.ids) : width + len(response) - 1]
        for row, (request, response) in enumerate(zip(batch, responses, strict=True))
    ]
    return responses, features


def _cut(tokens: list[int], stop_ids: frozenset[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: index + 1]
    return tokens


def _write_shard(
    file: Path,
    batch: Sequence[Request],
    responses: Sequence[list[int]],
    features: Sequence[Tensor] | None,
) -> None:
    # The parquet file comes last: where it stands, the features stand too.
    if features is not None:
        scratch = file.with_suffix(".safetensors.tmp")
        save_file({"features": torch.cat(list(features))}, scratch)
        scratch.rename(file.with_suffix(".safetensors"))
    table = pa.table(
        {
            "prompt_id": [r.prompt.id for r in batch],
            "prompt_hash": [r.prompt.hash for r in batch],
            "prompt_set": [r.prompt.set for r in batch],
            "prompt_ids": [r.ids for r in batch],
            "response_ids": list(responses),
        },
        schema=SCHEMA,
    )
    scratch = file.with_suffix(".parquet.tmp")
    pq.write_table(table, scratch)
    scratch.rename(file)
