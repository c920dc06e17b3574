"""The device script in its CPU form, on tiny shapes: what it measures and the file it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from stages_kit import ROOT, environment


def test_the_script_runs_and_leaves_one_json(tmp_path: Path) -> None:
    result = tmp_path / "check.json"
    done = subprocess.run(
        [ROOT / "scripts" / "device_check.sh", result],
        cwd=tmp_path,
        env={**environment(), "DEVICE": "cpu", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    assert found["law"] == ["law-eager"]
    points = found["cost"]["qwen3-4b-eager"]["points"]
    assert [point["block_size"] for point in points] == [1, 16]
    assert all(point["cycle_s"] > 0 for point in points)
    bench = found["bench"]
    engines = {name.partition(",")[0] for name in bench["cycle"]}
    assert "eager" in engines
    for name, cycle in bench["cycle"].items():
        assert cycle["over_floor"] > 1, f"{name}: nothing is faster than its floor"
    counted = bench["cycle"]["eager, plain"]
    assert counted["aten"] > counted["aten_outside_target"] > 0
    for engine in engines:
        for kind, peer in (("plain", "generate"), ("dflash", "generate dflash")):
            compared = bench["peers"][f"{engine}: {kind}"][peer]
            assert compared["peer_over_ours"] > 0
            assert compared["same_text"] > 0.7, "greedy peers say what we say, but for ties"
    assert bench["replay"]["equal_rows"] > 0.9, "float32"
    assert bench["replay"]["largest_tau_difference"] < 0.5


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "device_check.sh", tmp_path / "x.json"],
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.strip() == "device_check: no GPU; DEVICE=cpu tries the script on tiny shapes"
    assert not (tmp_path / "x.json").exists()
