"""A target that the user names by its repository or folder alone, in place of a known one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from blockpilot.base.paths import conf_dir

log = logging.getLogger(__name__)


def adopt_repo(cfg: Any) -> bool:
    """Make `model.repo` decide, where it is not the one that the file of `model.name` knows.

    What that file says of its own model is dropped unless it was overridden as well: the GGUF file,
    the revision, the architecture and the drafters, which belong to other weights. The name becomes
    the repository's. Returns whether anything was changed; a model without a file is left alone.
    """
    model = cfg.model
    file = conf_dir() / "model" / f"{model.name}.yaml"
    if not file.is_file():
        return False
    known: Any = OmegaConf.load(file)
    if model.repo == known.repo:
        return False
    # The schema's nodes keep what Hydra composed; only values that are still the file's go.
    for key, nothing in (("revision", None), ("package", None), ("architecture", {})):
        if model[key] == known[key]:
            model[key] = nothing
    if model.gguf == known.gguf and not (model.gguf and (Path(model.repo) / model.gguf).is_file()):
        model.gguf = None
    for kind in known.drafters:
        if model.drafters[kind] == known.drafters[kind]:
            model.drafters[kind] = None
    model.name = Path(model.repo).resolve().name if Path(model.repo).is_dir() else model.repo
    model.name = model.name.rpartition("/")[2]
    return True


def drop_drafter(cfg: Any) -> None:
    """Decode without a drafter where none of the named target is known, and say so."""
    if OmegaConf.select(cfg, "drafter.checkpoint") is None and "checkpoint" in cfg.drafter:
        log.warning(
            "no drafter of %s is known: decoding without one, unless drafter.checkpoint names it",
            cfg.model.name,
        )
        cfg.drafter = OmegaConf.load(conf_dir() / "drafter" / "none.yaml")
