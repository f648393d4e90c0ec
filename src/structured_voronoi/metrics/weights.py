"""Importance weights: caps for rejection, error bounds, and the tail of their distribution.

A try of the proposal q with weight w = p W / q is accepted with probability min(1, w / c) for a cap c. Accepted texts
follow min(w, c) q / Z_c, whose total variation distance from p W / Z is at most ε(c) = E_q[(w - c)+] / E_q[w]. The
tail of the weights is smoothed by a generalised Pareto distribution (Vehtari et al. 2024), which also estimates the
excess beyond the largest weight.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray
from scipy import stats

CAP_TAIL_SHARE = 0.5
"""Largest share of the sum of weights in the tail from which caps are computed."""
UNSEEN_FACTOR = 2.0
"""Limit of unseen weights in estimates, as a multiple of the largest weight seen."""


class Tail(NamedTuple):
    """Generalised Pareto distribution of the weights above a threshold."""

    threshold: float
    size: int
    """Number of weights above the threshold."""
    shape: float
    scale: float
    error: float
    """Standard error of the shape."""

    def means(self, shape: float) -> Float[ndarray, " tail"]:
        """Return the means of ``size`` equally probable parts of the tail, in ascending order."""
        shape = min(shape, 0.95)  # from 1 on there is no mean
        above = np.arange(self.size, -1, -1) / self.size  # the probability of the tail above each boundary
        if abs(shape) < 1e-6:
            part = above * (1 - np.log(np.maximum(above, 1e-300)))
            excess: ndarray = self.size * (part[:-1] - part[1:])
        else:
            part = above ** (1 - shape) / (1 - shape)
            excess = (self.size * (part[:-1] - part[1:]) - 1) / shape
        return self.threshold + self.scale * excess


def fit_tail(weight: Float[ndarray, " try"], max_share: float = 1.0) -> Tail | None:
    """Fit the tail of the positive weights.

    Parameters
    ----------
    weight
        Weights; the tail has at most a fifth of the n positive ones, and at most 3√n.
    max_share
        Largest share of the sum of weights in the tail. Without this limit, a few large weights above many negligible
        ones look like a heavy tail.

    Returns
    -------
    Tail or None
        None if there are too few weights, or if the largest are equal.
    """
    min_size, prior_shape, prior_size = 5, 0.5, 10  # the prior counts like ``prior_size`` weights
    positive = np.sort(weight[weight > 0])
    count = min(len(positive) // 5, math.ceil(3 * math.sqrt(len(positive))))
    if count < min_size:
        return None
    within = int(np.searchsorted(np.cumsum(positive[::-1]), max_share * positive.sum()))
    count = max(min_size, min(count, within))
    threshold = positive[-count - 1]
    above = positive[-count:] - threshold
    above = above[above > 0]
    if len(above) < min_size or above[-1] <= 1e-9 * positive[-1]:
        return None
    shape, scale = _fit_pareto(above)
    shape = (shape * len(above) + prior_shape * prior_size) / (len(above) + prior_size)
    error = (1 + max(shape, 0.0)) / math.sqrt(len(above) + prior_size)
    return Tail(float(threshold), len(above), shape, scale, error)


def smoothed(weight: Float[ndarray, " try"], tail: Tail | None) -> Float[ndarray, " try"]:
    """Return the weights in ascending order, with those of the tail replaced by means of the fit."""
    ordered = np.sort(weight)
    if tail is not None:
        ordered[-tail.size :] = np.minimum(tail.means(tail.shape), UNSEEN_FACTOR * ordered[-1])
    return ordered


def _fit_pareto(excess: Float[ndarray, " tail"]) -> tuple[float, float]:
    """Return shape and scale of a generalised Pareto distribution (Zhang and Stephens 2009)."""
    count = len(excess)
    points = 30 + int(math.sqrt(count))
    quartile = excess[int(count / 4 + 0.5) - 1]
    rate = 1 - np.sqrt(points / (np.arange(1, points + 1) - 0.5))
    rate = rate / (3 * quartile) + 1 / excess[-1]
    shape = np.log1p(-rate[:, None] * excess).mean(-1)
    likelihood = count * (np.log(-rate / shape) - shape - 1)
    posterior = 1 / np.exp(likelihood - likelihood[:, None]).sum(-1)
    posterior[posterior < 10 * np.finfo(float).eps] = 0
    mean = float((rate * posterior).sum() / posterior.sum())
    fitted = float(np.log1p(-mean * excess).mean())
    return fitted, -fitted / mean


class Caps(NamedTuple):
    """Caps of the tries of one proposal, with their error."""

    cap: Float[ndarray, " try"]
    """Cap of each try, computed from the weights of the others; inf if there are too few."""
    error_bound: float
    """95 % upper limit of the total variation distance."""


def find_caps(weight: Float[ndarray, " try"], tolerance: float, most: float, released: float = math.inf) -> Caps:
    """Return caps at which the estimated error is at most ``tolerance``.

    Parameters
    ----------
    weight
        Weights of the tries.
    tolerance
        Bound on the total variation distance.
    most
        Upper bound of all weights; as a cap it has no error.
    released
        Cap at which texts were released before; the error bound is that of the smallest cap in use.

    Examples
    --------
    >>> find_caps(np.ones(100), tolerance=0.0, most=20.0).cap[0]
    np.float64(20.0)
    """
    if tolerance == 0 or not (weight > 0).any():
        return Caps(np.full(len(weight), most), 0.0)
    tail = fit_tail(weight, CAP_TAIL_SHARE)
    common = min(most, _cap(weight, tail, tolerance))
    cap = np.full(len(weight), common)
    for one in np.nonzero(weight > (common / 2 if tail is None else tail.threshold))[0]:
        others = np.delete(weight, one)
        cap[one] = min(most, _cap(others, fit_tail(others, CAP_TAIL_SHARE), tolerance))
    return Caps(cap, error_bound(weight, min(common, released), most))


def _cap(weight: Float[ndarray, " try"], tail: Tail | None, tolerance: float) -> float:
    """Return the smallest cap with an error of at most the tolerance, for the weights and for their smoothed values."""
    return max(_smallest_cap(ordered, tolerance) for ordered in (np.sort(weight), smoothed(weight, tail)))


def _smallest_cap(ordered: Float[ndarray, " try"], tolerance: float) -> float:
    """Return the smallest c with Σ (w - c)+ ≤ tolerance Σ w, for weights in ascending order; inf if all are 0."""
    descending = ordered[::-1]
    if not descending[0]:
        return math.inf
    excess = np.cumsum(descending) - np.arange(1, len(ordered) + 1) * descending  # with each weight as the cap
    allowed = tolerance * descending.sum()
    above = max(1, int(np.searchsorted(excess, allowed, side="right")))  # number of weights above the cap
    return float((descending[:above].sum() - allowed) / above)


def error_bound(weight: Float[ndarray, " try"], cap: float, most: float) -> float:
    """Return a 95 % upper limit of E[(w - c)+] / E[w], the largest of three estimates.

    The first takes the Poisson limit of the number of weights above the cap. The second assumes unseen texts of
    probability 3 / n with twice the largest weight. The third takes the 95 % limit of the shape of the tail.
    """
    max_unseen_factor = 10.0
    total = float(weight.sum())
    if cap >= most or not total:
        return 0.0
    ordered, tail = np.sort(weight), fit_tail(weight, CAP_TAIL_SHARE)
    excess, largest = np.maximum(ordered - cap, 0), ordered[-1]
    above = int((excess > 0).sum())
    more = excess.sum() * stats.chi2.ppf(0.95, 2 * above + 2) / (2 * max(1, above)) / total
    unseen = 3 * max(0.0, min(most, UNSEEN_FACTOR * largest) - cap) / total
    if tail is not None:
        high = tail.means(tail.shape + 1.64 * tail.error)
        ordered[-tail.size :] = np.minimum(
            np.maximum(high, ordered[-tail.size :]), min(most, max_unseen_factor * largest)
        )
    heavier = np.maximum(ordered - cap, 0).sum() / ordered.sum()
    return float(min(1.0, max(more, unseen, heavier)))


def effective_share(weight: Float[ndarray, " try"]) -> float:
    """Return (Σw)² / (n Σw²), or 0 if all weights are 0."""
    total = weight.sum()
    return float(total**2 / (len(weight) * (weight**2).sum())) if total > 0 else 0.0


def is_accepted(
    weight: Float[ndarray, " try"], level: Float[ndarray, " try"], cap: Float[ndarray, " try"]
) -> Bool[ndarray, " try"]:
    """Return which tries are accepted, each with probability min(1, w / c)."""
    accepted: ndarray = (weight > 0) & (level * cap < weight)
    return accepted
