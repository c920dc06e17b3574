"""Prefill distribution and last hidden state: one safetensors file per prompt and turn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from blockpilot.base.errors import UserError
from blockpilot.base.files import make_folder, remove_leftovers, replace_file
from blockpilot.records.schema import Settings


@dataclass(frozen=True)
class Prefill:
    """Target output at the last prompt position: V vocabulary rows, D hidden width."""

    logits: Tensor  # [V], before softmax
    hidden: Tensor  # [D], input of the LM head


def write_prefill(file: Path, settings: Settings, prefill: Prefill) -> None:
    """Write the tensors of the prompt and turn of `settings`, atomically (UserError)."""
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
    write_tensors(file, tensors, metadata)


def read_prefill(file: Path, prompt_id: str) -> Prefill:
    """What `write_prefill` wrote. Raises UserError when there is no such file or it is broken."""
    try:
        tensors = load_file(file)
        for name in ("logits", "hidden"):
            if tensors[name].ndim != 1 or not tensors[name].is_floating_point():
                raise ValueError(f"{name} is no vector of floats")
        return Prefill(logits=tensors["logits"], hidden=tensors["hidden"])
    except FileNotFoundError as error:
        raise UserError(f"no prefill tensors for prompt {prompt_id}: {file}") from error
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise UserError(f"{file} is broken: delete it and run the sweep again") from error


def write_tensors(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file, atomically. Other processes write beside it, only this one to it."""
    make_folder(file.parent)
    content = save(tensors, metadata)
    remove_leftovers(file.parent, file.name)
    replace_file(file, lambda stream: stream.write(content))
