"""Networks of block drafters: read from a checkpoint, made new for a target, saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from blockpilot.base.errors import UserError
from blockpilot.decoding.protocols import TargetModel
from blockpilot.drafters.dflash_net import DFlashNetwork, default_layer_ids
from blockpilot.drafters.forms.checkpoints import fill_network, read_checkpoint, save_checkpoint
from blockpilot.drafters.forms.config import ConfigReader, check_layers
from blockpilot.drafters.forms.dflash import DFlashConfig
from blockpilot.drafters.forms.dflash_tensors import network_tensors
from blockpilot.drafters.layers import new_shape


def load_network(
    checkpoint: str, target: TargetModel, ignore_keys: Sequence[str] = ()
) -> DFlashNetwork:
    """The network of a checkpoint in the published form, in float32.

    Raises UserError when it is missing, unreachable, incomplete, of other shapes or says in a key
    outside `ignore_keys` what is not built.
    """
    if checkpoint == "random":
        ConfigReader({}, checkpoint, ignore_keys)
        return random_network(target)
    raw, weights = read_checkpoint(checkpoint)
    config = DFlashConfig.parse(raw, checkpoint, ignore_keys, weights)
    check_fits(config, target, checkpoint)
    network = DFlashNetwork(config)
    fill_network(network, network_tensors(config, weights, checkpoint), checkpoint)
    return network


def check_fits(config: DFlashConfig, target: TargetModel, where: str) -> None:
    """Refuse a drafter of another target by the first mismatch (UserError)."""
    target_config = target.config
    for what, drafter, wanted in (
        ("num_target_layers", config.num_target_layers, target_config.num_hidden_layers),
        ("hidden_size", config.layers.hidden_size, target_config.hidden_size),
        ("vocab_size", config.layers.vocab_size, target_config.vocab_size),
    ):
        if drafter not in (None, wanted):
            raise UserError(
                f"drafter {where}: {what}={drafter}, the target has {wanted}; "
                "it was trained for another target"
            )
    check_layers(config.target_layer_ids, target_config.num_hidden_layers, where)
    rows = config.layers.vocab_size if config.embeds else target.embed_rows
    if not 0 <= config.mask_token_id < rows:
        whose = "drafter" if config.embeds else "target"
        raise UserError(
            f"drafter {where}: mask_token_id={config.mask_token_id}, "
            f"allowed are 0..{rows - 1} (embedding rows of the {whose})"
        )


def new_config(
    target: TargetModel,
    *,
    n_layers: int,
    n_target_layers: int,
    block_size: int,
    mask_token_id: int,
) -> DFlashConfig:
    """A drafter as wide as its target, reading `n_target_layers` evenly spaced layers."""
    target_config: Any = target.config
    depth = target_config.num_hidden_layers
    if depth < 2:
        raise UserError(
            f"a DFlash drafter reads layers before the last one; {target.name} has only 1 layer"
        )
    room = max(1, depth - 3)
    if n_target_layers > room:
        raise UserError(
            f"n_target_layers={n_target_layers}: a target of {depth} layers has room for 1..{room}"
        )
    raw = {
        **new_shape(target_config),
        "num_hidden_layers": n_layers,
        "block_size": block_size,
        "mask_token_id": mask_token_id,
        "num_target_layers": depth,
        "target_layer_ids": default_layer_ids(depth, n_target_layers),
        "input_embedding_scale": target.embedding_scale,
    }
    return DFlashConfig.parse(raw, "new")


def random_network(target: TargetModel) -> DFlashNetwork:
    """Five layers, block 16, reading five target layers (fewer on shallow targets): random."""
    depth = target.config.num_hidden_layers
    config = new_config(
        target,
        n_layers=min(5, depth),
        n_target_layers=min(5, max(1, depth - 3)),
        block_size=16,
        mask_token_id=target.embed_rows - 1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DFlashNetwork(config)


def save_network(network: DFlashNetwork, folder: Path) -> None:
    """Write config.json and bf16 safetensors in the published form."""
    save_checkpoint(network, network.config.published(), folder)
