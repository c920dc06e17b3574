"""Drafters on disk: config.json and weights under the published names, never code.

A checkpoint is a folder, a hub repository, or `bundled:<name>` for weights shipped with the
package.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from blockpilot.base.errors import UserError
from blockpilot.base.hub import folder_of
from blockpilot.base.provenance import digest
from blockpilot.decoding.protocols import TargetModel

_BUNDLED = "bundled:"


def read_checkpoint(
    checkpoint: str, *, pickles: bool = False
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of a drafter; with `pickles` also of a pytorch_model.bin, of which
    tensors alone are read. Raises UserError when it is missing, unreachable or unreadable.
    """
    folder = checkpoint_folder(checkpoint, pickles=pickles)
    weights: dict[str, Tensor] = {}
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError("config.json is not a JSON object")
        for file in sorted(folder.glob("*.safetensors")):
            weights |= load_file(file)
        if not weights and pickles:
            for file in sorted(folder.glob("*.bin")):
                weights |= torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # readers of three formats raise a dozen unrelated kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"drafter {checkpoint}: cannot read {folder} ({reason})") from error
    return raw, weights


def checkpoint_folder(checkpoint: str, *, pickles: bool = False) -> Path:
    """Where the files of a checkpoint lie (UserError when nowhere)."""
    if checkpoint.startswith(_BUNDLED):
        weights = Path(__file__).parents[1] / "weights"
        folder = weights / checkpoint.removeprefix(_BUNDLED)
        if not folder.is_dir():
            known = ", ".join(sorted(p.name for p in weights.glob("*"))) or "none"
            raise UserError(f"drafter {checkpoint}: not shipped; shipped are {known}")
        return folder
    return folder_of(f"drafter {checkpoint}", checkpoint, pickles=pickles)


def fill_network(network: nn.Module, weights: Mapping[str, Tensor], checkpoint: str) -> None:
    """Load tensors that have to be exactly the network's, and finite (UserError naming the first
    that is not).

    The network is float32 afterwards.
    """
    wanted = network.state_dict()
    for key, tensor in wanted.items():
        if key not in weights:
            raise UserError(f"drafter {checkpoint}: tensor {key} is missing")
        if weights[key].shape != tensor.shape:
            raise UserError(
                f"drafter {checkpoint}: tensor {key} has shape {list(weights[key].shape)}, "
                f"its config.json means {list(tensor.shape)}"
            )
        if tensor.is_floating_point() and not weights[key].isfinite().all():
            raise UserError(f"drafter {checkpoint}: tensor {key} holds values that are not finite")
    if unknown := sorted(set(weights) - set(wanted)):
        raise UserError(f"drafter {checkpoint}: unknown tensor {unknown[0]}")
    network.load_state_dict(dict(weights))
    network.float()


def settle(network: nn.Module, target: TargetModel) -> None:
    """Move a network, once loaded, to where its target decodes: device, dtype, no gradients.

    Its rotary frequencies stay float32, as those of a target do: rounded to 16 bits they turn
    far positions by other angles than the network was trained with.
    """
    network.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    rotary: Any = getattr(network, "rotary", None)
    if rotary is None:
        return
    network.rotary = type(rotary)(rotary.config).to(target.device)


def fingerprint_of(
    checkpoint: str, network: nn.Module, config: Mapping[str, Any], ignored: Sequence[str]
) -> str:
    """What decides a drafter's proposals, in one line: weights, published config, ignored keys."""
    parts = digest(network) + json.dumps(config, sort_keys=True)
    found = f"{checkpoint}@{hashlib.sha256(parts.encode()).hexdigest()[:12]}"
    return f"{found},ignore_keys={'+'.join(sorted(ignored))}" if ignored else found


def size_of(network: nn.Module) -> str:
    """How large a network is, in words."""
    return f"{sum(weight.numel() for weight in network.parameters())} parameters"


def save_checkpoint(network: nn.Module, config: Mapping[str, Any], folder: Path) -> None:
    """Write config.json and safetensors, floats in bf16, in the published form."""
    weights = {}
    for key, tensor in network.state_dict().items():
        dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
        weights[key] = tensor.detach().to("cpu", dtype).contiguous()
    write_checkpoint(config, weights, folder)


def write_checkpoint(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], folder: Path
) -> None:
    """Write config.json and safetensors as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    scratch = folder / "model.safetensors.tmp"
    scratch.write_bytes(
        save(dict(weights), metadata={"format": "pt"})
    )  # save_file: for its user alone
    scratch.rename(folder / "model.safetensors")
