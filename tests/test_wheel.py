"""The wheel is whole: it runs from any folder with the configuration and data that it carries."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and unpack it: what pip would put into site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run([*build, str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, cwd: Path, *arguments: str) -> str:
    """Run Python in `cwd` with the unpacked wheel before everything else; return its stdout."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files under a folder, but for what Python leaves behind."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_carries_the_package_its_data_and_its_configuration(installed: Path) -> None:
    expected = contents(ROOT / "blockpilot")
    expected.update({f"conf/{name}": data for name, data in contents(ROOT / "conf").items()})
    assert contents(installed / "blockpilot") == expected


def test_conf_is_found_in_the_wheel(installed: Path, tmp_path: Path) -> None:
    show = "from blockpilot.base.paths import conf_dir; print(conf_dir())"
    assert Path(run(installed, tmp_path, "-c", show).strip()) == installed / "blockpilot" / "conf"


def test_the_sweep_composes_from_another_folder(installed: Path, tmp_path: Path) -> None:
    yaml = run(installed, tmp_path, "-m", "blockpilot.sweep", "--cfg", "job", "+model=qwen3-4b")
    assert "repo: Qwen/Qwen3-4B\n" in yaml
    assert "max_new_tokens:" in yaml
    assert not list(tmp_path.iterdir())
