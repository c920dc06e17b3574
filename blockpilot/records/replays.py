"""What a replay knows of every anchor: one safetensors file per prompt and turn.

They lie in `<run folder>/replay/` under the names of the prefill files, so a row finds its file.
Policies that decide per cycle are trained and scored on them without loading a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.base.files import make_folder, remove_leftovers, replace_file
from blockpilot.decoding.anchors import Marginals, Replay
from blockpilot.decoding.types import Plan
from blockpilot.records.prefill import tensor_file
from blockpilot.records.schema import Settings, group_key

_MARGINALS = ("rank", "top_tokens", "top_logprobs")


@dataclass(frozen=True)
class Text:
    """Token ids of a prompt and its answer."""

    ids: list[int]
    prompt_length: int


def save_replay(
    folder: Path, settings: Settings, text: Text, replay: Replay, features: Tensor | None
) -> Path:
    """Write the text, the accepted lengths per plan, the marginals and, where given, the features
    [T - 1, F], atomically; returns the path. Raises UserError when the system refuses the write.
    """
    path = _path(folder, settings.prompt_id, settings.turn, group_key(settings))
    make_folder(path.parent)
    plans = list(replay.accepted)
    tensors = {"ids": torch.tensor(text.ids, dtype=torch.int32)}
    tensors |= {f"accepted.{i}": replay.accepted[plan] for i, plan in enumerate(plans)}
    if replay.marginals is not None:
        tensors |= {name: getattr(replay.marginals, name) for name in _MARGINALS}
        tensors["top_logprobs"] = tensors["top_logprobs"].half()
    if features is not None:
        tensors["features"] = features.contiguous()
    metadata = {
        "prompt_id": settings.prompt_id,
        "prompt_length": str(text.prompt_length),
        "plans": json.dumps([[plan.drafted, plan.verified] for plan in plans]),
    }
    content = save(tensors, metadata)
    # Other processes write here too, but only this one to this prompt's file.
    remove_leftovers(path.parent, path.name)
    replace_file(path, lambda stream: stream.write(content))
    return path


def read_replay(folder: Path, row: Mapping[str, Any]) -> tuple[Text, Replay, Tensor | None]:
    """Text, replay and features that belong to a record row of the run in `folder`.

    Raises UserError when there is no such file or it is broken.
    """
    path = _path(folder, row["prompt_id"], int(row["turn"]), row["group_key"])
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        plans = [Plan(*pair) for pair in json.loads(metadata["plans"])]
        accepted = {plan: tensors[f"accepted.{i}"] for i, plan in enumerate(plans)}
        text = Text(tensors["ids"].tolist(), int(metadata["prompt_length"]))
        found = None
        if "rank" in tensors:
            found = Marginals(*(tensors[name] for name in _MARGINALS))
    except FileNotFoundError as error:
        raise UserError(f"no replay of prompt {row['prompt_id']}: {path}") from error
    except (SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
        raise UserError(f"{path} is broken: delete it and run the sweep again") from error
    return text, Replay(accepted, found), tensors.get("features")


def _path(folder: Path, prompt_id: str, turn: int, group: str) -> Path:
    return tensor_file(folder / "replay", prompt_id, turn, group)
