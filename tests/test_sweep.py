"""The sweep on a tiny random target in float64: rows, sizes, prefill, order of methods, warm-up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from stages_kit import CONTEXT, composed, performed, sweep_arguments, write_prompts

from blockpilot.app.target import load_target
from blockpilot.base.errors import UserError
from blockpilot.decoding.loop import Method
from blockpilot.decoding.target import Target
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.drafters.none import NoDrafter
from blockpilot.records.run_folder import RunFolder
from blockpilot.records.schema import token_hash
from blockpilot.sweep import __main__ as sweep
from blockpilot.sweep import decoded as sweeping
from blockpilot.sweep.tables import sweep_table

SIZES = [1, 4, 15, 16, 17]
# The first one cannot run, the last one is a conversation of two turns.
PROMPTS = ["x" * CONTEXT, "two and two", "why?", "tell me", ["first", "second"]]
COLUMNS = {"prompt_id", "split", "method", "block_size", "block_mode", "committed", "n_new_tokens"}
COLUMNS |= {"output_sha256", "prefill_s", "decode_s", "draft_s", "verify_s", "status"}


@dataclass
class Call:
    """One call of `decode`: with what, and the tokens that came out."""

    method: Method
    ids: list[int]
    budget: int
    tokens: list[int]

    @property
    def size(self) -> int:
        return self.method.policy.block_size  # type: ignore[attr-defined]


@dataclass
class Run:
    """A finished sweep: its rows, its folder and all that was decoded, in order."""

    records: pd.DataFrame
    folder: Path
    calls: list[Call]
    target: Target


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("sweep")
    calls: list[Call] = []
    decode = sweeping.decode

    def spying(target: Any, method: Any, ids: Any, choose: Any, budget: int, **more: Any) -> Any:
        trace = decode(target, method, ids, choose, budget, **more)
        calls.append(Call(method, ids, budget, trace.tokens))
        return trace

    file = write_prompts(folder / "prompts.jsonl", PROMPTS)
    arguments = sweep_arguments(folder, file, "sizes=[4,16,1]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeping, "decode", spying)
        records = performed(sweep.run, "sweep", *arguments)
    target = load_target(composed("sweep", *arguments))
    return Run(records, folder / "sweep" / "run", calls, target)


def decoded(run: Run) -> pd.DataFrame:
    return run.records[run.records["status"] == "ok"]


def test_a_predictor_that_no_method_reads_is_told(tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "prompts.jsonl", ["one"])
    with pytest.raises(UserError, match=r"policy.path=there: no method reads it; add method="):
        performed(sweep.run, "sweep", *sweep_arguments(tmp_path, file, "policy.path=there"))


def test_every_prompt_turn_and_size_has_one_row(run: Run) -> None:
    wanted = [(f"local/p{n:02d}", 0, size) for n in range(5) for size in SIZES]
    wanted += [("local/p04", 1, size) for size in SIZES]
    keys = run.records[["prompt_id", "turn", "block_size"]]
    assert sorted(keys.itertuples(index=False, name=None)) == sorted(wanted)
    names = run.records["method"].unique()
    assert sorted(names) == ["dflash15", "dflash16", "dflash17", "dflash4", "plain"]


def test_records_parquet_holds_the_same_rows_and_the_promised_columns(run: Run) -> None:
    stored = pd.read_parquet(run.folder / "records.parquet")
    assert set(stored.columns) >= COLUMNS
    assert sorted(stored["key"]) == sorted(run.records["key"])


def test_values_of_the_rows(run: Run) -> None:
    rows = decoded(run)
    assert len(rows) == 5 * len(SIZES)
    for row in rows.to_dict("records"):
        size, cycles = row["block_size"], len(row["committed"])
        assert sum(row["committed"]) + 1 == row["n_new_tokens"] <= row["max_new_tokens"] == 6
        assert row["stop_reason"] == ("budget" if row["n_new_tokens"] == 6 else "stop")
        assert list(row["drafted"]) == [size - 1] * cycles
        assert list(row["verified"]) == [size] * cycles
        assert (row["block_mode"], row["dtype"], row["temperature"]) == ("draft", "float64", 1.0)
        assert row["prefill_s"] > 0
        parts = row["draft_s"] + row["verify_s"] + row["policy_s"] + row["other_s"]
        assert 0 < parts <= row["decode_s"]
        if size == 1:
            assert (row["method"], row["drafter"]) == ("plain", "none")
            assert pd.isna(row["trained_block_size"])
        else:
            assert (row["method"], row["drafter"]) == (f"dflash{size}", "dflash")
            assert row["trained_block_size"] == 16
            assert row["draft_s"] > 0


def test_every_output_is_the_one_that_was_decoded_and_plain_decodings(run: Run) -> None:
    rows = decoded(run)
    hashes = rows.groupby(["prompt_id", "turn"])["output_sha256"].unique()
    assert all(len(each) == 1 for each in hashes)
    assert len({each[0] for each in hashes}) == 5, "the texts of different prompts differ"
    made = {token_hash(call.tokens) for call in run.calls if call.budget == 6}
    assert {each[0] for each in hashes} == made
    assert rows["divergence_at"].isna().all()


def test_prefill_is_stored_once_per_turn_and_equals_a_direct_forward(run: Run) -> None:
    assert len(list((run.folder / "prefill").iterdir())) == 5
    prompts = {len(call.ids): call.ids for call in run.calls}
    for row in decoded(run).to_dict("records"):
        ids = prompts[row["n_prompt_tokens"]]
        stored = RunFolder(run.folder).prefill(row)
        with torch.no_grad():
            output = run.target.model(torch.tensor([ids]), output_hidden_states=True)
        torch.testing.assert_close(stored.logits, output.logits[0, -1])
        torch.testing.assert_close(stored.hidden, output.hidden_states[-1][0, -1])


def test_warm_up_runs_every_method_and_is_not_stored(run: Run) -> None:
    """On the first prompt that can run: the first of the file cannot."""
    warm_up = run.calls[: len(SIZES)]
    assert [call.budget for call in warm_up] == [8] * len(SIZES)
    assert sorted(call.size for call in warm_up) == SIZES
    assert all(call.budget == 6 for call in run.calls[len(SIZES) :])
    assert len(run.calls) - len(SIZES) == len(decoded(run))


def test_methods_are_interleaved_per_prompt_in_changing_order(run: Run) -> None:
    measured = [call.size for call in run.calls[len(SIZES) :]]
    orders = [measured[i : i + len(SIZES)] for i in range(0, len(measured), len(SIZES))]
    assert all(sorted(order) == SIZES for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def test_a_later_turn_is_asked_after_the_plain_answer_to_the_earlier_one(run: Run) -> None:
    first, second = run.calls[-2 * len(SIZES) :][:: len(SIZES)]
    decode = run.target.tokenizer.decode
    assert decode(first.ids) == "first"
    answer = decode(first.tokens, skip_special_tokens=True)
    assert decode(second.ids) == f"first\n\n{answer}\n\nsecond"


def test_a_prompt_longer_than_the_context_is_a_skipped_row_and_counted(run: Run) -> None:
    skipped = run.records[run.records["status"] == "skipped"]
    assert set(skipped["prompt_id"]) == {"local/p00"}
    assert len(skipped) == len(SIZES)
    reason = skipped["skip_reason"].iloc[0]
    assert reason == "128 prompt tokens and 6 new ones exceed the target's context of 128"
    table = sweep_table(run.records)
    assert f"1 prompt skipped, first local/p00: {reason}" in table.attrs["caption"]
    assert set(table["prompts"]) == {4}


def test_the_table_names_every_size_and_the_equality(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    table = sweep_table(run.records)
    assert list(table["block_size"]) == SIZES
    assert (table["equal_to_plain"] == 1).all()
    sweep.show(run.records)
    shown = capsys.readouterr().out
    for name in ("plain", "dflash4", "dflash15", "dflash16", "dflash17", "1 prompt skipped"):
        assert name in shown


def test_verify_mode_drafts_the_trained_block_and_verifies_a_part(tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "prompts.jsonl", PROMPTS[1:2])
    arguments = sweep_arguments(tmp_path, file, "block_mode=verify", "sizes=[4]")
    records = performed(sweep.run, "sweep", *arguments)
    rows = {row["block_size"]: row for row in records.to_dict("records")}
    assert set(rows) == {1, 4, 15, 16}
    assert set(records["block_mode"]) == {"verify"}
    assert records["output_sha256"].nunique() == 1
    for size in (4, 15, 16):
        assert rows[size]["trained_block_size"] == 16
        assert set(rows[size]["drafted"]) == {15}
        assert set(rows[size]["verified"]) == {size}


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        (["radius=0"], [16]),
        (["radius=2"], [14, 15, 16, 17, 18]),
        (["radius=20"], range(2, 37)),
        (["radius=1", "sizes=[1,16,40,40]"], [15, 16, 17, 40]),
        (["radius=20", "block_mode=verify"], range(2, 17)),
    ],
)
def test_sizes_are_clipped_without_repeats(
    run: Run, overrides: list[str], sizes: list[int]
) -> None:
    cfg = composed("sweep", *sweep_arguments(run.folder, run.folder, *overrides))
    drafter = DFlashDrafter(checkpoint="random", ignore_keys=[], head=None)
    drafter.bind(run.target)
    methods = sweep.sweep_methods(cfg, drafter, run.target)
    assert list(methods) == ["plain", *(f"dflash{size}" for size in sizes)]
    assert [each.policy.block_size for each in methods.values()] == [1, *sizes]  # type: ignore[attr-defined]


def test_sizes_that_the_drafter_cannot_do_are_refused(run: Run) -> None:
    cfg = composed(
        "sweep", *sweep_arguments(run.folder, run.folder, "sizes=[17]", "block_mode=verify")
    )
    drafter = DFlashDrafter(checkpoint="random", ignore_keys=[], head=None)
    drafter.bind(run.target)
    with pytest.raises(UserError, match=r"block size 17 in block_mode=verify: allowed are 1\.\.16"):
        sweep.sweep_methods(cfg, drafter, run.target)
    cfg = composed("sweep", *sweep_arguments(run.folder, run.folder, "sizes=[1,4]"))
    with pytest.raises(UserError, match="drafter none has no block size but 1"):
        sweep.sweep_methods(cfg, NoDrafter(), run.target)


def test_without_a_drafter_there_is_plain_decoding_alone(tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "prompts.jsonl", PROMPTS[1:2])
    arguments = [each for each in sweep_arguments(tmp_path, file) if "checkpoint" not in each]
    records = performed(sweep.run, "sweep", *arguments, "drafter=none")
    assert list(records["method"]) == ["plain"]
    assert set(records["committed"].iloc[0]) == {1}
