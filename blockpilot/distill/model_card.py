"""The model card that lies beside trained weights: data, recipe, measured tau, command, licence."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from blockpilot.app.config import DistillConfig
from blockpilot.distill.corpus import Corpus

_WHAT = {
    "dflash": "DFlash drafter (arXiv 2602.06036) of {repo}, in the form of the published ones:\n"
    "`config.json` and bf16 safetensors, without embedding and LM head, which are the target's.",
    "eagle3": "EAGLE-3 head of {repo}, in the form of the published heads: `config.json` and bf16\n"
    "safetensors, without embedding, which is the target's. Measured as a chain.",
}

_NOT_READ: dict[
    str, dict[str, tuple[str, ...]]
] = {  # settings that do not shape a drafter of this kind
    "dflash": {"new_drafter": ("draft_vocabulary",)},
    "eagle3": {
        "new_drafter": ("n_layers", "n_target_layers", "mask_token_id"),
        "training": ("slot_weights", "gamma", "soft_labels", "sampled_negatives"),
    },
}


def model_card(
    name: str,
    kind: str,
    cfg: DistillConfig,
    corpus: Corpus,
    taus: Mapping[str, float],
    seconds: float,
    provenance: Mapping[str, Any],
) -> str:
    """Markdown text; every number in it was counted or measured in this run."""
    data = "\n".join(
        f"| {name} | {prompts} | {tokens} |" for name, (prompts, tokens) in corpus.counts().items()
    )
    held_out = "\n".join(f"| {name} | {tau:.2f} |" for name, tau in taus.items())
    settings: dict[str, Any] = {
        key: OmegaConf.to_container(cfg[key], resolve=True)  # type: ignore[index]
        for key in ("new_drafter", "responses", "decoding", "training")
    }
    for key, names in _NOT_READ[kind].items():
        for unread in names:
            del settings[key][unread]
    recipe = OmegaConf.to_yaml(settings)
    threads = f"{provenance['threads']} threads" if provenance["threads"] > 1 else "one thread"
    place = provenance["gpu"] or f"{provenance['cpu']} ({threads} a process)"
    return f"""# {name}

{_WHAT[kind].format(repo=cfg.model.repo)}

## Data

The target's own answers, prompt by prompt, to prompts of the split `distill`:

| prompt set | prompts | response tokens |
|---|---|---|
{data}

## Recipe

{cfg.training.steps} optimizer steps from {cfg.training.init or "random weights"}, in
{seconds / 60:.0f} minutes, processes: {provenance["processes"]}, on {place}; seed {cfg.seed};
version {provenance["version"]}, commit {provenance["git_commit"]}.

```
python -m blockpilot.distill {" ".join(sys.argv[1:])}
```

```yaml
{recipe.strip()}
```

## Measured

Macro tau of the decode loop at block size {cfg.new_drafter.block_size}, temperature
{cfg.decoding.temperature}, {cfg.decoding.max_new_tokens} new tokens, {provenance["target_dtype"]},
{cfg.responses.validation} prompts per set of the split `validation`:

| prompt set | macro tau |
|---|---|
{held_out}

## Licence

The weights are this project's, under Apache-2.0; they are of use only with their target, whose
licence holds for it.
"""
