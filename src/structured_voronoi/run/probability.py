"""`probability`: how probable it is that a model satisfies its controls, from weighted draws of a lookahead."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from structured_voronoi.contracts import Target
from structured_voronoi.errors import check_count
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.problem.drawing import check_autoregressive, log_bound
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.progress import progress_bar
from structured_voronoi.streams import Rng

AT_A_TIME = 256
LEAST_EFFECTIVE, MOST_LARGEST, MOST_PARETO = 50.0, 0.1, 0.7
"""What an estimate must have to be trusted: effective texts, the largest weight's share, the tail's Pareto k̂."""


@dataclass(frozen=True)
class Probability:
    """E_p[W]: for hard controls, the probability that the model satisfies them all."""

    value: float
    low: float
    high: float
    """The ends of the 95 % interval."""
    effective_share: float
    """(Σw)² / (n Σw²): what a weighted text is worth beside an independent one."""
    largest_share: float
    """The share of the largest weight in their sum."""
    pareto_k: float
    """The shape of the weights' tail; above 0.7 their mean is not to be relied on."""
    trusted: bool
    evaluations: int
    """Texts drawn, without those that the lookahead learnt from."""

    @property
    def verdict(self) -> str:
        """Whether to trust the figure, and what to do if not."""
        if self.value == 0:
            return f"none of {self.evaluations:,} proposals satisfied the controls: fit the lookahead on more texts"
        effective = self.effective_share * self.evaluations
        said = f"{effective:.0f} effective texts, largest weight {self.largest_share:.1%}, Pareto k̂ {self.pareto_k:.2f}"
        return f"{said}: {'to be trusted' if self.trusted else 'not to be trusted; draw more texts'}"


def probability(
    target: Target | Problem,
    texts: int = 2048,
    seed: int = 0,
    lookahead: Lookahead | None = None,
    progress: bool = True,
) -> Probability:
    """P(controls) of a model, unbiased for any lookahead; one is fitted on half as many texts if none is given."""
    check_count(texts=texts)
    problem = bind(target)
    check_autoregressive(problem, "a probability")
    bound = log_bound(problem)
    if lookahead is None:
        lookahead = Lookahead.fit(problem, texts=max(256, texts // 2), seed=seed, progress=progress)
    parts = []
    with progress_bar(texts, progress, "weighted texts") as tick:
        for begin in range(0, texts, AT_A_TIME):
            rng = Rng(seed, range(begin, min(begin + AT_A_TIME, texts)), "probability", problem.device)
            blank = problem.allowed_tokens[:1].expand(len(rng), problem.length).clone()
            drawn = lookahead.propose(problem, blank, 0, rng.uniform(problem.length))
            parts.append(drawn.log_weight.double().cpu().numpy() - bound)
            tick("", len(rng))
    return summarise_weights(np.concatenate(parts))


def summarise_weights(log_weight: Float[ndarray, " text"]) -> Probability:
    """The mean of the weights, with an interval on the log scale, on which their mean is closer to normal."""
    count, largest = len(log_weight), log_weight.max()
    if not math.isfinite(largest):
        return Probability(0.0, 0.0, 1.0, 0.0, 1.0, math.inf, False, count)
    weight = np.exp(log_weight - largest)
    mean, error = weight.mean(), weight.std(ddof=1) / math.sqrt(count) if count > 1 else weight.mean()
    value, spread = float(mean * np.exp(largest)), math.exp(1.96 * error / mean)
    share, top = float(weight.sum() ** 2 / (count * (weight**2).sum())), float(weight.max() / weight.sum())
    pareto = _pareto_k(log_weight)
    trusted = share * count >= LEAST_EFFECTIVE and top <= MOST_LARGEST and pareto <= MOST_PARETO
    return Probability(value, value / spread, min(1.0, value * spread), share, top, pareto, trusted, count)


def _pareto_k(log_weight: Float[ndarray, " text"]) -> float:
    """Of the weights that are not 0; equal weights have no tail."""
    from arviz_stats.base import array_stats

    positive = log_weight[np.isfinite(log_weight)]
    if len(positive) < 25:
        return math.inf
    if len(np.unique(np.round(positive, 9))) < 25:  # hardly a tail to be fitted
        return 0.0
    k = float(array_stats.psislw(-positive)[1])  # it is made for log-likelihoods, whose negatives are log-weights
    return k if math.isfinite(k) else 0.0
