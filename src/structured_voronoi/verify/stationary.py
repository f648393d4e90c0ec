"""Stationarity: chains that start from the exact distribution must keep it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from structured_voronoi.core.contracts import Chains, Enumerable, Sampler
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.streams import Rng
from structured_voronoi.core.validation import check_count
from structured_voronoi.metrics.divergence import Fit, goodness_of_fit
from structured_voronoi.problem.problem import bind


@dataclass(frozen=True)
class Stationarity(Fit):
    """Comparison of the final states with independent draws; ``p_value`` is 0 if a chain left the support."""

    moved: float
    """Share of chains whose final state differs from the start; without moves the check has no power."""
    evaluations: float
    """Mean evaluations of the target per chain."""
    energy_z: float
    """Standard errors by which the mean of -log p exceeds the exact mean."""


def stationarity(
    sampler: Sampler, target: Enumerable, chains: int = 20_000, steps: int = 12, seed: int = 0
) -> Stationarity:
    """Test whether a sampler keeps the exact distribution of a small target.

    Chains start from the exact distribution, take a few steps, and are compared with it. This detects bias without
    waiting for mixing. The test has no power if few chains move.

    Parameters
    ----------
    sampler
        Any sampler.
    target
        Target with ``support()`` and ``probabilities()``.
    chains
        Number of chains.
    steps
        Steps of each chain.
    seed
        Seed of the random streams.

    Returns
    -------
    Stationarity
        Total variation distance ``tv``, its ``floor`` for independent draws, their ``ratio``, ``p_value`` and
        ``moved``. A p-value below 1e-4 indicates a bias.

    Raises
    ------
    SamplingError
        If the target does not list its states.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> found = sv.verify.stationarity(sv.PNCG(4.0), sv.verify.random_target(seed=0), chains=2000, steps=4)
    >>> found.p_value > 1e-4 and found.moved > 0.3
    True
    """
    check_count(chains=chains, steps=steps)
    if not isinstance(target, Enumerable):
        raise SamplingError(
            f"{type(target).__name__} does not list its states",
            remedy=(
                "use a target with `support()` and `probabilities()`, for example sv.TabularTarget or "
                "sv.verify.random_target(seed=0)"
            ),
        )
    problem, support, truth = bind(target), target.support(), target.probabilities()
    rng = Rng(seed, chains, device=support.device)
    start = support[rng.fork("truth").categorical(truth.log().expand(chains, -1))]
    running, cost = Chains(sampler, problem, rng, start), 0.0
    for _, info in islice(running, steps):
        cost += float(info.evaluations.double().mean())
    last = running.state.tokens
    counts, outside = _count_states(support, last)
    fit = goodness_of_fit(counts, truth.cpu().numpy())
    moved = float((last != start).any(-1).double().mean())
    p_value = 0.0 if outside else fit.p_value
    energy_z = _energy_z(counts, truth.cpu().numpy())
    return Stationarity(fit.tv + outside / chains, fit.floor, fit.floor_sd, p_value, moved, cost, energy_z)


def _energy_z(counts: Int[ndarray, " state"], truth: Float[ndarray, " state"]) -> float:
    """Return the z-score of the mean of -log p; 0 if all states are equally probable."""
    energy = -np.log(np.maximum(truth, np.finfo(truth.dtype).tiny))
    mean = float(truth @ energy)
    error = float(np.sqrt(truth @ (energy - mean) ** 2 / max(1, counts.sum())))
    return (float(counts @ energy) / max(1, int(counts.sum())) - mean) / error if error else 0.0


def _count_states(support: Tensor, tokens: Tensor) -> tuple[Int[ndarray, " state"], int]:
    """Return the count of each state of the support, and the number of rows outside the support."""
    known: Tensor = torch.unique(support)
    base = len(known) + 1
    weights = base ** torch.arange(support.shape[1] - 1, -1, -1, device=support.device)

    def encode(states: Tensor) -> Tensor:
        index = torch.searchsorted(known, states.contiguous()).clamp(max=len(known) - 1)
        index = torch.where(known[index] == states, index, base - 1)  # a token that is in no state
        return (index * weights).sum(-1)

    numbers, order = encode(support).sort()
    index = torch.searchsorted(numbers, encode(tokens)).clamp(max=len(numbers) - 1)
    inside = numbers[index] == encode(tokens)
    counts = torch.bincount(order[index[inside]], minlength=len(support)).cpu().numpy()
    return np.asarray(counts), int((~inside).sum())
