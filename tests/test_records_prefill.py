"""Prefill tensors beside the rows, and the facts that rows carry."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from records_kit import make_row, make_settings, open_store

from blockpilot.base import provenance
from blockpilot.base.errors import UserError
from blockpilot.records.prefill import Prefill
from blockpilot.records.run_folder import RunFolder
from blockpilot.records.store import Store, read_records


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_come_back_bit_for_bit_for_every_method_of_the_prompt(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    prefill = Prefill(torch.randn(50).to(dtype), torch.randn(8).to(dtype))
    first = RunFolder(tmp_path).keep_prefill(make_settings(1, 4), prefill)
    assert RunFolder(tmp_path).keep_prefill(make_settings(1, 8), prefill) == first
    with open_store(tmp_path) as store:
        store.append([make_row(1, 1), make_row(1, 8)])
    for row in read_records(tmp_path).to_dict("records"):
        found = RunFolder(tmp_path).prefill(row)
        assert found.logits.dtype == dtype
        assert torch.equal(found.logits, prefill.logits)
        assert torch.equal(found.hidden, prefill.hidden)


def test_what_a_killed_writer_left_goes_when_its_prompt_is_written(tmp_path: Path) -> None:
    prefill = Prefill(torch.zeros(5), torch.zeros(2))
    path = RunFolder(tmp_path).keep_prefill(make_settings(1, 4), prefill)
    left = path.with_name(f".{path.name}.0af3.tmp")
    another = path.with_name(f".{path.name.replace('1', '2', 1)}.0af3.tmp")
    for file in (left, another):
        file.touch()
    RunFolder(tmp_path).keep_prefill(make_settings(1, 4), prefill)
    assert not left.exists()
    assert another.exists(), "another process may be writing it"


def test_file_names_are_safe_and_distinct(tmp_path: Path) -> None:
    ids = ["a/b", "a_b", "../../etc/x", "", ".", "\ud800", "x" * 500, "x" * 501, "a/b\x00", "ü"]
    prefill = Prefill(torch.zeros(3), torch.zeros(2))
    paths = [RunFolder(tmp_path).keep_prefill(make_settings(i), prefill) for i in ids]
    paths.append(RunFolder(tmp_path).keep_prefill(make_settings("a/b", turn=1), prefill))
    paths.append(RunFolder(tmp_path).keep_prefill(make_settings("a/b", dtype="bfloat16"), prefill))
    assert len(set(paths)) == len(paths)
    assert sorted((tmp_path / "prefill").iterdir()) == sorted(paths)
    assert all(len(path.name.encode()) < 200 for path in paths)


def test_missing_or_broken_tensors_are_named(tmp_path: Path) -> None:
    row = make_row(1)
    with pytest.raises(UserError, match="no prefill tensors for prompt set/1"):
        RunFolder(tmp_path).prefill(row)
    path = RunFolder(tmp_path).keep_prefill(
        make_settings(1), Prefill(torch.zeros(3), torch.zeros(2))
    )
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match="is broken"):
        RunFolder(tmp_path).prefill(row)


def test_facts_are_json_and_make_rows(tmp_path: Path) -> None:
    facts = provenance.facts()
    json.dumps(facts)
    assert facts["libraries"]["torch"] == torch.__version__.split("+")[0] or torch.__version__
    assert facts["cpu"]
    assert facts["threads"] == torch.get_num_threads()
    with Store(tmp_path, run_id="r", rank=0, world_size=1, settings={}, provenance=facts) as store:
        store.append([make_row()])
    assert read_records(tmp_path)["host"].iloc[0] == facts["host"]


def test_commit_is_told_only_for_the_checkout_itself(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "inner").mkdir()
    (tmp_path / "f").write_text("1")
    subprocess.run([*git, "add", "f"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "m"], check=True)
    commit, dirty = provenance._git_state(tmp_path.resolve())
    assert commit is not None
    assert len(commit) == 40
    assert dirty is False
    (tmp_path / "f").write_text("2")
    assert provenance._git_state(tmp_path.resolve())[1] is True
    assert provenance._git_state((tmp_path / "inner").resolve()) == (None, None)
