"""The commands of the README are the tested ones, and the files it names exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from stages_kit import SCHEMAS

from blockpilot.__main__ import main
from blockpilot.app.config import typed
from blockpilot.base.paths import conf_dir

ROOT = Path(__file__).parents[1]
COMMAND = re.compile(r"^ {4}.*-m blockpilot\.(\w+) ?(.*)$", re.MULTILINE)
README = (ROOT / "README.md").read_text()
GUIDE = (conf_dir() / "README.md").read_text()
REFERENCE = ROOT / "outputs" / "reference"  # its commands are those of older commits


def commands(text: str) -> list[tuple[str, str]]:
    return [(stage, rest.split("  #")[0].strip()) for stage, rest in COMMAND.findall(text)]


@pytest.mark.parametrize(("stage", "arguments"), commands(README) + commands(GUIDE))
def test_every_command_composes_and_fits_its_schema(stage: str, arguments: str) -> None:
    overrides = [word for word in shlex.split(arguments) if word != "-m"]
    overrides = [word.replace("<name>", "qwen3-4b").replace("<file>", "x") for word in overrides]
    parsed = OverridesParser.create().parse_overrides(overrides)
    for number, each in enumerate(parsed):
        if each.is_sweep_override():  # of a multirun, the first job
            overrides[number] = f"{each.key_or_group}={next(each.sweep_string_iterator())}"
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose(stage, ["run_id=readme", *overrides])
    typed(cfg, SCHEMAS[stage])


def test_the_readme_shows_every_stage_and_both_commands() -> None:
    assert {stage for stage, _ in commands(README)} == set(SCHEMAS)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"^ {4}make ([\w-]+)", README, re.MULTILINE):
        assert target in targets


@pytest.mark.parametrize(
    "page",
    [
        ROOT / "README.md",
        *(ROOT / folder / "README.md" for folder in ("blockpilot", "conf")),
        ROOT / ".github/CONTRIBUTING.md",
        *REFERENCE.rglob("*.md"),
    ],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_files_that_a_page_names_exist(page: Path) -> None:
    for name in re.findall(r"\]\(([\w./-]+)\)", page.read_text()):
        assert (page.parent / name).exists(), name


def test_python_m_blockpilot_lists_every_stage_with_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main()
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[2:]]
    assert [name for name, _ in lines] == sorted(SCHEMAS)
    assert all(text for _, text in lines)
