"""Distances between an empirical distribution over known states and the true one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray


def total_variation(counts: Int[ndarray, "*batch state"], truth: Float[ndarray, " state"]) -> Float[ndarray, "*batch"]:
    """Return ½ Σ |empirical - truth|."""
    distance: ndarray = np.abs(counts / counts.sum(-1, keepdims=True) - truth).sum(-1) / 2
    return distance


def jensen_shannon(counts: Int[ndarray, "*batch state"], truth: Float[ndarray, " state"]) -> Float[ndarray, "*batch"]:
    """Return the Jensen–Shannon divergence in nats (scipy returns its square root)."""
    empirical = counts / counts.sum(-1, keepdims=True)
    middle = (empirical + truth) / 2

    def relative_entropy(p: ndarray) -> ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            terms: ndarray = np.where(p > 0, p * np.log(p / middle), 0.0)
        total: ndarray = terms.sum(-1)
        return total

    both = relative_entropy(empirical) + relative_entropy(np.broadcast_to(truth, empirical.shape))
    return np.asarray(both / 2)


@dataclass(frozen=True)
class Fit:
    """Comparison of an empirical distribution with the same number of independent draws."""

    tv: float
    """Total variation distance from the truth."""
    floor: float
    """Mean total variation distance of independent draws."""
    floor_sd: float
    """Its standard deviation."""
    p_value: float
    """Chi-square test against the truth; states are pooled to expected counts of at least 5."""

    @property
    def ratio(self) -> float:
        """Total variation distance divided by its floor."""
        return self.tv / self.floor

    @property
    def z(self) -> float:
        """Standard deviations of independent draws by which the distance exceeds its floor."""
        return (self.tv - self.floor) / self.floor_sd


def goodness_of_fit(
    counts: Int[ndarray, " state"], truth: Float[ndarray, " state"], seed: int = 0, sets: int = 200
) -> Fit:
    """Compare the counts of independent draws with the truth, and with ``sets`` simulated sets of them."""
    number = int(counts.sum())
    independent = np.random.default_rng(seed).multinomial(number, truth / truth.sum(), size=sets)
    floor = total_variation(independent, truth)
    return Fit(
        float(total_variation(counts, truth)), float(floor.mean()), float(floor.std()), pooled_chi_square(counts, truth)
    )


def pooled_chi_square(counts: Int[ndarray, " state"], truth: Float[ndarray, " state"]) -> float:
    """Return the p-value of Pearson's test; rare states are pooled until each group expects at least 5."""
    from scipy import stats

    order = np.argsort(truth)
    expected, observed = truth[order] * counts.sum(), counts[order]
    if expected.sum() < 10:
        return 1.0
    pooled = int(np.searchsorted(np.cumsum(expected), 5.0)) + 1
    while pooled < len(expected) and expected[pooled] < 5:
        pooled += 1
    expected = np.concatenate([[expected[:pooled].sum()], expected[pooled:]])
    observed = np.concatenate([[observed[:pooled].sum()], observed[pooled:]])
    if len(expected) < 2:
        return 1.0
    return float(stats.chisquare(observed, expected * (observed.sum() / expected.sum())).pvalue)


class Interval(NamedTuple):
    """Estimate with its confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Float[ndarray, " run"], level: float = 0.95) -> Interval:
    """Return the mean of independent runs with its normal confidence interval."""
    from scipy import stats

    mean, error = float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))
    half = float(stats.norm.ppf((1 + level) / 2)) * error
    return Interval(mean, mean - half, mean + half)


def difference(a: ndarray, b: ndarray) -> tuple[float, float]:
    """Return the difference of two means and its standard error."""
    return float(a.mean() - b.mean()), float(np.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b)))
