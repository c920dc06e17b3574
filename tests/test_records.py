"""Records: keys, rows and the store's promises (atomic, resumable, nothing twice, nothing lost)."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from records_kit import (
    SIZES,
    VARYING,
    counting,
    expected_keys,
    make_row,
    make_settings,
    make_trace,
    missing,
    open_store,
    play,
)

from blockpilot.base.errors import UserError
from blockpilot.records.schema import (
    METHOD_FIELDS,
    PER_CYCLE,
    SCHEMA,
    SHARED_FIELDS,
    Settings,
    failed_row,
    group_key,
    ok_row,
    row_key,
    skipped_row,
)
from blockpilot.records.store import (
    done_keys,
    read_manifests,
    read_records,
    read_table,
    shard,
    write_parquet,
)

ROOT = Path(__file__).resolve().parents[1]


def test_every_setting_is_a_column_and_moves_the_key() -> None:
    base = make_settings(0, 8)
    other = {"str": "verify", "int": 3, "float": 0.5, "bool": True}
    for entry in fields(Settings):
        assert entry.name in SCHEMA.names
        kind = str(entry.type).split(" ")[0]
        value = "replay" if entry.name == "mode" else other[kind]
        changed = replace(base, **{entry.name: value})
        assert row_key(changed) != row_key(base), entry.name
        shared = entry.name in (*SHARED_FIELDS, "prompt_id", "prompt_hash")
        assert (group_key(changed) != group_key(base)) == shared, entry.name
    assert not set(METHOD_FIELDS) & set(SHARED_FIELDS)


def test_key_ignores_the_spelling_of_numbers() -> None:
    base = make_settings(0, 8)
    for changes in ({"temperature": 0}, {"temperature": -0.0}, {"block_size": np.int64(8)}):
        assert row_key(replace(base, **changes)) == row_key(base)


@pytest.mark.parametrize(
    "changes", [{"block_mode": "both"}, {"seed": None}, {"turn": "first"}, {"top_k": True}]
)
def test_settings_that_fit_no_column_are_refused_by_name(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        replace(make_settings(), **changes)


def test_row_with_tokens_beyond_the_commits_is_refused() -> None:
    settings = make_settings(0, 8)
    good = make_trace([3, 4])
    assert ok_row(settings, good, prompt_ids=range(5))["n_new_tokens"] == 8
    for broken in (
        replace(good, tokens=[*good.tokens, 1]),
        replace(good, tokens=[]),
        replace(good, verified=[1]),
    ):
        with pytest.raises(ValueError, match="set/0"):
            ok_row(settings, broken, prompt_ids=range(5))


def test_first_token_stop_and_budget_zero_have_no_cycles() -> None:
    settings = make_settings(0, 8)
    stopped = ok_row(settings, make_trace([]), prompt_ids=range(5))
    assert (stopped["n_new_tokens"], stopped["committed"]) == (1, [])
    nothing = ok_row(settings, replace(make_trace([]), tokens=[]), prompt_ids=range(5))
    assert (nothing["n_new_tokens"], nothing["committed"]) == (0, [])


def test_empty_lists_and_broken_unicode_survive(tmp_path: Path) -> None:
    bad = "a\ud800b\x00 \N{SNOWMAN}"
    with open_store(tmp_path) as store:
        store.append([failed_row(make_settings(bad), RuntimeError(bad))])
        store.append([skipped_row(make_settings("long"), bad, n_prompt_tokens=9999)])
        store.append([ok_row(make_settings("first"), make_trace([]), prompt_ids=range(5))])
    rows = read_records(tmp_path).set_index("status")
    assert rows.loc["failed", "error"] == "RuntimeError: a\\ud800b\x00 \N{SNOWMAN}"
    assert rows.loc["failed", "prompt_id"] == "set/a\\ud800b\x00 \N{SNOWMAN}"
    assert rows.loc["skipped", "skip_reason"] == "a\\ud800b\x00 \N{SNOWMAN}"
    assert rows.loc["skipped", "n_prompt_tokens"] == 9999
    assert [len(c) for c in rows["committed"]] == [0, 0, 0]
    assert pq.read_schema(write_parquet(tmp_path)).equals(SCHEMA)


def test_values_come_back_as_written(tmp_path: Path) -> None:
    settings = make_settings(3, 8, thinking=True, top_k=5, top_p=0.25, seed=2**40)
    row = ok_row(settings, make_trace([8, 1, 3], decode_s=0.1), prompt_ids=range(17))
    with open_store(tmp_path) as store:
        store.append([row])
    (stored,) = read_table(tmp_path).to_pylist()
    assert {name: stored[name] for name in row} == row
    assert {entry.name: stored[entry.name] for entry in fields(Settings)} == asdict(settings)
    frame = read_records(tmp_path)
    assert frame["top_k"].iloc[0] == 5
    assert frame["thinking"].iloc[0]
    assert frame["committed"].iloc[0].dtype == np.int32


def _comparable(folder: Path) -> pd.DataFrame:
    """Rows apart from who wrote them when, lists as tuples so that frames compare."""
    frame = read_records(folder).drop(columns=VARYING)
    for name in PER_CYCLE:
        frame[name] = [tuple(int(n) for n in counts) for counts in frame[name]]
    return frame


@pytest.mark.parametrize("n_prompts", [0, 1, 3, 5, 17])
def test_two_ranks_equal_one_process(tmp_path: Path, n_prompts: int) -> None:
    play(tmp_path / "one", 0, 1, range(n_prompts))
    for rank in (1, 0):
        play(tmp_path / "two", rank, 2, range(n_prompts))
    pd.testing.assert_frame_equal(_comparable(tmp_path / "one"), _comparable(tmp_path / "two"))
    assert len(read_records(tmp_path / "two")) == n_prompts * len(SIZES)
    derived = pd.read_parquet(tmp_path / "two" / "records.parquet")
    assert list(derived["key"]) == list(read_records(tmp_path / "one")["key"])


def test_shards_are_a_partition() -> None:
    for n_items in range(6):
        for world_size in (1, 2, 3, 7):
            parts = [shard(range(n_items), rank, world_size) for rank in range(world_size)]
            assert sorted(item for part in parts for item in part) == list(range(n_items))
    with pytest.raises(ValueError, match="rank 2"):
        shard(range(3), 2, 2)


def test_killed_rank_leaves_a_clean_list_of_missing(tmp_path: Path) -> None:
    prompts = range(7)
    play(tmp_path, 0, 2, prompts)
    store = open_store(tmp_path, 1, 2)
    store.append(make_row(1, size) for size in SIZES)
    store._lock.close()  # what the system does for a killed process
    assert missing(tmp_path, expected_keys(prompts)) == ["set/3", "set/5"]
    last = [manifest["sessions"][-1]["status"] for manifest in read_manifests(tmp_path)]
    assert last == ["done", "running"]
    play(tmp_path, 0, 1, prompts)
    assert missing(tmp_path, expected_keys(prompts)) == []
    play(tmp_path / "one", 0, 1, prompts)
    pd.testing.assert_frame_equal(_comparable(tmp_path), _comparable(tmp_path / "one"))


def test_sigkill_at_random_times_then_rerun_equals_uninterrupted(tmp_path: Path) -> None:
    n_prompts, killed = 60, 0
    play(tmp_path / "whole", 0, 1, range(n_prompts))
    script = str(ROOT / "tests" / "records_kit.py")
    command = [sys.executable, script, str(tmp_path / "cut"), "0", "1", str(n_prompts)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    dice = random.Random(30)
    for last in [False] * 4 + [True]:
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            if not last:
                for _ in range(dice.randrange(1, 9)):
                    child.stdout.readline()
                time.sleep(dice.uniform(0, 0.01))
                child.kill()
            child.stdout.read()
            killed += child.wait() != 0
    assert killed >= 3, "the runs ended before they could be killed: the test proves nothing"
    assert child.returncode == 0
    pd.testing.assert_frame_equal(_comparable(tmp_path / "cut"), _comparable(tmp_path / "whole"))
    parts = (tmp_path / "cut" / "rank00").glob("part-*")
    assert sum(pq.read_metadata(part).num_rows for part in parts) == n_prompts * len(SIZES), (
        "something was repeated"
    )
    assert not list((tmp_path / "cut" / "rank00").glob(".*.tmp"))


class _Killed(BaseException):
    """Stands for the death of the process: no handler of the code under test expects it."""


@pytest.mark.parametrize("call", ["fsync", "replace", "unlink"])
def test_death_at_every_durable_step_loses_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    prompts = range(3)
    play(tmp_path / "whole", 0, 1, prompts)
    owner = os if call == "fsync" else Path
    real = getattr(owner, call)
    deaths = 0
    for fatal in range(1, 200):
        folder = tmp_path / f"cut{fatal}"
        calls = 0

        def dying(*args: object, fatal: int = fatal, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == fatal:
                raise _Killed
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, call, dying)
            try:
                play(folder, 0, 1, prompts)
            except _Killed:
                deaths += 1
            else:
                break
        play(folder, 0, 1, prompts)
        pd.testing.assert_frame_equal(_comparable(folder), _comparable(tmp_path / "whole"))
    assert calls < fatal, "the run never got past its steps"
    assert deaths >= 2


def test_prompt_counts_as_done_only_within_one_session(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.append([make_row(0, 1), make_row(0, 4)])
        store.append([make_row(1, 1), make_row(1, 4)])
    assert missing(tmp_path, expected_keys([0, 1], [1, 4])) == []
    # A new size is wanted: the old rows cannot be joined with it, so the prompt runs again whole.
    assert missing(tmp_path, expected_keys([0, 1])) == ["set/0", "set/1"]
    with open_store(tmp_path) as store:
        store.append(make_row(0, size) for size in SIZES)
    assert missing(tmp_path, expected_keys([0, 1])) == ["set/1"]
    rows = read_records(tmp_path)
    assert rows.groupby("prompt_id")["session_id"].nunique().tolist() == [1, 1]
    assert rows.groupby("prompt_id").size().tolist() == [3, 2]
    assert rows["key"].is_unique
    # A later session that wrote only a part supersedes as well: never two sessions in a group.
    with open_store(tmp_path) as store:
        store.append([make_row(0, 4)])
    assert missing(tmp_path, expected_keys([0], SIZES)) == ["set/0"]
    assert len(read_records(tmp_path).query("prompt_id == 'set/0'")) == 1


def test_other_settings_in_the_same_folder_do_not_supersede(tmp_path: Path) -> None:
    for seed in (0, 1):
        with open_store(tmp_path) as store:
            store.append(make_row(0, size, seed=seed) for size in SIZES)
    assert read_records(tmp_path).groupby("seed").size().tolist() == [3, 3]


def test_failed_prompts_run_again_and_skipped_ones_do_not(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.append(failed_row(make_settings(0, s), ValueError("inf")) for s in SIZES)
        store.append(skipped_row(make_settings(1, s), "too long") for s in SIZES)
    assert missing(tmp_path, expected_keys([0, 1])) == ["set/0"]
    assert len(done_keys(counting(tmp_path))) == len(SIZES)
    counts = read_manifests(tmp_path)[0]["sessions"][0]["n_rows"]
    assert counts == {"ok": 0, "skipped": 3, "failed": 3}
    with open_store(tmp_path) as store:
        store.append(make_row(0, size) for size in SIZES)
    assert sorted(read_records(tmp_path)["status"].unique()) == ["ok", "skipped"]


def test_a_failure_does_not_hide_what_an_earlier_session_measured(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.append(make_row(0, size) for size in SIZES)
        store.append(make_row(1, size) for size in SIZES)
    before = read_records(tmp_path)
    with open_store(tmp_path) as store:  # with one size more, which is too much
        sizes = [*SIZES, 99]
        store.append(failed_row(make_settings(0, s), RuntimeError("memory")) for s in sizes)
        store.append(make_row(1, size) for size in sizes)
    rows = read_records(tmp_path)
    assert set(rows["status"]) == {"ok"}
    first = rows[rows["prompt_id"] == "set/0"].reset_index(drop=True)
    assert first.equals(before[before["prompt_id"] == "set/0"].reset_index(drop=True))
    assert (rows["prompt_id"] == "set/1").sum() == len(SIZES) + 1
    assert missing(tmp_path, expected_keys([0, 1], sizes)) == ["set/0"]
    assert missing(tmp_path, expected_keys([0], SIZES)) == []


def test_sessions_sort_by_age_even_if_the_clock_goes_back(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.close()
    path = tmp_path / "rank00" / "manifest.json"
    future = store.session_id.replace(store.session_id[:4], "2999")
    path.write_text(path.read_text().replace(store.session_id, future))
    with open_store(tmp_path, 1, 2) as later:
        assert later.session_id > future


def test_two_runs_into_one_folder_are_refused(tmp_path: Path) -> None:
    with open_store(tmp_path, 0, 2), open_store(tmp_path, 1, 2):
        for rank, world_size in ((0, 2), (1, 2), (0, 1)):
            with pytest.raises(UserError, match="another run is writing"):
                open_store(tmp_path, rank, world_size)
    with open_store(tmp_path, 1, 2), pytest.raises(UserError, match="another run is writing"):
        open_store(tmp_path, 0, 1)
    open_store(tmp_path).close()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_full_disk_is_one_line_and_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = open_store(tmp_path)
    store.append(make_row(0, size) for size in SIZES)
    with monkeypatch.context() as patch:
        patch.setattr(os if call == "fsync" else Path, call, full)
        with pytest.raises(UserError, match="No space left") as caught:
            store.append(make_row(1, size) for size in SIZES)
        assert "\n" not in str(caught.value)
        assert str(tmp_path) in str(caught.value)
        store.close(failed=True)
    assert missing(tmp_path, expected_keys([0, 1])) == ["set/1"]
    play(tmp_path, 0, 1, range(2))
    assert missing(tmp_path, expected_keys([0, 1])) == []


def test_unwritable_outputs_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*rank00: Not a directory"):
        open_store(tmp_path / "file")

    def read_only(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "open", read_only)
    with pytest.raises(UserError, match="Read-only file system"):
        open_store(tmp_path)


def test_broken_or_foreign_files_are_refused_by_name(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.append([make_row()])
    part = tmp_path / "rank00" / "part-000002.parquet"
    part.write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match=r"part-000002\.parquet is no readable parquet"):
        read_records(tmp_path)
    pq.write_table(pa.table({"key": ["a"], "colour": ["red"]}), part)
    with pytest.raises(UserError, match=r"part-000002\.parquet.*another schema.*colour"):
        read_records(tmp_path)
    with pytest.raises(UserError, match=r"part-000002\.parquet"):
        open_store(tmp_path)
    part.rename(part.with_name("part-mine.parquet"))
    with pytest.raises(UserError, match=r"part-mine\.parquet"):
        read_records(tmp_path)
    with pytest.raises(UserError, match="holds no records"):
        read_records(tmp_path / "elsewhere")
    (tmp_path / "rank00" / "part-mine.parquet").unlink()
    (tmp_path / "rank00" / "manifest.json").write_text("[]")
    with pytest.raises(UserError, match=r"manifest\.json"):
        open_store(tmp_path)


def test_manifest_tells_settings_provenance_and_end(tmp_path: Path) -> None:
    def run(divisor: int) -> None:
        with open_store(tmp_path) as store:
            store.append([make_row(1 // divisor)])

    with pytest.raises(ZeroDivisionError):
        run(0)
    run(1)
    (manifest,) = read_manifests(tmp_path)
    assert [session["status"] for session in manifest["sessions"]] == ["failed", "done"]
    assert manifest["sessions"][0]["settings"] == {"seed": 0}
    assert manifest["sessions"][0]["provenance"]["host"] == "h"
    assert json.loads(read_records(tmp_path)["versions"].iloc[0])["torch"] == "2"
