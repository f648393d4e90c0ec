"""Statistics of sets of texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from structured_voronoi.metrics.divergence import Interval


def perplexity(log_prob: Float[ndarray, " text"], tokens: int | Int[ndarray, " text"]) -> Float[ndarray, " text"]:
    """Return exp(-log p / N) of each text; N is one number or one per text, with the end token and without padding."""
    return np.exp(-log_prob / tokens)


def wasserstein(a: Float[ndarray, " x"], b: Float[ndarray, " y"]) -> float:
    """Return the first Wasserstein distance of two samples."""
    from scipy import stats

    return float(stats.wasserstein_distance(a, b))


def bootstrap_quantiles(
    values: Float[ndarray, " x"], levels: tuple[float, ...], seed: int = 0, sets: int = 500
) -> list[tuple[float, float, float]]:
    """Return (quantile, low, high) for each level, with 95 % bootstrap intervals."""
    source = np.random.default_rng(seed)
    draws = np.quantile(source.choice(values, size=(sets, len(values))), levels, axis=-1)
    quantiles = np.quantile(values, levels)
    low, high = np.quantile(draws, 0.025, axis=-1), np.quantile(draws, 0.975, axis=-1)
    return [(float(q), float(a), float(b)) for q, a, b in zip(quantiles, low, high, strict=True)]


def distinct(token_lists: Sequence[Sequence[int]], n: int) -> float:
    """Return Dist-n of texts without padding: distinct n-grams divided by all n-grams, 0 if there are none."""
    grams = [tuple(tokens[i : i + n]) for tokens in token_lists for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def wilson(successes: int, total: int, level: float = 0.95) -> Interval:
    """Return a share with its Wilson interval, which is accurate for few trials and for shares near 0 or 1.

    Examples
    --------
    >>> share = wilson(0, 20)
    >>> share.mean, share.low, round(share.high, 3)
    (0.0, 0.0, 0.161)
    """
    from scipy import stats

    if not 0 <= successes <= total or total < 1:
        raise ValueError(f"{successes} successes of {total} trials; use 0 ≤ successes ≤ total and total ≥ 1")
    z = float(stats.norm.ppf((1 + level) / 2))
    share = successes / total
    centre = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total) * np.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    # at shares of 0 and 1 one end is exact despite rounding
    return Interval(share, min(share, float(centre - half)), max(share, float(centre + half)))


def bootstrap_mean(values: Float[ndarray, " x"], seed: int = 0, sets: int = 2000) -> Interval:
    """Return the mean with its 95 % percentile bootstrap interval."""
    return _percentile_interval(float(values.mean()), _bootstrap_means(values, np.random.default_rng(seed), sets))


def bootstrap_ratio(a: Float[ndarray, " x"], b: Float[ndarray, " y"], seed: int = 0, sets: int = 2000) -> Interval:
    """Return mean(a) / mean(b) of two independent samples with its 95 % percentile bootstrap interval."""
    source = np.random.default_rng(seed)
    ratios = _bootstrap_means(a, source, sets) / _bootstrap_means(b, source, sets)
    return _percentile_interval(float(a.mean() / b.mean()), ratios)


def _bootstrap_means(values: ndarray, source: np.random.Generator, sets: int) -> ndarray:
    """Return the means of sets drawn with replacement."""
    means: ndarray = source.choice(values, size=(sets, len(values))).mean(-1)
    return means


def _percentile_interval(estimate: float, draws: ndarray) -> Interval:
    low, high = np.quantile(draws, (0.025, 0.975))
    return Interval(estimate, float(low), float(high))
