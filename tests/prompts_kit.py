"""Prompt sets as conf/ describes them, and files to read them from."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import OmegaConf

from blockpilot.prompts.base import Prompt, PromptSet
from blockpilot.prompts.load import load_prompts

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def configured(name: str) -> PromptSet:
    built: dict[str, PromptSet] = instantiate(
        OmegaConf.load(ROOT / "conf" / "prompts" / f"{name}.yaml"), _convert_="all"
    )
    return built[name]


def load(
    *names: str, path: Path | None = None, split: str | None = None, limit: int | None = None
) -> list[Prompt]:
    return load_prompts({n: configured(n) for n in names}, limit=limit, path=path, split=split)


@cache
def loaded_once(name: str) -> list[Prompt]:
    return load(name)


def write(path: Path, *lines: Any) -> Path:
    """Writes one line for each value: text as it is, anything else as JSON."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path
