"""Labels by hand, and the instrument for luck on noise, on signal and on the published record."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from blockpilot import labels

PUBLIC = Path(__file__).resolve().parents[2] / "shared" / "data" / "public_tau_gsm8k.csv"
GAINS = np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 1.0], [0.0, 1.0, 4.0]])


def test_ties_go_to_the_smaller_size() -> None:
    assert labels.argmax_labels(GAINS).tolist() == [1, 0, 2]
    assert labels.best_fixed(GAINS) == 2
    assert labels.best_fixed(GAINS[:2]) == 1
    assert labels.oracle(GAINS) == 3
    assert labels.oracle(GAINS, np.array([1.0, 1.0, 2.0])) == (3 + 2 + 4 + 4) / 4


def test_soft_labels_are_distributions_that_sharpen() -> None:
    soft = labels.soft_labels(GAINS, 1.0)
    np.testing.assert_allclose(soft.sum(axis=1), 1)
    assert soft[0, 1] == soft[0, 2]
    assert soft[2, 1] / soft[2, 2] == pytest.approx(np.exp(-3))
    sharp = labels.soft_labels(GAINS, 1e-3)
    np.testing.assert_allclose(sharp[2], [0, 0, 1], atol=1e-12)


def halves(n: int, m: int, seed: int, signal: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Two measurements of prompts that differ in level, each liking one size by `signal`."""
    generator = np.random.default_rng(seed)
    base = 2 + generator.normal(size=(n, 1)) + signal * np.eye(m)[generator.integers(m, size=n)]
    first, second = (base + generator.normal(scale=0.3, size=(n, m)) for _ in range(2))
    return first, second


def test_on_noise_the_null_explains_the_oracle_and_cross_fitting_finds_nothing() -> None:
    gaps, p_values = [], []
    for seed in range(20):
        gains, _ = halves(200, 5, seed)
        null = labels.luck_null(gains, draws=200)
        gaps.append((labels.oracle(gains) - null.mean) / null.std)
        p_values.append(null.p_value)
    assert abs(np.mean(gaps)) < 1
    assert np.mean(p_values) == pytest.approx(0.5, abs=0.2)
    first, second = halves(4000, 5, 1)
    fixed = (first.mean() + second.mean()) / 2
    assert labels.cross_fitted(first, second) == pytest.approx(fixed, abs=0.02)
    assert labels.oracle(first) > fixed + 0.3, "what luck alone looks like"


def test_the_null_weighs_prompts_as_the_oracle_does() -> None:
    gains, generator = np.zeros((200, 4)), np.random.default_rng(0)
    gains[:100] = generator.normal(size=(100, 4))
    noisy, still = np.repeat([1.0, 0.0], 100), np.repeat([0.0, 1.0], 100)
    even = labels.luck_null(gains, draws=200)
    assert labels.luck_null(gains, np.ones(200), draws=200) == even
    found = [labels.luck_null(gains, weights, draws=200).mean for weights in (noisy, still)]
    assert np.mean(found) == pytest.approx(even.mean, rel=1e-6)


def test_a_real_preference_is_seen_through_the_noise() -> None:
    first, second = halves(300, 5, 3, signal=1.0)
    null = labels.luck_null(first, draws=200)
    assert null.p_value < 0.01
    assert labels.oracle(first) > null.mean + 5 * null.std
    assert labels.cross_fitted(first, second) > (first.mean() + second.mean()) / 2 + 0.6


@pytest.mark.skipif(not PUBLIC.exists(), reason="the published record is not at hand")
def test_the_published_oracle_is_within_its_luck() -> None:
    """GSM8K, sizes 14..18, of the public files: oracle 6.735, null 6.747 +- 0.016, p = 0.77."""
    taus = pd.read_csv(PUBLIC)[["b14", "b15", "b16", "b17", "b18"]].to_numpy()
    assert labels.oracle(taus) == pytest.approx(6.735, abs=5e-4)
    assert labels.best_fixed(taus) == 3
    null = labels.luck_null(taus)
    assert null.mean == pytest.approx(6.747, abs=3e-3)
    assert null.std == pytest.approx(0.016, abs=3e-3)
    assert null.p_value == pytest.approx(0.77, abs=0.05)


def test_the_path_of_hindsight_by_hand() -> None:
    """Sizes 1 and 3: only at the first anchor does the large block commit three tokens."""
    accepted = np.array([[0, 2], [0, 0], [0, 0], [0, 0], [0, 0]])
    assert labels.hindsight_seconds(accepted, np.array([1.0, 1.0])) == 3
    assert labels.hindsight_seconds(accepted, np.array([1.0, 1.5])) == 1.5 + 2
    assert labels.hindsight_seconds(accepted, np.array([1.0, 9.0])) == 5
    past = np.array([[7, 0]])
    assert labels.hindsight_seconds(past, np.array([2.0, 1.0])) == 1, "the commit is cut at the end"
    assert labels.hindsight_seconds(past[:0], np.array([2.0, 1.0])) == 0
