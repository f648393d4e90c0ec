"""Many independent runs at once: each chain is one run, and what is kept is how often it drew each element."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from itertools import islice
from multiprocessing import resource_tracker
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from numpy import ndarray
from torch import Tensor

from structured_voronoi.base import Info, Sampler
from structured_voronoi.metrics.divergence import Interval, jensen_shannon, mean_interval
from structured_voronoi.run.progress import progress_bar
from structured_voronoi.run.sampling import steps
from structured_voronoi.targets.categorical import CategoricalTarget


class Runs(NamedTuple):
    """What independent runs of one chain each have drawn."""

    counts: Int[ndarray, "run element"]
    evaluations: float
    """Energy evaluations a run, burn-in included."""
    events: float
    """Proposals met a run, burn-in included: the evaluations if nothing were remembered."""


def run_chains(
    target: CategoricalTarget,
    sampler: Sampler,
    runs: int,
    burn_in: int,
    draws: int,
    thin: Sequence[int],
    seed: int,
) -> dict[int, Runs]:
    """``draws`` draws for each thinning, all from one set of chains, after a burn-in."""
    chains = steps(target, sampler, runs, seed)
    tallies = {every: _Tally(runs, len(target.embeddings)) for every in thin}
    for tokens, info in islice(chains, burn_in):
        for tally in tallies.values():
            tally.add(tokens, info, drawn=False)
    for step in range(1, draws * max(thin) + 1):
        tokens, info = next(chains)
        for every, tally in tallies.items():
            if step <= draws * every:
                tally.add(tokens, info, drawn=step % every == 0)
    return {every: tally.runs() for every, tally in tallies.items()}


def run_iterations(
    target: CategoricalTarget, sampler: Sampler, runs: int, iterations: Sequence[int], seed: int
) -> dict[int, Runs]:
    """Every state of the chains, from their random starts to each number of iterations."""
    tally, found = _Tally(runs, len(target.embeddings)), {}
    for step, (tokens, info) in zip(range(1, max(iterations) + 1), steps(target, sampler, runs, seed), strict=False):
        tally.add(tokens, info, drawn=True)
        if step in iterations:
            found[step] = tally.runs()
    return found


class _Tally:
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
    """The floor: independent draws from the truth."""
    truth = target.probabilities().numpy()
    return Runs(np.random.default_rng(seed).multinomial(draws, truth, size=runs), 0.0, 0.0)


def divergence(target: CategoricalTarget, runs: Runs) -> Interval:
    """Mean Jensen–Shannon divergence over the runs with its 95 % interval."""
    return mean_interval(jensen_shannon(runs.counts, target.probabilities().numpy()))


def side_by_side(work: Callable[[Any], Any], tasks: Sequence[Any], what: str, progress: bool) -> list[Any]:
    """``work`` on each task, as many at a time as there are cores, each on one thread; results in the tasks' order."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # else it would be started, and would change the mask, in between
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a Ctrl-C that comes meanwhile waits
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)  # workers inherit this: Ctrl-C is for the parent alone
    try:
        pool = context.Pool(min(len(tasks), cores), torch.set_num_threads, (1,))
    finally:
        signal.signal(signal.SIGINT, usual)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with pool, progress_bar(len(tasks), progress, what) as tick:
        results = []
        for result in pool.imap(work, tasks):
            results.append(result)
            tick()
        return results
