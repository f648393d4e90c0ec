"""Numbers about sets of texts."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from numpy import ndarray


def perplexity(log_prob: Float[ndarray, " text"], tokens: int) -> Float[ndarray, " text"]:
    """exp(-log p / N): of the drawn tokens given the prompt, under the language model that is sampled."""
    return np.exp(-log_prob / tokens)


def wasserstein(a: Float[ndarray, " x"], b: Float[ndarray, " y"]) -> float:
    """The first Wasserstein distance of two samples."""
    from scipy import stats

    return float(stats.wasserstein_distance(a, b))


def bootstrap_quantiles(
    values: Float[ndarray, " x"], levels: tuple[float, ...], seed: int = 0, sets: int = 500
) -> list[tuple[float, float, float]]:
    """(quantile, low, high) for each level, with 95 % bootstrap intervals."""
    source = np.random.default_rng(seed)
    draws = np.quantile(source.choice(values, size=(sets, len(values))), levels, axis=-1)
    found = np.quantile(values, levels)
    low, high = np.quantile(draws, 0.025, axis=-1), np.quantile(draws, 0.975, axis=-1)
    return [(float(q), float(a), float(b)) for q, a, b in zip(found, low, high, strict=True)]
