"""How far an empirical distribution over known states is from the truth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray


def total_variation(counts: Int[ndarray, "*batch state"], truth: Float[ndarray, " state"]) -> Float[ndarray, "*batch"]:
    """½ Σ |empirical - truth|."""
    distance: ndarray = np.abs(counts / counts.sum(-1, keepdims=True) - truth).sum(-1) / 2
    return distance


def jensen_shannon(counts: Int[ndarray, "*batch state"], truth: Float[ndarray, " state"]) -> Float[ndarray, "*batch"]:
    """The Jensen–Shannon divergence in nats (not its square root, which scipy returns)."""
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
    """How an empirical distribution compares with as many independent draws."""

    tv: float
    floor: float
    """Mean total variation of as many independent draws."""
    floor_sd: float
    p_value: float
    """Chi-square test against the truth, states pooled to expected counts of at least 5."""

    @property
    def ratio(self) -> float:
        return self.tv / self.floor

    @property
    def z(self) -> float:
        """How many standard deviations of independent sets the total variation lies above their mean."""
        return (self.tv - self.floor) / self.floor_sd


def goodness_of_fit(
    counts: Int[ndarray, " state"], truth: Float[ndarray, " state"], seed: int = 0, sets: int = 200
) -> Fit:
    """Compare counts of independent chains with the truth."""
    number = int(counts.sum())
    independent = np.random.default_rng(seed).multinomial(number, truth / truth.sum(), size=sets)
    floor = total_variation(independent, truth)
    return Fit(
        float(total_variation(counts, truth)), float(floor.mean()), float(floor.std()), pooled_chi_square(counts, truth)
    )


def pooled_chi_square(counts: Int[ndarray, " state"], truth: Float[ndarray, " state"]) -> float:
    """The p-value of Pearson's test; the rarest states are pooled until each group expects at least 5."""
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
    mean: float
    low: float
    high: float


def mean_interval(values: Float[ndarray, " run"], level: float = 0.95) -> Interval:
    """The mean of independent runs with its normal confidence interval."""
    from scipy import stats

    mean, error = float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))
    half = float(stats.norm.ppf((1 + level) / 2)) * error
    return Interval(mean, mean - half, mean + half)


def difference(a: ndarray, b: ndarray) -> tuple[float, float]:
    """The difference of two means and its standard error."""
    return float(a.mean() - b.mean()), float(np.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b)))
