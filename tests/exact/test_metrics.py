"""Metrics against published numbers and numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from structured_voronoi.metrics.classification import classification_report
from structured_voronoi.metrics.text import bootstrap_mean, bootstrap_ratio, distinct, wilson


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0),
    ],
)
def test_wilson_intervals_match_published_ones(successes: int, total: int, low: float, high: float) -> None:
    found = wilson(successes, total)
    assert found == pytest.approx((successes / total, low, high), abs=1e-4)
    assert found.low <= found.mean <= found.high


def test_a_higher_level_gives_a_wider_interval() -> None:
    assert wilson(5, 20, 0.99).low < wilson(5, 20).low < wilson(5, 20, 0.5).low
    with pytest.raises(ValueError, match="21 successes of 20"):
        wilson(21, 20)


def test_distinct_counts_n_grams_of_all_texts() -> None:
    texts = [[1, 2, 1, 2], [1, 2, 3]]
    assert distinct(texts, 1) == pytest.approx(3 / 7)
    assert distinct(texts, 2) == pytest.approx(3 / 5)  # 12 21 12 | 12 23
    assert distinct(texts, 3) == pytest.approx(3 / 3)
    assert distinct(texts, 5) == 0.0


def test_bootstrap_intervals_have_the_right_width_and_depend_on_the_seed_alone() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)
    found = bootstrap_mean(values, seed=1)
    assert found == bootstrap_mean(values, seed=1)
    assert found.mean == pytest.approx(values.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
    ratio = bootstrap_ratio(2 * values, values, seed=1)
    assert ratio.mean == pytest.approx(2.0)
    assert ratio.low < 2.0 < ratio.high
    assert bootstrap_ratio(np.full(5, 3.0), np.full(7, 2.0)) == pytest.approx((1.5, 1.5, 1.5))


def test_classification_report() -> None:
    truth = ["a", "a", "a", "b", "b", "c"]
    guess = ["a", "a", "b", "b", "c", "b"]
    report = classification_report(truth, guess, ["a", "b", "c", "d"])
    assert report["classes"]["a"] == pytest.approx({"precision": 1.0, "recall": 2 / 3, "f1": 0.8, "count": 3})
    assert report["classes"]["b"] == pytest.approx({"precision": 1 / 3, "recall": 0.5, "f1": 0.4, "count": 2})
    assert report["classes"]["c"]["f1"] == report["classes"]["d"]["f1"] == 0.0
    assert report["macro_f1"] == pytest.approx(0.3)
    assert report["accuracy"] == pytest.approx(0.5)
