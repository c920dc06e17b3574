"""Prefill distribution and last hidden state: one safetensors file per prompt and turn.

They lie in `<run folder>/prefill/`, named after the prompt and the settings that its rows share, so
a row finds its file and a resumed run with any number of ranks writes the same names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.base.files import make_folder, remove_leftovers, replace_file
from blockpilot.records.schema import Settings, clean, group_key

_FOLDER = "prefill"
_NAME_LENGTH = 60  # file systems allow 255 bytes


@dataclass(frozen=True)
class Prefill:
    """Target output at the last prompt position: V vocabulary rows, D hidden width."""

    logits: Tensor  # [V], before softmax
    hidden: Tensor  # [D], input of the LM head


def save_prefill(folder: Path, settings: Settings, prefill: Prefill) -> Path:
    """Write the tensors of the prompt and turn of `settings`, atomically; returns the path.

    Any method of the prompt gives the same path, so call it once per prompt and turn. Raises
    UserError when the system refuses the write.
    """
    path = tensor_file(folder / _FOLDER, settings.prompt_id, settings.turn, group_key(settings))
    make_folder(path.parent)
    metadata = {
        "prompt_id": settings.prompt_id,
        "prompt_hash": settings.prompt_hash,
        "turn": str(settings.turn),
        "target": settings.target,
        "target_revision": settings.target_revision or "",
    }
    tensors = {
        "logits": prefill.logits.detach().cpu().contiguous(),
        "hidden": prefill.hidden.detach().cpu().contiguous(),
    }
    content = save(tensors, metadata)
    # Other processes write here too, but only this one to this prompt's file.
    remove_leftovers(path.parent, path.name)
    replace_file(path, lambda stream: stream.write(content))
    return path


def read_prefill(folder: Path, row: Mapping[str, Any]) -> Prefill:
    """Tensors that belong to a record row of the run in `folder`.

    Raises UserError when there is no such file or it is broken.
    """
    path = tensor_file(folder / _FOLDER, row["prompt_id"], int(row["turn"]), row["group_key"])
    try:
        tensors = load_file(path)
        for name in ("logits", "hidden"):
            if tensors[name].ndim != 1 or not tensors[name].is_floating_point():
                raise ValueError(f"{name} is no vector of floats")
        return Prefill(logits=tensors["logits"], hidden=tensors["hidden"])
    except FileNotFoundError as error:
        raise UserError(f"no prefill tensors for prompt {row['prompt_id']}: {path}") from error
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise UserError(f"{path} is broken: delete it and run the sweep again") from error


def tensor_file(folder: Path, prompt_id: str, turn: int, group: str) -> Path:
    """File of one prompt and turn in a folder of tensors; `group` is the rows' `group_key`."""
    # The hash keeps names apart that the slug maps to one.
    slug = re.sub(r"[^A-Za-z0-9._-]+", "_", clean(prompt_id)).strip("._")[:_NAME_LENGTH]
    digest = hashlib.sha256(f"{group}/{turn}".encode()).hexdigest()[:16]
    return folder / f"{slug or 'prompt'}-t{turn}-{digest}.safetensors"
