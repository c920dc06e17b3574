"""The target that a stage's configuration describes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

from omegaconf import OmegaConf
from transformers import PretrainedConfig

from blockpilot.app.config import ModelConfig, StageConfig
from blockpilot.base.devices import pick_device, pick_dtype
from blockpilot.base.hub import without_retries
from blockpilot.decoding.engines import with_engine
from blockpilot.decoding.loading import configuration, pretrained_target, random_target
from blockpilot.decoding.target import Target


def load_target(cfg: StageConfig) -> Target:
    """The target of a stage on its device, in its dtype and behind its engine.

    With `weights=random` it is built from `model.architecture`, offline, with a byte tokenizer.
    Raises UserError when the model cannot be found, read or reached.
    """
    model, device = cfg.model, pick_device(cfg.device)
    dtype = pick_dtype(cfg.dtype, model.dtype, device)
    if cfg.weights == "random":
        target = random_target(
            _architecture(model),
            name=model.name,
            device=device,
            dtype=dtype,
            attention=attention_of(cfg),
            seed=cfg.seed,
        )
    else:
        # A file is read where it lies, without asking the hub.
        with nullcontext() if model.gguf else without_retries(model.repo):
            target = pretrained_target(
                model.repo,
                name=model.name,
                revision=model.revision,
                gguf=model.gguf,
                package=model.package,
                device=device,
                dtype=dtype,
                attention=attention_of(cfg),
            )
    return with_engine(target, OmegaConf.select(cast("Any", cfg), "engine") or "eager")


def attention_of(cfg: StageConfig) -> str:
    """The kernel of the target's attention: what the model file says, unless one is asked for."""
    return cfg.model.attention if cfg.attention == "auto" else cfg.attention


def model_shape(model: ModelConfig) -> PretrainedConfig:
    """The Hugging Face configuration of a model's language part, without any weight (UserError)."""
    architecture = _architecture(model)
    with nullcontext() if architecture else without_retries(model.repo):
        return configuration(architecture, model.repo, model.revision)


def _architecture(model: ModelConfig) -> dict[str, Any]:
    return cast("dict[str, Any]", OmegaConf.to_container(cast("Any", model.architecture)))
