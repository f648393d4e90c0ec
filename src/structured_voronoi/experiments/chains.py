"""Many independent runs at once: each chain is one run, and what is kept is how often it drew each element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from structured_voronoi.base import Sampler
from structured_voronoi.metrics.divergence import Interval, jensen_shannon, mean_interval
from structured_voronoi.run.sampling import steps
from structured_voronoi.targets.categorical import CategoricalTarget


class Runs(NamedTuple):
    """What independent runs of one chain each have drawn."""

    counts: Int[ndarray, "run element"]
    evaluations: float
    """Energy evaluations a run, during its draws."""
    events: float
    """Proposals met a run, during its draws: the cost if nothing were remembered."""


def run_chains(
    target: CategoricalTarget, sampler: Sampler, runs: int, burn_in: int, draws: int, thin: Sequence[int], seed: int
) -> dict[int, Runs]:
    """``draws`` draws for each thinning, all from one set of chains, after a burn-in."""
    chains = steps(target, sampler, runs, seed)
    for _ in range(burn_in):
        next(chains)
    counts = {every: np.zeros((runs, len(target.embeddings)), dtype=np.int64) for every in thin}
    cost = {every: np.zeros(2) for every in thin}
    for step in range(1, draws * max(thin) + 1):
        tokens, info = next(chains)
        for every in thin:
            if step <= draws * every:
                cost[every] += float(info.evaluations.double().mean()), float(info.events.double().mean())
                if step % every == 0:
                    counts[every][np.arange(runs), tokens[:, 0].numpy()] += 1
    return {every: Runs(counts[every], *map(float, cost[every])) for every in thin}


def independent_runs(target: CategoricalTarget, runs: int, draws: int, seed: int) -> Runs:
    """The floor: independent draws from the truth."""
    truth = target.probabilities().numpy()
    return Runs(np.random.default_rng(seed).multinomial(draws, truth, size=runs), 0.0, 0.0)


def divergence(target: CategoricalTarget, runs: Runs) -> Interval:
    """Mean Jensen–Shannon divergence over the runs with its 95 % interval."""
    return mean_interval(jensen_shannon(runs.counts, target.probabilities().numpy()))
