"""The layout of the code: imports flow one way, files stay short, only stages use hydra.main."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "blockpilot"
MAX_LINES = 400

# Rows from the base up: a module imports from rows below its number and from its own.
ROWS = {
    0: "__init__ errors stored paths hub rules config models multirun runtime devices tracking "
    "provenance",
    1: "prompts",
    2: "decoding.__init__ decoding.types decoding.protocols decoding.sampling decoding.cache "
    "decoding.cost decoding.cost_fits decoding.features decoding.anchors",
    3: "decoding.timing decoding.target decoding.checks decoding.loading decoding.loop "
    "decoding.replay decoding.answers decoding.engine decoding.divergence",
    4: "records",
    5: "labels sweeping",
    6: "training",
    7: "reporting",
    8: "sweep dataset train evaluate report distill cost generate pipeline",
}
# Beside row 3: each plug-in imports rows 0 and 2, its own *_net.py and what its kind shares.
PLUGINS = ("drafters", "verify", "policies")
SHARED = ("drafters.checkpoints", "drafters.layers", "drafters.published")


def name_of(path: Path) -> str:
    """Return a module's dotted name inside the package, e.g. decoding.loop."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def row_of(module: str) -> int:
    """Return the row of a module; plug-ins count as row 3 for those who import them."""
    if module.split(".")[0] in PLUGINS:
        return 3
    for row, names in ROWS.items():
        if module in names.split() or module.split(".")[0] in names.split():
            return row
    raise AssertionError(f"{module} has no row: design a place for it and add it to ROWS")


def imported(source: str, module: str) -> set[str]:
    """Return the modules of the package that `source`, the code of `module`, imports anywhere."""
    package = ("blockpilot." + module).split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        found.update(map(resolved, names))
    return found - {None}


def resolved(name: str) -> str | None:
    """Return the module that holds the imported `name`, None if it is not of the package."""
    parts = name.split(".")
    if parts[0] != "blockpilot":
        return None
    for length in range(len(parts), 0, -1):
        for candidate in (parts[1:length], [*parts[1:length], "__init__"]):
            if ".".join(candidate) in MODULES:
                return ".".join(candidate)
    raise AssertionError(f"no module {name}")


def allowed(importer: str, target: str) -> bool:
    """Tell whether the import rule lets `importer` use `target`."""
    package = importer.split(".")[0]
    if package in PLUGINS:
        own = target.startswith(f"{package}.") and (target.endswith("_net") or target in SHARED)
        return own or (target.split(".")[0] not in PLUGINS and row_of(target) in (0, 2))
    if target.split(".")[0] in PLUGINS:
        return row_of(importer) > 3
    return row_of(target) <= row_of(importer)


def test_imports_flow_one_way() -> None:
    wrong = [
        f"{module} (row {row_of(module)}) must not import {target}"
        for module, path in MODULES.items()
        for target in sorted(imported(path.read_text(encoding="utf-8"), module))
        if not allowed(module, target)
    ]
    assert not wrong


def test_only_stages_have_a_command_line() -> None:
    for module, path in MODULES.items():
        uses = [
            node
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if (isinstance(node, ast.Attribute) and ast.unparse(node) == "hydra.main")
            or (isinstance(node, ast.ImportFrom) and ast.unparse(node) == "from hydra import main")
        ]
        assert len(uses) == (1 if row_of(module) == 8 else 0), module


def test_files_stay_short() -> None:
    folders = (ROOT / folder for folder in ("blockpilot", "scripts", "tests"))
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for folder in folders
        for path in folder.rglob("*.py")
    }
    assert not {name: n for name, n in lengths.items() if n > MAX_LINES}, "split them"


def test_the_rule_itself_can_fail() -> None:
    """The checks above see relative imports, imports inside functions and names of packages."""
    source = "def f():\n    from ..decoding import types\n    from blockpilot import config\n"
    assert imported(source, "prompts.base") == {"decoding.types", "config"}
    assert imported("import numpy, blockpilot.paths as p", "records.schema") == {"paths"}
    assert imported("from blockpilot.errors import UserError", "config") == {"errors"}
    assert not allowed("prompts.base", "decoding.types")
    assert not allowed("decoding.types", "decoding.loop")
    assert allowed("records.schema", "drafters.dflash")
    assert allowed("drafters.dflash", "drafters.dflash_net")
    assert not allowed("drafters.dflash", "drafters.none")
    assert not allowed("drafters.dflash", "decoding.loop")
    assert not allowed("decoding.loop", "drafters.dflash")
