"""Arithmetic of importance weights: caps for rejection, error bounds, and estimates of a mean.

A try of the proposal q with weight w = p W / q is accepted with probability min(1, w / c). Accepted texts follow
min(w, c) q / Z_c, whose total variation distance from p W / Z is at most ε(c) = E_q[(w - c)+] / E_q[w]. The largest
weights are few, so the tail of their distribution is smoothed by a generalised Pareto distribution (Vehtari et al.
2024), which also says how much lies beyond the largest weight seen.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray
from scipy import stats

MIN_TAIL = 5
"""Weights without which no tail is fitted."""
PRIOR_SHAPE, PRIOR_WEIGHT = 0.5, 10
"""The shape that a fit is pulled towards, as if by so many weights more."""
CAP_TAIL_SHARE = 0.5
"""Largest share of the sum of weights in the tail from which caps are computed."""
MAX_SHAPE = 0.95
"""A tail of a larger shape has no mean."""
UNSEEN_FACTOR = 2.0
"""How many times the largest weight seen an unseen one is expected to be at most."""
MAX_UNSEEN_FACTOR = 10.0
"""The same for upper limits."""


class Tail(NamedTuple):
    """The largest weights as a generalised Pareto distribution above a threshold."""

    threshold: float
    size: int
    """Weights above the threshold."""
    shape: float
    scale: float
    error: float
    """Standard error of the shape."""

    def means(self, shape: float) -> Float[ndarray, " tail"]:
        """The means of as many equally probable parts of the tail as it has weights, in ascending order."""
        shape = min(shape, MAX_SHAPE)
        above = np.arange(self.size, -1, -1) / self.size  # the probability of the tail above each boundary
        if abs(shape) < 1e-6:
            part = above * (1 - np.log(np.maximum(above, 1e-300)))
            excess: ndarray = self.size * (part[:-1] - part[1:])
        else:
            part = above ** (1 - shape) / (1 - shape)
            excess = (self.size * (part[:-1] - part[1:]) - 1) / shape
        return self.threshold + self.scale * excess


def fit_tail(weight: Float[ndarray, " try"], max_share: float = 1.0) -> Tail | None:
    """The tail of the positive weights; None where there are too few, or where the largest are alike.

    It has at most a fifth of all weights or 3√n. With a ``max_share`` it has at most the largest weights that make up
    this share of the sum: otherwise a few large weights above many negligible ones look like a heavy tail.
    """
    positive = np.sort(weight[weight > 0])
    count = min(len(positive) // 5, math.ceil(3 * math.sqrt(len(positive))))
    if count < MIN_TAIL:
        return None
    within = int(np.searchsorted(np.cumsum(positive[::-1]), max_share * positive.sum()))
    count = max(MIN_TAIL, min(count, within))
    threshold = positive[-count - 1]
    above = positive[-count:] - threshold
    above = above[above > 0]
    if len(above) < MIN_TAIL or above[-1] <= 1e-9 * positive[-1]:
        return None
    shape, scale = _fit_pareto(above)
    shape = (shape * len(above) + PRIOR_SHAPE * PRIOR_WEIGHT) / (len(above) + PRIOR_WEIGHT)
    error = (1 + max(shape, 0.0)) / math.sqrt(len(above) + PRIOR_WEIGHT)
    return Tail(float(threshold), len(above), shape, scale, error)


def smoothed(weight: Float[ndarray, " try"], tail: Tail | None) -> Float[ndarray, " try"]:
    """The weights in ascending order, with the tail replaced by means of its fit."""
    ordered = np.sort(weight)
    if tail is not None:
        ordered[-tail.size :] = np.minimum(tail.means(tail.shape), UNSEEN_FACTOR * ordered[-1])
    return ordered


def _fit_pareto(excess: Float[ndarray, " tail"]) -> tuple[float, float]:
    """Shape and scale of a generalised Pareto distribution (Zhang and Stephens 2009)."""
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
    """The caps of some tries of one proposal, and the error that they leave."""

    cap: Float[ndarray, " try"]
    """Of each try, from the weights of the others; inf where there are too few of them."""
    error_bound: float
    """95 % upper limit of the total variation distance."""


def find_caps(weight: Float[ndarray, " try"], tolerance: float, most: float, released: float = math.inf) -> Caps:
    """Caps at which the estimated error is at most ``tolerance``.

    No weight exceeds ``most``, so that this cap has no error at all. The error bound is that of the smallest cap in
    use, which may be ``released``, at which texts were released before.
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
    """The smallest cap at which the error is at most the tolerance, by the weights themselves and by their fit."""
    return max(_smallest_cap(ordered, tolerance) for ordered in (np.sort(weight), smoothed(weight, tail)))


def _smallest_cap(ordered: Float[ndarray, " try"], tolerance: float) -> float:
    """The smallest cap c with Σ (w - c)+ ≤ tolerance Σ w, for weights in ascending order; inf if all are 0."""
    descending = ordered[::-1]
    if not descending[0]:
        return math.inf
    excess = np.cumsum(descending) - np.arange(1, len(ordered) + 1) * descending  # at a cap equal to each weight
    allowed = tolerance * descending.sum()
    above = max(1, int(np.searchsorted(excess, allowed, side="right")))  # weights above the cap
    return float((descending[:above].sum() - allowed) / above)


def error_bound(weight: Float[ndarray, " try"], cap: float, most: float) -> float:
    """95 % upper limit of E[(w - c)+] / E[w], the largest of three.

    One expects more weights above the cap than were seen (Poisson). One is of texts that no try has found, whose
    weight is twice the largest one seen and whose probability is at most 3 / n. One has a heavier tail than was fitted.
    """
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
            np.maximum(high, ordered[-tail.size :]), min(most, MAX_UNSEEN_FACTOR * largest)
        )
    heavier = np.maximum(ordered - cap, 0).sum() / ordered.sum()
    return float(min(1.0, max(more, unseen, heavier)))


def effective_share(weight: Float[ndarray, " try"]) -> float:
    """(Σw)² / (n Σw²); 0 where all weights are 0."""
    total = weight.sum()
    return float(total**2 / (len(weight) * (weight**2).sum())) if total > 0 else 0.0


def is_accepted(
    weight: Float[ndarray, " try"], level: Float[ndarray, " try"], cap: Float[ndarray, " try"]
) -> Bool[ndarray, " try"]:
    """Accepted with probability min(1, w / c)."""
    accepted: ndarray = (weight > 0) & (level * cap < weight)
    return accepted
