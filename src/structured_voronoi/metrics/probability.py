"""Probability of the controls, with its confidence interval, from importance weights."""

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

MIN_EFFECTIVE_TEXTS, MAX_LARGEST_SHARE, MAX_PARETO_K = 50.0, 0.1, 0.7
"""Limits of a reliable estimate: effective sample size, share of the largest weight, shape of the tail."""


@dataclass(frozen=True)
class Probability:
    """Probability that a text of the model satisfies the controls; for soft controls, the mean of their product.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> found = sv.probability("bundled", "Near the", [sv.keyword("river")], texts=256, max_tokens=20, progress=False)
    >>> found.low <= found.value <= found.high
    True
    """

    value: float
    """0 if it is too small for a floating-point number; use ``log10_value`` then."""
    low: float
    high: float
    """End of the 95 % confidence interval, as ``low`` is its beginning."""
    log10_value: float
    """-inf if no text satisfied the controls."""
    relative_error: float
    """Standard error divided by the value."""
    effective_share: float
    """(Σw)² / (n Σw²): effective sample size divided by the number of texts."""
    largest_share: float
    """Largest weight divided by the sum of all."""
    pareto_k: float | None
    """Shape of the tail of the weights; None with fewer than 200 positive weights, or if the weights are equal."""
    pareto_k_error: float | None
    """Standard error of ``pareto_k``."""
    reliable: bool
    """True if the effective sample size is large enough and no weight dominates the sum."""
    evaluations: int
    """Texts drawn from proposals, including those for training."""
    texts: int
    """Texts from which the value is computed."""
    monte_carlo: Interval | None = None
    """Share of as many texts of the model that satisfy the controls, if requested."""
    ending: Interval | None = None
    """With ``finish="stop"``: share of texts of the model that end; the value is divided by it."""

    def __str__(self) -> str:
        """Return the value with its interval, as powers of ten if it is too small for a floating-point number."""
        if self.low >= sys.float_info.min or self.log10_value == -math.inf:
            return f"{self.value:.3g} (95 %: {self.low:.3g} – {self.high:.3g})"
        middle, half = self.log10_value, 1.96 * self.relative_error / math.log(10)
        return f"10^{middle:.2f} (95 %: 10^{middle - half:.2f} – 10^{middle + half:.2f})"

    @property
    def verdict(self) -> str:
        """Whether the value is reliable, why, and what to do if it is not, in one sentence."""
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
            facts += f", {100 * self.ending.mean:.3g} % of the model's texts end within the maximum number of tokens"
        return f"reliable ({facts})" if self.reliable else f"unreliable ({facts}): use more texts"

    @property
    def comparison(self) -> str:
        """Comparison with plain Monte Carlo of as many texts, in one sentence; computed from the value unless drawn."""
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
    """Estimate the mean of importance weights.

    Parameters
    ----------
    log_weight
        Log weight of each text.
    evaluations
        Number of texts drawn altogether.
    is_plain
        Whether the texts were drawn from the model, so that weights are at most 1.

    Returns
    -------
    Probability
        The mean with its 95 % interval, and whether it is reliable.

    Examples
    --------
    >>> found = estimate_probability(np.log([0.5, 1.0, 0.25, 0.25]), evaluations=4)
    >>> round(found.value, 3), found.reliable
    (0.5, False)
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
    if (weight > 0).sum() >= 200:
        tail = fit_tail(weight)
    reliable = share * count >= MIN_EFFECTIVE_TEXTS and top <= MAX_LARGEST_SHARE
    if tail is not None and top > MAX_LARGEST_SHARE / 10:  # with small weights the tail does not matter
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
    """Return the 95 % interval of the mean."""
    effective = effective_share(weight) * len(weight)
    width = float(stats.t.ppf(0.975, max(2.0, effective - 1))) * relative
    return math.exp(log_value - width), min(1.0, math.exp(min(0.0, log_value + width)))


def _interval_of_hits(hits: float, count: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval; no variable in [0, 1] has a larger variance than a hit of the same mean."""
    share, z = hits / count, 1.96
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def given_the_end(found: Probability, ended: int, texts: int) -> Probability:
    """Return the probability divided by that of ending, with the errors of both."""
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
