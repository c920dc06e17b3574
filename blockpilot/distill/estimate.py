"""What a distillation will take, computed without a target."""

from __future__ import annotations

from blockpilot.app.config import DistillConfig
from blockpilot.app.target import model_shape
from blockpilot.distill.prompts import chosen, read_prompts
from blockpilot.distill.recipe import Recipe
from blockpilot.prompts.base import DISTILL, VALIDATION


def distill_estimate(cfg: DistillConfig, recipe: Recipe) -> dict[str, float | str]:
    """Counts and sizes by name; every answer is taken to use up its budget."""
    prompts = read_prompts(cfg)
    learnt, measured = (
        sum(map(len, chosen(cfg, prompts, split).values())) for split in (DISTILL, VALIDATION)
    )
    learnt += sum(each.count for each in cfg.responses.self_written.values())
    tokens = (learnt + measured) * cfg.decoding.max_new_tokens
    training = cfg.training
    estimate: dict[str, float | str] = {
        "answers to learn from, at most": learnt,
        "answers to measure on": measured,
        "response tokens, at most": tokens,
        "optimizer steps": training.steps,
        "blocks per process, at most": training.steps
        * training.sequences_per_step
        * training.anchors_per_sequence,
    }
    if cfg.responses.store_features:
        # Features of the layers and the input of the LM head, 2 bytes a number.
        stored = tokens * (recipe.n_target_layers + 1) * model_shape(cfg.model).hidden_size * 2
        estimate["GB of response features and states in 16 bits, at most"] = round(stored / 1e9, 2)
    return estimate
