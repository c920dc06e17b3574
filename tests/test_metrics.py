"""Numbers from rows: by hand, by law, and on the published record of acceptance lengths."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from records_kit import FakeTrace, make_settings, make_trace

from blockpilot.base.errors import UserError
from blockpilot.records.schema import SHARED_FIELDS, failed_row, ok_row
from blockpilot.stats import comparison, tau
from blockpilot.stats.intervals import bootstrap, mean

PUBLIC = Path(__file__).resolve().parents[1] / ".." / "shared" / "data" / "public_tau_gsm8k.csv"


def frame(rows: Iterable[dict[str, Any]], session: str = "s1") -> pd.DataFrame:
    return pd.DataFrame([{"session_id": session, "run_id": "run", **row} for row in rows])


def row(prompt: int | str, size: int, trace: FakeTrace, **changes: Any) -> dict[str, Any]:
    return ok_row(make_settings(prompt, size, **changes), trace, prompt_ids=range(5))


def test_micro_and_macro_tau_by_hand() -> None:
    rows = [
        row(0, 8, make_trace([8, 2])),
        row(1, 8, make_trace([1, 1, 1])),
        row(1, 8, make_trace([3]), turn=1),
        row(2, 8, make_trace([])),  # stopped on the prefill's token: no tau
        failed_row(make_settings(3, 8), "boom"),
    ]
    records = frame(rows)
    assert tau.prompt_tau(records).to_dict() == {"set/0": 5.0, "set/1": 1.5}
    assert tau.micro_tau(records) == 16 / 6
    assert tau.macro_tau(records) == 3.25
    assert tau.with_cycles(records)["tau"].isna().tolist() == [False, False, False, True]
    assert math.isnan(tau.micro_tau(records.iloc[3:]))
    assert math.isnan(tau.macro_tau(records.iloc[3:]))


def test_tpot_and_speedups_by_hand() -> None:
    # 9 tokens after the first: plain 1.0 and 2.0 s per token, the method 0.5 and 0.25.
    plain = [make_trace([1] * 9, decode_s=9.0), make_trace([1] * 9, decode_s=18.0)]
    fast = [make_trace([8, 1], decode_s=4.5), make_trace([8, 1], decode_s=2.25)]
    records = frame(
        [row(i, 1, trace) for i, trace in enumerate(plain)]
        + [row(i, 8, trace) for i, trace in enumerate(fast)]
        + [row(9, 8, make_trace([8], decode_s=100.0))]  # no partner: in tau, not in speedup
    )
    method = records[records["method"] != "plain"]
    pairs = comparison.pair_with(method, records)
    times = comparison.token_times(pairs)
    assert (times.base_s, times.method_s, times.ratio) == (1.5, 0.375, 1.5 / 0.375)
    assert times.interval() == (2.0, 8.0)
    # with 0.5 s of prefill on both sides and 10 tokens
    whole = comparison.token_times(pairs, with_prefill=True)
    assert whole.ratio == pytest.approx((9.5 + 18.5) / (5.0 + 2.75))
    assert math.isnan(comparison.token_times(pairs.iloc[:0]).ratio)
    assert comparison.share_equal(pairs) == 1.0


def test_share_equal_counts_outputs_that_differ() -> None:
    plain = [row(i, 1, make_trace([1] * 4)) for i in range(4)]
    other = [row(i, 8, make_trace([4], salt=1 if i == 2 else 0)) for i in range(4)]
    records = frame(plain + other)
    pairs = comparison.pair_with(records[records["method"] == "dflash8"], records)
    assert comparison.share_equal(pairs) == 0.75
    assert math.isnan(comparison.share_equal(pairs.iloc[:0]))


def test_bootstrap_is_seeded_paired_and_covers() -> None:
    dice = np.random.default_rng(5)
    values = dice.gamma(4.0, size=60)
    assert bootstrap(mean, values) == bootstrap(mean, values)
    low, high = bootstrap(lambda a, b: b.mean(-1) / a.mean(-1), values, 3 * values)
    assert low == pytest.approx(3)  # drawn together: the ratio has no spread
    assert high == pytest.approx(3)
    hits = 0
    for _ in range(300):
        low, high = bootstrap(mean, dice.normal(size=40))
        hits += low <= 0 <= high
    assert 0.89 < hits / 300 < 0.98
    assert all(map(math.isnan, bootstrap(mean, values[:1])))


@pytest.mark.parametrize("field", [name for name in SHARED_FIELDS if name != "seed"])
def test_rows_that_differ_in_a_setting_are_refused_by_its_name(field: str) -> None:
    base = make_settings(0, 8)
    old = getattr(base, field)
    number = field in ("top_k", "top_p", "temperature", "max_new_tokens")
    new: Any = 1 if number else (True if field == "thinking" else "other")
    if field == "mode":
        new = "replay"
    assert new != old
    records = frame(
        row(prompt, size, make_trace([1]), **({field: new} if size == 8 else {}))
        for prompt, size in ((0, 1), (0, 8), (1, 8))
    )
    with pytest.raises(UserError, match=rf"\b{field}\b"):
        comparison.require_comparable(records)
    with pytest.raises(UserError, match=rf"\b{field}\b"):
        comparison.pair_with(records[records["method"] == "dflash8"], records)


def test_joins_across_sessions_are_refused() -> None:
    plain = frame([row(0, 1, make_trace([1]))], "s1")
    method = frame([row(0, 8, make_trace([1]))], "s2")
    records = pd.concat([plain, method])
    comparison.require_comparable(records)
    with pytest.raises(UserError, match=r"session_id \(s2 and s1\)"):
        comparison.pair_with(method, records)


def test_one_method_name_for_two_drafters_is_refused() -> None:
    records = frame([row(i, 8, make_trace([1]), drafter_checkpoint=f"sha:{i}") for i in (0, 1)])
    with pytest.raises(UserError, match=r"method dflash8.*drafter_checkpoint.*sha:0, sha:1"):
        comparison.require_comparable(records)


def test_prompt_that_changed_and_row_that_stands_twice_are_refused() -> None:
    records = frame([row(0, 1, make_trace([1])), row(0, 8, make_trace([1]), prompt_hash="changed")])
    with pytest.raises(UserError, match=r"prompt set/0: prompt_hash differs"):
        comparison.require_comparable(records)
    twice = pd.concat([frame([row(0, 8, make_trace([1]))])] * 2)
    with pytest.raises(UserError, match=r"prompt set/0 has two rows of method dflash8, size 8"):
        comparison.require_comparable(twice)


def test_seeds_are_averaged_not_refused() -> None:
    records = frame(
        row(0, size, make_trace([size, 1] if seed else [1, 1]), seed=seed)
        for seed in (0, 1)
        for size in (1, 8)
    )
    comparison.require_comparable(records)
    method = records[records["method"] == "dflash8"]
    assert tau.macro_tau(method) == 11 / 4
    assert len(comparison.pair_with(method, records)) == 2


def test_best_size_ties_go_to_the_smaller() -> None:
    taus = pd.DataFrame({8: [2.0, 3.0], 4: [2.0, 1.0], 6: [1.0, 3.0]})
    assert tau.best_size(taus).tolist() == [4, 6]


def _public_rows() -> list[dict[str, Any]]:
    """The published means as cycles: each is a ratio of two small integers."""
    rows = []
    with PUBLIC.open(newline="", encoding="utf-8") as stream:
        for line in csv.DictReader(stream):
            for name, value in line.items():
                if name == "prompt":
                    continue
                ratio = Fraction(value).limit_denominator(600)
                assert float(ratio) == pytest.approx(float(value), rel=1e-12)
                base, extra = divmod(ratio.numerator, ratio.denominator)
                counts = [base + 1] * extra + [base] * (ratio.denominator - extra)
                rows.append(row(line["prompt"], int(name[1:]), make_trace(counts)))
    return rows


@pytest.mark.skipif(not PUBLIC.exists(), reason="the published record is not at hand")
def test_published_record_gives_its_means_and_its_oracle() -> None:
    taus = tau.tau_by_size(frame(_public_rows()))
    assert len(taus) == 32
    known = {14: 6.212, 15: 6.406, 16: 6.509, 17: 6.528, 18: 6.278}
    assert taus[list(known)].mean().round(3).to_dict() == known
    near = taus[list(known)]
    assert round(float(near.max(axis=1).mean()), 3) == 6.735
    best = tau.best_size(near)
    assert all(near.loc[prompt, size] == near.loc[prompt].max() for prompt, size in best.items())
    for prompt, size in best.items():  # ties: no smaller size is as good
        assert not (
            near.loc[prompt, [b for b in known if b < size]] >= near.loc[prompt, size]
        ).any()
