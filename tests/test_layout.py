"""The layout of the code: imports flow one way, plug-ins stand alone, files stay short."""

from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 400
MAX_ROOMS, MAX_ARROWS = 10, 25  # below the stages

# Rooms (first names under blockpilot), from the base up: each imports only from those before it.
SHARED = (
    *("base", "prompts", "decoding", "costs", "drafters", "records", "stats", "predictor"),
    *("policies", "app"),
)
STAGES = (
    *("sweep", "distill", "evaluate", "report"),
    *("dataset", "train", "cost", "generate", "pipeline"),
)
ROOMS = (*SHARED, *STAGES, "__main__")


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """Every import of the package, those inside functions included."""
    return grimp.build_graph("blockpilot", cache_dir=None)


def room_of(module: str) -> str | None:
    """`decoding` of blockpilot.decoding.loop; None of the package itself."""
    return module.split(".")[1] if "." in module else None


def imports(graph: grimp.ImportGraph) -> set[tuple[str, str]]:
    """Pairs of modules, the first importing the second."""
    return {
        (module, imported)
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    }


def arrows(graph: grimp.ImportGraph) -> set[tuple[str, str]]:
    """Ordered pairs of different rooms, one importing the other."""
    pairs = {(room_of(module), room_of(imported)) for module, imported in imports(graph)}
    return {(one, other) for one, other in pairs if one and other and one != other}


def test_a_room_imports_only_from_rooms_before_it(graph: grimp.ImportGraph) -> None:
    rooms = {room_of(module) for module in graph.modules} - {None}
    assert rooms == set(ROOMS), "design a place for a new room"
    up = [pair for pair in arrows(graph) if ROOMS.index(pair[0]) < ROOMS.index(pair[1])]
    assert not up
    assert len(SHARED) <= MAX_ROOMS
    assert len([room for room, _ in arrows(graph) if room in SHARED]) <= MAX_ARROWS


def test_drafters_and_policies_do_not_import_each_other(graph: grimp.ImportGraph) -> None:
    """But for what their kind shares, a drafter's own network and its other parts."""
    shared = (
        "drafters.forms",
        "drafters.layers",
        "drafters.path_",
        "drafters.specblock_loss",
        "drafters.update_bandit",
        "policies.tree",
        "policies.cells",
        "policies.calibration",
        "policies.pilot",
    )
    for module, imported in imports(graph):
        room = room_of(module)
        if module == "blockpilot.drafters.__main__":
            continue  # describes all of them
        if room in ("drafters", "policies") and room_of(imported) == room:
            own = imported.endswith("_net") or imported.startswith(f"{module}_")
            assert own or any(name in imported for name in shared), module


def test_the_core_knows_no_configuration(graph: grimp.ImportGraph) -> None:
    """What decodes, drafts, decides and stores can be used without Hydra."""
    for file in (ROOT / "blockpilot").rglob("*.py"):
        room = file.relative_to(ROOT / "blockpilot").parts[0]
        if room in SHARED and room != "app":
            text = file.read_text(encoding="utf-8")
            assert "import hydra" not in text, file
            assert "omegaconf" not in text, file


def test_every_stage_is_one_module_with_its_configuration() -> None:
    from blockpilot.app.help import stage_module, stages

    assert set(stages()) == set(STAGES)
    for name in STAGES:
        source = Path(*stage_module(name).split(".")).with_suffix(".py")
        assert f'@stage("{name}", ' in (ROOT / source).read_text(encoding="utf-8")


def test_files_stay_short() -> None:
    folders = (ROOT / folder for folder in ("blockpilot", "scripts", "tests"))
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for folder in folders
        for path in folder.rglob("*.py")
    }
    assert not {name: n for name, n in lengths.items() if n > MAX_LINES}, "split them"


def test_the_rules_themselves_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph sees imports inside functions and names of packages."""
    package = tmp_path / "house"
    for room, text in {"cellar": "", "attic": "def f():\n    from house import cellar\n"}.items():
        (package / room).mkdir(parents=True)
        (package / room / "__init__.py").write_text(text)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert arrows(grimp.build_graph("house", cache_dir=None)) == {("attic", "cellar")}
