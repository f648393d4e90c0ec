"""Independent runs, computed as the chains of one batch; each run counts how often it drew each element."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from numpy import ndarray
from torch import Tensor

from structured_voronoi.core.contracts import Sampler
from structured_voronoi.core.info import Info
from structured_voronoi.engine.sampling import start_chains
from structured_voronoi.metrics.divergence import Interval, jensen_shannon, mean_interval
from structured_voronoi.targets.categorical import CategoricalTarget


class Runs(NamedTuple):
    """Counts and mean costs of independent runs."""

    counts: Int[ndarray, "run element"]
    evaluations: float
    """Energy evaluations per run, including burn-in."""
    events: float
    """Proposals per run, including burn-in; the number of evaluations without a cache."""


def run_chains(
    target: CategoricalTarget,
    sampler: Sampler,
    runs: int,
    burn_in: int,
    draws: int,
    thin: Sequence[int],
    seed: int,
) -> dict[int, Runs]:
    """Run the chains once and return ``draws`` draws per run for each thinning interval, after a burn-in."""
    chains = start_chains(target, sampler, runs, seed)
    tallies = {every: _Tally(runs, len(target.embeddings)) for every in thin}
    for state, info in islice(chains, burn_in):
        for tally in tallies.values():
            tally.add(state.tokens, info, drawn=False)
    for step, (state, info) in enumerate(islice(chains, draws * max(thin)), 1):
        for every, tally in tallies.items():
            if step <= draws * every:
                tally.add(state.tokens, info, drawn=step % every == 0)
    return {every: tally.runs() for every, tally in tallies.items()}


def run_iterations(
    target: CategoricalTarget, sampler: Sampler, runs: int, iterations: Sequence[int], seed: int
) -> dict[int, Runs]:
    """Count every state of the chains from random starts, up to each number of iterations."""
    tally, by_iterations = _Tally(runs, len(target.embeddings)), {}
    chains = start_chains(target, sampler, runs, seed)
    for step, (state, info) in enumerate(islice(chains, max(iterations)), 1):
        tally.add(state.tokens, info, drawn=True)
        if step in iterations:
            by_iterations[step] = tally.runs()
    return by_iterations


class _Tally:
    """Counts and costs so far."""

    def __init__(self, runs: int, elements: int) -> None:
        self.counts = np.zeros((runs, elements), dtype=np.int64)
        self.evaluations = self.events = 0.0

    def add(self, tokens: Tensor, info: Info, drawn: bool) -> None:
        self.evaluations += float(info.evaluations.double().mean())
        self.events += float(info.events.double().mean())
        if drawn:
            self.counts[np.arange(len(self.counts)), tokens[:, 0].numpy()] += 1

    def runs(self) -> Runs:
        return Runs(self.counts.copy(), self.evaluations, self.events)


def independent_runs(target: CategoricalTarget, runs: int, draws: int, seed: int) -> Runs:
    """Independent draws from the target, for the noise floor."""
    truth = target.probabilities().numpy()
    return Runs(np.random.default_rng(seed).multinomial(draws, truth, size=runs), 0.0, 0.0)


def divergence(target: CategoricalTarget, runs: Runs) -> Interval:
    """Mean Jensen–Shannon divergence over the runs with its 95 % interval."""
    return mean_interval(jensen_shannon(runs.counts, target.probabilities().numpy()))
