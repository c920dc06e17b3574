"""Reading records while another rank writes them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from records_kit import make_row, open_store

from blockpilot.base.errors import UserError
from blockpilot.records import store
from blockpilot.records.store import read_records


def test_reader_sees_all_rows_while_the_owner_merges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = open_store(tmp_path)
    for prompt in range(3):
        owner.append([make_row(prompt)])
    real = store._read_part

    def merging(path: Path, columns: list[str]) -> pa.Table:
        monkeypatch.setattr(store, "_read_part", real)
        table = real(path, columns)
        owner.close()  # merges under the reader's feet
        return table

    monkeypatch.setattr(store, "_read_part", merging)
    assert len(read_records(tmp_path)) == 3
    assert len(list((tmp_path / "rank00").glob("part-*"))) == 1


def test_a_reader_waits_while_the_owner_takes_its_parts_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With hundreds of parts each look finds others gone, until the last one is."""
    open_store(tmp_path).append([make_row(0)])
    real, looks, pauses = store._read_part, iter(range(1000)), []

    def vanishing(path: Path, columns: list[str]) -> pa.Table:
        if next(looks) < 20:
            raise FileNotFoundError(path)
        return real(path, columns)

    monkeypatch.setattr(store, "_read_part", vanishing)
    monkeypatch.setattr(store.time, "sleep", pauses.append)
    assert len(read_records(tmp_path)) == 1
    assert len(pauses) == 20
    looks = iter([0] * 1000)
    with pytest.raises(UserError, match="files vanish while they are read"):
        read_records(tmp_path)
