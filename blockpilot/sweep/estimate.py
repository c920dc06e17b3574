"""What a sweep will take, from its configuration and prompts alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from hydra.utils import get_class, instantiate

from blockpilot.app.config import SweepConfig
from blockpilot.app.target import model_shape
from blockpilot.base.devices import pick_device, pick_dtype
from blockpilot.costs.curve import load_cost
from blockpilot.decoding.anchors import TOP
from blockpilot.decoding.replay import can_replay
from blockpilot.prompts.base import Prompt
from blockpilot.sweep.methods import tree_policies


def mode_of(cfg: SweepConfig) -> str:
    """Whether a sweep will `replay` or `decode`: a drafter that cannot be replayed is decoded."""
    return cfg.mode if can_replay(get_class(cfg.drafter["_target_"])) else "decode"


def sweep_estimate(cfg: SweepConfig, prompts: Sequence[Prompt]) -> dict[str, float | str]:
    """Counts and upper bounds by name: every answer is taken to use up its budget.

    The sizes are those of a drafter with a trained block size; sizes that its block mode or a
    listed duplicate rules out make the run smaller.
    """
    turns = sum(len(prompt.turns) for prompt in prompts)
    n_sizes = len({*cfg.sizes} - {1}) + 2 * cfg.radius + 1
    trees = tree_policies(cfg)
    n_methods = n_sizes + len(trees) + len(cfg.methods) + 1  # and plain decoding
    budget = cfg.decoding.max_new_tokens
    shape = model_shape(cfg.model)
    width = torch.finfo(pick_dtype(cfg.dtype, cfg.model.dtype, pick_device(cfg.device))).bits // 8
    per_turn = (shape.vocab_size + shape.hidden_size) * width
    mode = mode_of(cfg)
    estimate: dict[str, float | str] = {
        "mode": mode,
        "prompts": len(prompts),
        "turns": turns,
        "rows": turns * n_methods,
    }
    if mode == "decode":
        estimate["target forwards, at most"] = turns * n_methods * budget
    else:
        batches = math.ceil(len(prompts) / cfg.replay.batch_size)
        rounds = max((len(prompt.turns) for prompt in prompts), default=0)
        estimate["target forwards of a batch, at most"] = batches * rounds * budget
        estimate["blocks drafted, at most"] = turns * n_sizes * budget
        if cfg.replay.marginals:
            # Methods that bring a drafter of their own are refused in a replay.
            policies = [
                *trees.values(),
                *(
                    instantiate(each, _convert_="all")
                    for each in cfg.methods.values()
                    if "_target_" in each
                ),
            ]
            kept = max([TOP, *(getattr(policy, "candidates", 0) for policy in policies)])
            kept = min(kept, shape.vocab_size)
            # Slots of a block are unknown before the drafter is loaded: 16 is the published size.
            per_turn += 16 * budget * (4 + 6 * kept)
    estimate["GB on disk, at most"] = round(turns * per_turn / 1e9, 3)
    if cfg.cost is not None and Path(cfg.cost).exists():  # a pipeline may measure it first
        # Of plain decoding alone: what the drafted sizes take depends on their tau.
        seconds = turns * budget * load_cost(cfg.cost, {}).seconds(1, budget)
        estimate["hours of plain decoding, at most"] = round(seconds / 3600, 2)
    return estimate
