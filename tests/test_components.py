"""Every file of conf/ is usable where it is meant to be; a new one is under test unasked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from stages_kit import SCHEMAS, composed

from blockpilot.app.config import StageConfig
from blockpilot.base.paths import conf_dir

STAGE = re.compile(r"-m blockpilot\.(\w+) (?:.*)\bexperiment=([\w-]+)")
GROUPS = {
    "prompts": "sweep",
    "drafter": "generate",
    "recipe": "distill",
    "tracker": "sweep",
    "policy": "generate",
    "method": "sweep",
}
LOADS_A_TARGET = [stage for stage, schema in SCHEMAS.items() if issubclass(schema, StageConfig)]
COMPONENTS = [
    (group, file.stem) for group in GROUPS for file in sorted((conf_dir() / group).glob("*.yaml"))
]
EXPERIMENTS = sorted((conf_dir() / "experiment").glob("*.yaml"))
# The parts that every user of a group calls.
METHODS = {
    "prompts": ("load",),
    "drafter": ("bind", "start", "draft", "observe"),
    "recipe": ("blueprint",),
    "tracker": ("start", "log", "summarise", "finish"),
    "policy": ("bind", "start", "block", "next", "observe"),
    "method": ("bind", "start", "block", "next", "observe"),
}
BY_COST = ("libraspec-exact", "caddtree", "bastion", "bastion-online")
PATH = {
    "policy-blockpilot": ["policy.path=x"],
    "method-blockpilot": ["policy.path=x"],
    **{f"method-{name}": ["policy.cost=x"] for name in BY_COST},
}


@pytest.mark.parametrize("stage", LOADS_A_TARGET)
@pytest.mark.parametrize("model", sorted(f.stem for f in (conf_dir() / "model").glob("*.yaml")))
def test_every_stage_composes_with_every_model(stage: str, model: str) -> None:
    cfg = composed(stage, "run_id=run", f"+model={model}")
    assert cfg.model.name == model
    if stage != "distill":  # there the drafter is one to be made
        assert cfg.drafter.checkpoint == cfg.model.drafters.dflash


@pytest.mark.parametrize(("group", "name"), COMPONENTS)
def test_a_component_composes_and_can_be_built(group: str, name: str) -> None:
    """Nothing is read or loaded by building: that is what `load`, `bind` and `start` are for."""
    merged = {"prompts": "prompts.sets", "method": "methods"}  # groups that several files fill
    choice = f"{group}=[{name}]" if group in merged else f"{group}={name}"
    cfg = composed(GROUPS[group], "run_id=run", choice, *PATH.get(f"{group}-{name}", []))
    node = OmegaConf.select(cfg, merged.get(group, group))
    if group in merged:
        assert list(node) == [name]
        node = node[name]
    part = instantiate(node, _convert_="all")
    if isinstance(part, dict):  # a method that brings a drafter of its own
        assert set(part) == {"drafter", "policy"}
        assert all(callable(getattr(part["drafter"], each)) for each in METHODS["drafter"])
        part = part["policy"]
    for method in METHODS[group]:
        assert callable(getattr(part, method))
    if group not in ("tracker", "method"):  # a method may be one of several of a policy
        assert part.name == name


def test_several_prompt_sets_merge_in_the_order_given() -> None:
    cfg = composed("sweep", "run_id=run", "prompts=[mt-bench,bundled,gsm8k]")
    assert list(cfg.prompts.sets) == ["mt-bench", "bundled", "gsm8k"]


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_an_experiment_composes_with_the_stage_that_its_head_names(file: Path) -> None:
    head = "".join(line for line in file.read_text().splitlines(True) if line.startswith("#"))
    (found,) = STAGE.findall(head)
    stage, name = found
    assert name == file.stem
    plain = composed(stage, "run_id=run")
    cfg = composed(stage, "run_id=run", f"experiment={name}")
    assert OmegaConf.to_container(cfg) != OmegaConf.to_container(plain), "it changes nothing"
