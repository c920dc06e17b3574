"""Labels by hand, and the instrument for luck on noise, on signal and on the published record."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from blockpilot.stats.labels import argmax_labels, soft_labels
from blockpilot.stats.luck import luck, luck_null
from blockpilot.stats.oracles import best_fixed, cross_fitted, hindsight_seconds, oracle

PUBLIC = Path(__file__).resolve().parents[2] / "shared" / "data" / "public_tau_gsm8k.csv"
GAINS = np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 1.0], [0.0, 1.0, 4.0]])


def test_ties_go_to_the_smaller_size() -> None:
    assert argmax_labels(GAINS).tolist() == [1, 0, 2]
    assert best_fixed(GAINS) == 2
    assert best_fixed(GAINS[:2]) == 1
    assert oracle(GAINS) == 3


def test_soft_labels_are_distributions_that_sharpen() -> None:
    soft = soft_labels(GAINS, 1.0)
    np.testing.assert_allclose(soft.sum(axis=1), 1)
    assert soft[0, 1] == soft[0, 2]
    assert soft[2, 1] / soft[2, 2] == pytest.approx(np.exp(-3))
    sharp = soft_labels(GAINS, 1e-3)
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
        null = luck_null(gains, draws=200)
        gaps.append((oracle(gains) - null.mean) / null.std)
        p_values.append(null.p_value)
    assert abs(np.mean(gaps)) < 1
    assert np.mean(p_values) == pytest.approx(0.5, abs=0.2)
    first, second = halves(4000, 5, 1)
    fixed = (first.mean() + second.mean()) / 2
    assert cross_fitted(first, second).mean() == pytest.approx(fixed, abs=0.02)
    assert oracle(first) > fixed + 0.3, "what luck alone looks like"


def noisy(kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two measurements of 260 prompts at five sizes, with noise or preferences of a kind."""
    generator = np.random.default_rng(seed)
    base = 2 + generator.normal(size=(260, 1)) + np.array([0.0, 0.01, 0.02, 0.03, 0.02])
    scale = np.full((260, 1), 0.1)
    if kind == "uneven":
        scale = generator.gamma(1.0, 0.1, size=(260, 1))
    if kind == "slopes":
        base = base + generator.normal(scale=0.03, size=(260, 1)) * np.arange(-2, 3)
    if kind == "groups":  # a third of them prefers the first size by far
        base[:87] += np.array([0.3, 0, 0, 0, 0])
    parts = []
    for _ in range(2):
        noise = generator.normal(size=(260, 5))
        if kind == "alike":  # neighbouring sizes draw much the same blocks
            noise = np.sqrt(0.6) * generator.normal(size=(260, 1)) + np.sqrt(0.4) * noise
        parts.append(base + scale * noise)
    return parts[0], parts[1]


def excess(kind: str, seed: int) -> tuple[float, float]:
    """Mean of the oracle's excess over its luck, and its standard error."""
    first, second = noisy(kind, seed)
    whole = (first + second) / 2
    over = whole.max(axis=1) - luck(whole, first, second)
    return float(over.mean()), float(over.std(ddof=1) / np.sqrt(len(over)))


@pytest.mark.parametrize("kind", ["even", "uneven", "alike"])
def test_luck_explains_the_oracle_of_noise(kind: str) -> None:
    scores = [mean / error for mean, error in (excess(kind, seed) for seed in range(60))]
    assert abs(np.mean(scores)) < 0.4
    assert np.mean(np.abs(scores) > 1.96) <= 0.12


@pytest.mark.parametrize("kind", ["slopes", "groups"])
def test_luck_does_not_explain_preferences(kind: str) -> None:
    """Where the permuted null explains them all: it draws from the preferences themselves."""
    for seed in range(5):
        mean, error = excess(kind, seed)
        assert mean > 2 * error
        first, second = noisy(kind, seed)
        whole = (first + second) / 2
        assert luck_null(whole, draws=200).mean > luck(whole, first, second).mean()


def test_an_answer_without_halves_has_no_luck() -> None:
    gains = np.array([[1.0, 2.0], [3.0, 4.0]])
    lost = np.full((2, 2), np.nan)
    assert luck(gains, lost, lost).tolist() == [2.0, 4.0]
    first, second = np.array([[1.0, 5.0], [np.nan] * 2]), np.array([[1.0, 1.0], [np.nan] * 2])
    assert luck(gains, first, second).tolist() == [2.0, 4.0], "one answer has no spread"
    first, second = np.array([[1.0, 5.0], [1.0, 1.0]]), np.array([[1.0, 1.0], [1.0, 1.0]])
    # Noise (0, 2), (0, 0); less the sizes' means (0, 1): (0, 1), (0, -1); less the prompts' means
    # 1/2 and -1/2: half a token up at one size and down at the other. Fit: 1.95, 2.05; 3.05, 3.15.
    values = luck(np.array([[2.0, 2.0], [3.0, 3.2]]), first, second)
    assert values == pytest.approx([(2.55 + 2.45) / 2, (3.55 + 3.65) / 2])


def test_a_real_preference_is_seen_through_the_noise() -> None:
    first, second = halves(300, 5, 3, signal=1.0)
    null = luck_null(first, draws=200)
    assert null.p_value < 0.01
    assert oracle(first) > null.mean + 5 * null.std
    assert cross_fitted(first, second).mean() > (first.mean() + second.mean()) / 2 + 0.6


@pytest.mark.skipif(not PUBLIC.exists(), reason="the published record is not at hand")
def test_the_published_oracle_is_within_its_luck() -> None:
    """GSM8K, sizes 14..18, of the public files: oracle 6.735, null 6.747 +- 0.016, p = 0.77."""
    taus = pd.read_csv(PUBLIC)[["b14", "b15", "b16", "b17", "b18"]].to_numpy()
    assert oracle(taus) == pytest.approx(6.735, abs=5e-4)
    assert best_fixed(taus) == 3
    null = luck_null(taus)
    assert null.mean == pytest.approx(6.747, abs=3e-3)
    assert null.std == pytest.approx(0.016, abs=3e-3)
    assert null.p_value == pytest.approx(0.77, abs=0.05)


def test_the_path_of_hindsight_by_hand() -> None:
    """Sizes 1 and 3: only at the first anchor does the large block commit three tokens."""
    accepted = np.array([[0, 2], [0, 0], [0, 0], [0, 0], [0, 0]])
    assert hindsight_seconds(accepted, np.array([1.0, 1.0])) == 3
    assert hindsight_seconds(accepted, np.array([1.0, 1.5])) == 1.5 + 2
    assert hindsight_seconds(accepted, np.array([1.0, 9.0])) == 5
    past = np.array([[7, 0]])
    assert hindsight_seconds(past, np.array([2.0, 1.0])) == 1, "the commit is cut at the end"
    assert hindsight_seconds(past[:0], np.array([2.0, 1.0])) == 0
