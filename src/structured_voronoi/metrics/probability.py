"""The probability of the controls, with its interval, from the weights of tries."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy import stats

from structured_voronoi.metrics.divergence import Interval
from structured_voronoi.metrics.text import wilson
from structured_voronoi.metrics.weights import effective_share, fit_tail

MIN_WEIGHTS_FOR_SHAPE = 200
"""Positive weights without which the shape of their tail is not computed."""
MIN_EFFECTIVE_TEXTS, MAX_LARGEST_SHARE, MAX_PARETO_K = 50.0, 0.1, 0.7
"""What a reliable estimate has: so many effective texts, no larger weight, no heavier tail."""


@dataclass(frozen=True)
class Probability:
    """E_p[W]: for hard controls, the probability that a text of the model satisfies all of them."""

    value: float
    """0 where it is too small for a floating-point number; ``log10_value`` is not."""
    low: float
    high: float
    """The ends of the 95 % interval."""
    log10_value: float
    """-inf where no text satisfied the controls."""
    relative_error: float
    """The standard error divided by the value."""
    effective_share: float
    """(Σw)² / (n Σw²): the worth of a weighted text in independent ones."""
    largest_share: float
    """The share of the largest weight in the sum of all."""
    pareto_k: float | None
    """The shape of the tail of the weights; None with fewer than 200 positive weights, or where they are alike."""
    pareto_k_error: float | None
    """Its standard error."""
    reliable: bool
    evaluations: int
    """Texts that were drawn, including those that the proposal learnt from."""
    texts: int
    """Texts that the value was computed from."""
    monte_carlo: Interval | None = None
    """The share of as many texts of the model itself that satisfy the controls; if it was asked for."""
    ending: Interval | None = None
    """The share of texts of the model that end within the maximum number of tokens, where they must; the value is
    divided by it."""

    def __str__(self) -> str:
        """The value with its interval, in powers of ten where it is too small for a floating-point number."""
        if self.low >= sys.float_info.min or self.log10_value == -math.inf:
            return f"{self.value:.3g} (95 %: {self.low:.3g} – {self.high:.3g})"
        middle, half = self.log10_value, 1.96 * self.relative_error / math.log(10)
        return f"10^{middle:.2f} (95 %: 10^{middle - half:.2f} – 10^{middle + half:.2f})"

    @property
    def verdict(self) -> str:
        """Whether the figure is reliable, why, and what to do if it is not."""
        if self.log10_value == -math.inf:
            return (
                f"no estimate: none of {self.texts:,} texts satisfied the controls, so their probability is below "
                f"{self.high:.2g}; use more texts"
            )
        effective = self.effective_share * self.texts
        facts = f"effective sample size {effective:.0f}, largest weight {self.largest_share:.1%}"
        if self.pareto_k is not None:
            facts += f", Pareto k {self.pareto_k:.2f} ± {self.pareto_k_error:.2f}"
        if self.ending is not None:
            facts += f", {100 * self.ending.mean:.3g} % of the model's texts end in time"
        return f"reliable ({facts})" if self.reliable else f"unreliable ({facts}): use more texts"

    @property
    def comparison(self) -> str:
        """Plain Monte Carlo at the same cost: drawn if that was asked for, else computed from the value."""
        ended = self.evaluations if self.ending is None else self.evaluations * self.ending.mean
        start = f"plain Monte Carlo with as many texts ({self.evaluations:,})"
        if self.monte_carlo is not None:
            share, low, high = self.monte_carlo
            return f"{start}: {share:.3g} (95 %: {low:.3g} – {high:.3g}), {share * ended:.0f} hits"
        hits = self.value * ended
        error = math.sqrt((1 - min(1.0, self.value)) / hits) if hits > 0 else math.inf
        return (
            f"{start} would expect {hits:.2g} hits and have a relative standard error of {error:.2g} "
            f"(here {self.relative_error:.2g})"
        )


def estimate_probability(log_weight: Float[ndarray, " text"], evaluations: int, is_plain: bool = False) -> Probability:
    """The mean of the weights.

    Weights of texts that the model itself has drawn (``is_plain``) are at most 1, so that their sum counts as hits.
    """
    count, largest = len(log_weight), float(log_weight.max()) if len(log_weight) else -math.inf
    if not math.isfinite(largest):
        high = min(1.0, 3 / max(1, count))
        return Probability(0.0, 0.0, high, -math.inf, math.inf, 0.0, 1.0, None, None, False, evaluations, count)
    weight = np.exp(log_weight - largest)
    mean = float(weight.mean())
    error = float(weight.std(ddof=1)) / math.sqrt(count) if count > 1 else mean
    log_value, relative = math.log(mean) + largest, error / mean
    low, high = _interval(weight, log_value, relative)
    if is_plain:
        low, high = _interval_of_hits(float(np.exp(log_weight).sum()), count)
    share, top, tail = effective_share(weight), float(weight.max() / weight.sum()), None
    if (weight > 0).sum() >= MIN_WEIGHTS_FOR_SHAPE:
        tail = fit_tail(weight)
    reliable = share * count >= MIN_EFFECTIVE_TEXTS and top <= MAX_LARGEST_SHARE
    if tail is not None and top > MAX_LARGEST_SHARE / 10:  # small weights cannot mislead, however they are distributed
        reliable = reliable and tail.shape <= MAX_PARETO_K
    return Probability(
        math.exp(log_value),
        low,
        high,
        log_value / math.log(10),
        relative,
        share,
        top,
        None if tail is None else tail.shape,
        None if tail is None else tail.error,
        reliable,
        evaluations,
        count,
    )


def _interval(weight: Float[ndarray, " text"], log_value: float, relative: float) -> tuple[float, float]:
    """The 95 % interval of the mean."""
    effective = effective_share(weight) * len(weight)
    width = float(stats.t.ppf(0.975, max(2.0, effective - 1))) * relative
    return math.exp(log_value - width), min(1.0, math.exp(min(0.0, log_value + width)))


def _interval_of_hits(hits: float, count: int) -> tuple[float, float]:
    """The 95 % interval of Wilson; no number in [0, 1] varies more than a hit with the same mean."""
    share, z = hits / count, 1.96
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def given_the_end(found: Probability, ended: int, texts: int) -> Probability:
    """The probability divided by that of ending, with the errors of both."""
    share = wilson(ended, texts)
    if found.log10_value == -math.inf or not ended:
        return replace(found, ending=share, evaluations=found.evaluations + texts)
    relative = math.hypot(found.relative_error, math.sqrt((1 - share.mean) / ended))
    log_value = found.log10_value * math.log(10) - math.log(share.mean)
    low, value, high = (min(1.0, math.exp(min(0.0, log_value + z * relative))) for z in (-1.96, 0.0, 1.96))
    return replace(
        found,
        value=value,
        low=low,
        high=high,
        log10_value=min(0.0, log_value / math.log(10)),
        relative_error=relative,
        reliable=found.reliable and ended >= MIN_EFFECTIVE_TEXTS,
        ending=share,
        evaluations=found.evaluations + texts,
    )
