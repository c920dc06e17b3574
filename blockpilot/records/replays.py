"""What a replay knows of every anchor: one safetensors file per prompt and turn.

Policies that decide per cycle are trained and scored on them without loading a model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.decoding.anchors import Marginals, Replay
from blockpilot.decoding.types import Block
from blockpilot.records.prefill import write_tensors
from blockpilot.records.schema import Settings

_MARGINALS = ("rank", "top_tokens", "top_logprobs")


@dataclass(frozen=True)
class Text:
    """Token ids of a prompt and its answer."""

    ids: list[int]
    prompt_length: int


def write_replay(
    file: Path, settings: Settings, text: Text, replay: Replay, features: Tensor | None
) -> None:
    """Write the text, the accepted lengths per block, the marginals and, where given, the features
    [T - 1, F], atomically (UserError).
    """
    blocks = list(replay.accepted)
    tensors = {"ids": torch.tensor(text.ids, dtype=torch.int32)}
    tensors |= {f"accepted.{i}": replay.accepted[block] for i, block in enumerate(blocks)}
    if replay.marginals is not None:
        tensors |= {name: getattr(replay.marginals, name) for name in _MARGINALS}
        tensors["top_logprobs"] = tensors["top_logprobs"].half()
        if replay.marginals.after is not None:
            tensors["after"] = replay.marginals.after.half()
    if features is not None:
        tensors["features"] = features.contiguous()
    metadata = {
        "prompt_id": settings.prompt_id,
        "prompt_length": str(text.prompt_length),
        "plans": json.dumps([[block.drafted, block.verified] for block in blocks]),
    }
    write_tensors(file, tensors, metadata)


def read_replay(file: Path, prompt_id: str) -> tuple[Text, Replay, Tensor | None]:
    """Text, replay and features that `write_replay` wrote.

    Raises UserError when there is no such file or it is broken.
    """
    try:
        with safe_open(file, "pt") as stored:
            metadata = stored.metadata()
        tensors = load_file(file)
        blocks = [Block(*pair) for pair in json.loads(metadata["plans"])]
        accepted = {block: tensors[f"accepted.{i}"] for i, block in enumerate(blocks)}
        text = Text(tensors["ids"].tolist(), int(metadata["prompt_length"]))
        found = None
        if "rank" in tensors:
            rank, tokens, logprobs = (tensors[name] for name in _MARGINALS)
            found = Marginals(rank, tokens, logprobs, tensors.get("after"))
    except FileNotFoundError as error:
        raise UserError(f"no replay of prompt {prompt_id}: {file}") from error
    except (SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
        raise UserError(f"{file} is broken: delete it and run the sweep again") from error
    return text, Replay(accepted, found), tensors.get("features")
