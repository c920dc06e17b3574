"""What a stage can be told: its configuration as it is written down, comments included."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

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
    text = (conf_dir() / f"{name}.yaml").read_text(encoding="utf-8")
    groups = [
        f"  {group.name}: {', '.join(sorted(file.stem for file in group.glob('*.yaml')))}"
        for group in sorted(conf_dir().iterdir())
        if group.is_dir() and list(group.glob("*.yaml"))
    ]
    parts = [
        docstring(name).strip(),
        f"Keys and their defaults (conf/{name}.yaml); give others as key=value:",
        text.strip(),
        "Groups; give one as group=name, or +model=name for another model:",
        "\n".join(groups),
        "The composed configuration: --cfg job. Several jobs: -m key=a,b.",
    ]
    return "\n\n".join(parts)


def docstring(name: str) -> str:
    """What a stage's module says of itself, read without running it."""
    found = importlib.util.find_spec(stage_module(name))
    assert found is not None
    assert found.origin is not None
    return ast.get_docstring(ast.parse(Path(found.origin).read_text(encoding="utf-8"))) or ""
