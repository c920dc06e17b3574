"""Tables: what they hold, what their captions admit, and that storage does not change them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from records_kit import make_settings, make_trace, open_store
from rich.console import Console

from blockpilot.base.errors import UserError
from blockpilot.records.schema import failed_row, ok_row, skipped_row
from blockpilot.records.store import read_records, write_parquet
from blockpilot.sweep.tables import figures_of, sweep_table, terminal_table

SIZES = (1, 4, 8)


def rows_of(prompt: int, prompt_set: str = "set", sizes: tuple[int, ...] = SIZES) -> list[Any]:
    """16 tokens after the first; a bigger block commits more and odd prompts like size 4 better."""
    rows = []
    for size in sizes:
        commit = min(size, 2) if size == 8 and prompt % 2 else size
        trace = make_trace([commit] * (16 // commit), decode_s=1.6 / commit * (1 + 0.1 * prompt))
        settings = make_settings(prompt, size, prompt_set=prompt_set)
        rows.append(ok_row(settings, trace, prompt_ids=range(3)))
    return rows


def stored(folder: Path, rows: list[Any]) -> pd.DataFrame:
    with open_store(folder) as store:
        store.append(rows)
    return read_records(folder)


def shown(table: pd.DataFrame, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(terminal_table(table, title="sweep"))
    return console.export_text()


def test_sweep_table_by_hand(tmp_path: Path) -> None:
    table = sweep_table(stored(tmp_path, [r for p in range(4) for r in rows_of(p)]))
    assert table["method"].tolist() == ["plain", "dflash4", "dflash8"]
    plain, four, eight = table.to_dict("records")
    assert (plain["micro_tau"], plain["macro_tau"], plain["speedup"]) == (1.0, 1.0, 1.0)
    assert math.isnan(plain["speedup_low"])
    assert plain["tpot_ms"] == pytest.approx(100 * 1.15)
    assert four["macro_tau"] == 4.0
    assert four["speedup"] == pytest.approx(4.0)
    assert four["speedup_low"] == pytest.approx(4.0)
    assert eight["macro_tau"] == 5.0  # 8, 2, 8, 2
    assert eight["micro_tau"] == pytest.approx(64 / 20)
    assert eight["macro_tau_low"] < 5.0 < eight["macro_tau_high"]
    assert [line["equal_to_plain"] for line in (plain, four, eight)] == [1.0, 1.0, 1.0]
    assert table["prompts"].tolist() == table["paired"].tolist() == [4, 4, 4]
    assert "5.00 2.00-8.00" in shown(table), "a line of the table does not fit in 80 characters"


def test_sets_come_first_and_pooled_last(tmp_path: Path) -> None:
    rows = rows_of(0, "maths") + rows_of(1, "code") + rows_of(2, "code")
    records = stored(tmp_path, rows)
    table = sweep_table(records, by_set=True)
    assert table["set"].tolist() == ["code"] * 3 + ["maths"] * 3 + ["all"] * 3
    pooled = table[table["set"] == "all"].drop(columns="set").reset_index(drop=True)
    pd.testing.assert_frame_equal(pooled, sweep_table(records))


def test_without_plain_rows_the_speedup_is_empty_and_the_caption_says_so(tmp_path: Path) -> None:
    table = sweep_table(stored(tmp_path, [r for p in range(3) for r in rows_of(p, sizes=(4, 8))]))
    assert table[["speedup", "equal_to_plain", "plain_tpot_ms"]].isna().all(axis=None)
    assert table["tpot_ms"].tolist() == pytest.approx([27.5, (12.5 + 55 + 15) / 3])
    text = " ".join(shown(table).split())
    assert "No plain decoding among the records" in text
    assert "nan" not in text.lower()


def test_caption_counts_skipped_failed_and_idle_prompts(tmp_path: Path) -> None:
    rows = rows_of(0)
    rows += [skipped_row(make_settings(1, s), "prompt has 9000 tokens") for s in SIZES]
    rows += [failed_row(make_settings(2, s), ValueError("non-finite logits\nx")) for s in (4, 8)]
    rows += [ok_row(make_settings(2, 1), make_trace([1, 1]), prompt_ids=range(3))]
    rows += [ok_row(make_settings(3, s), make_trace([]), prompt_ids=range(3)) for s in SIZES]
    table = sweep_table(stored(tmp_path, rows))
    text = " ".join(shown(table).split())
    assert "1 prompt skipped, first set/1: prompt has 9000 tokens" in text
    assert "1 prompt failed, first set/2: ValueError: non-finite logits" in text
    assert "1 prompt ended before the first cycle" in text
    assert table["prompts"].tolist() == [3, 2, 2]


def test_the_caption_says_that_prompts_lack_plain_decoding(tmp_path: Path) -> None:
    table = sweep_table(stored(tmp_path, rows_of(0) + rows_of(1, sizes=(4, 8))))
    assert table["paired"].tolist() == [1, 1, 1]
    assert table["tpot_ms"].tolist() == pytest.approx([100, 25, 12.5]), "of the one that has it"
    assert any("lack plain decoding" in line for line in table.attrs["caption"])


def test_every_ratio_follows_from_the_times_beside_it(tmp_path: Path) -> None:
    rows = [row for p in range(5) for row in rows_of(p, "maths" if p % 2 else "code")]
    lacking = rows_of(7, "code", sizes=(1, 4))  # a prompt that dflash8 never had
    for given, columns in ((rows, 0), (rows + lacking, 1)):
        records = stored(tmp_path / str(columns), given)
        table = sweep_table(records, by_set=True)
        for time, ratio in (("tpot_ms", "speedup"), ("end_to_end_ms", "end_to_end_speedup")):
            assert table[ratio].notna().all()
            followed = table[f"plain_{time}"] / table[time]
            assert followed.tolist() == pytest.approx(table[ratio].tolist(), rel=1e-12)
        plain = table[table["method"] == "plain"].set_index("set")["tpot_ms"]
        follows = (table["set"].map(plain) / table["tpot_ms"]).sub(table["speedup"]).abs() < 1e-12
        assert follows.all() == (columns == 0), "another prompt's times among plain decoding's"
        heads = [column.header for column in terminal_table(table).columns]
        assert heads.count("plain\nTPOT ms") == columns
        warned = "rest on different prompts" in " ".join(table.attrs["caption"])
        assert warned == bool(columns)


def test_the_tracker_gets_the_figures_of_the_table_by_name(tmp_path: Path) -> None:
    cut = ok_row(make_settings(0, 8, block_mode="verify"), make_trace([2] * 8), prompt_ids=range(3))
    table = sweep_table(stored(tmp_path, [*rows_of(0), *rows_of(1), cut]))
    figures = figures_of(table)
    four = table.set_index("method").loc["dflash4"]
    for name in ("macro_tau", "micro_tau", "tpot_ms", "speedup", "end_to_end_speedup"):
        assert figures[f"{name}/dflash4"] == four[name]
    assert figures["equal_to_plain/dflash4"] == 1
    assert figures["micro_tau/dflash8, B = 8, verify"] == 2
    assert "predicted_speedup/dflash4" not in figures, "nothing was predicted"
    assert figures_of(table.iloc[:0]) == {}


def test_markup_in_names_and_errors_is_shown_as_it_is(tmp_path: Path) -> None:
    rows = [*rows_of(0), failed_row(make_settings(1, 8), "index [/red] out of [0]")]
    assert "index [/red] out of [0]" in shown(sweep_table(stored(tmp_path, rows)))


def test_derived_parquet_gives_the_same_table(tmp_path: Path) -> None:
    records = stored(tmp_path, [r for p in range(3) for r in rows_of(p)])
    derived = pd.read_parquet(write_parquet(tmp_path))
    pd.testing.assert_frame_equal(sweep_table(derived), sweep_table(records))


def test_no_records_and_mixed_settings_are_refused(tmp_path: Path) -> None:
    records = stored(tmp_path, rows_of(0))
    with pytest.raises(UserError, match="no records"):
        sweep_table(records.iloc[:0])
    mixed = records.assign(dtype=["float32", "float32", "bfloat16"])
    with pytest.raises(UserError, match=r"dtype differs \(bfloat16, float32\)"):
        sweep_table(mixed)
