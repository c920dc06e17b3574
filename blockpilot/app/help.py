"""What a stage can be told: its configuration as it is written down, comments included."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from blockpilot.base.errors import UserError
from blockpilot.base.paths import conf_dir


def stages() -> list[str]:
    """Names of all stages: one YAML each in the top folder of the configuration."""
    return sorted(file.stem for file in conf_dir().glob("*.yaml"))


def stage_module(name: str) -> str:
    """The module that holds a stage's `run` and `main`: a file, or the entry of a folder."""
    found = importlib.util.find_spec(f"blockpilot.{name}")
    if found is None:
        raise UserError(f"no stage {name}; stages: {', '.join(stages())}")
    return f"{found.name}.__main__" if found.submodule_search_locations else found.name


def stage_help(name: str) -> str:
    """What `python -m blockpilot.<name> --help` prints: what the stage does and every key."""
    files = _with_shared(name)
    listed = sorted({group for file in files for group in _groups(file)} - {"stage"})
    choices = {
        group: sorted(file.stem for file in (conf_dir() / group).glob("*.yaml")) for group in listed
    }
    parts = [
        docstring(name).strip(),
        "Keys and their defaults; give others as key=value:",
        *(f"--- conf/{file}.yaml\n{_yaml(file).read_text('utf-8').strip()}" for file in files),
        "Groups; give one as group=name, or +model=name for another model:",
        "\n".join(f"  {group}: {', '.join(names)}" for group, names in choices.items()),
        "The composed configuration: --cfg job. Several jobs: -m key=a,b.",
    ]
    return "\n\n".join(parts)


def _yaml(name: str) -> Path:
    return conf_dir() / f"{name}.yaml"


def _entries(name: str) -> list[str]:
    """What the defaults of a YAML name: `stage/job`, or `drafter` of `drafter: dflash`."""
    entries: Any = OmegaConf.to_object(OmegaConf.load(_yaml(name)).defaults)
    return [
        str(each if isinstance(each, str) else next(iter(each))).lstrip("/") for each in entries
    ]


def _with_shared(name: str) -> list[str]:
    """A YAML and those of conf/stage that it is built on."""
    shared = [each for each in _entries(name) if each.startswith("stage/")]
    return [name, *(file for each in shared for file in _with_shared(each))]


def _groups(name: str) -> list[str]:
    """Groups that the defaults of a YAML choose from."""
    groups = [each.partition("/")[0] for each in _entries(name)]
    return [group for group in groups if (conf_dir() / group).is_dir()]


def docstring(name: str) -> str:
    """What a stage's module says of itself, read without running it."""
    found = importlib.util.find_spec(stage_module(name))
    assert found is not None
    assert found.origin is not None
    return ast.get_docstring(ast.parse(Path(found.origin).read_text(encoding="utf-8"))) or ""
