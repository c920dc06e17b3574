"""The model card that lies beside trained weights: data, recipe, measured tau, command, licence."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from blockpilot.app.config import DistillConfig
from blockpilot.distill.corpus import Corpus
from blockpilot.distill.recipe import Recipe


def model_card(
    name: str,
    recipe: Recipe,
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
    keys = ("new_drafter", "recipe", "responses", "decoding", "training")
    given: Any = OmegaConf.masked_copy(cfg, keys)  # type: ignore[arg-type]
    settings = OmegaConf.to_yaml(given, resolve=True)
    threads = f"{provenance['threads']} threads" if provenance["threads"] > 1 else "one thread"
    machine = provenance["gpu"] or f"{provenance['cpu']} ({threads} a process)"
    return f"""# {name}

{recipe.description.format(repo=cfg.model.repo)}

## Data

The target's own answers, prompt by prompt, to prompts of the split `distill`:

| prompt set | prompts | response tokens |
|---|---|---|
{data}

## Recipe

{cfg.training.steps} optimizer steps from {cfg.training.init or "random weights"}, in
{seconds / 60:.0f} minutes, processes: {provenance["processes"]}, on {machine}; seed {cfg.seed};
version {provenance["version"]}, commit {provenance["git_commit"]}.

```
python -m blockpilot.distill {" ".join(sys.argv[1:])}
```

```yaml
{settings.strip()}
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
