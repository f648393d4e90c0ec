"""Stationarity: chains that start at the truth must stay there."""

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
    """Where the chains ended, beside as many independent draws from the truth; p_value is 0 if one left the support."""

    moved: float
    """Share of chains that ended in another state than they started in: without it the check has no power."""
    evaluations: float
    """Of a chain."""
    energy_z: float
    """How many standard errors the chains' mean energy lies above the truth's."""


def stationarity(
    sampler: Sampler, target: Enumerable, chains: int = 20_000, steps: int = 12, seed: int = 0
) -> Stationarity:
    """Start many chains at the truth of a small target, take a few steps, and compare with the truth.

    This sees bias without waiting for mixing. A p-value below 1e-4 is a bug, if it is not bad luck of one in ten
    thousand; where hardly a chain has moved, the check says nothing.
    """
    check_count(chains=chains, steps=steps)
    if not isinstance(target, Enumerable):
        raise SamplingError(
            f"{type(target).__name__} does not list its states",
            remedy=(
                "give a target with `support()` and `probabilities()`, for example sv.TabularTarget or "
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
    """Of -log p over independent draws; 0 where all states are alike."""
    energy = -np.log(np.maximum(truth, np.finfo(truth.dtype).tiny))
    mean = float(truth @ energy)
    error = float(np.sqrt(truth @ (energy - mean) ** 2 / max(1, counts.sum())))
    return (float(counts @ energy) / max(1, int(counts.sum())) - mean) / error if error else 0.0


def _count_states(support: Tensor, tokens: Tensor) -> tuple[Int[ndarray, " state"], int]:
    """How often each state of the support occurs, and how many rows are none of them."""
    known: Tensor = torch.unique(support)
    base = len(known) + 1
    weights = base ** torch.arange(support.shape[1] - 1, -1, -1, device=support.device)

    def encode(states: Tensor) -> Tensor:
        index = torch.searchsorted(known, states.contiguous()).clamp(max=len(known) - 1)
        index = torch.where(known[index] == states, index, base - 1)  # a token of no state
        return (index * weights).sum(-1)

    numbers, order = encode(support).sort()
    index = torch.searchsorted(numbers, encode(tokens)).clamp(max=len(numbers) - 1)
    inside = numbers[index] == encode(tokens)
    counts = torch.bincount(order[index[inside]], minlength=len(support)).cpu().numpy()
    return np.asarray(counts), int((~inside).sum())
