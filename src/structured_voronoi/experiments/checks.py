"""Checks of a sampler against enumerated truth: stationarity from the truth, energy, and the way back."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from structured_voronoi.base import Enumerable, Rng, Sampler, Target
from structured_voronoi.geometry.motion import Particle, Rotation, travel
from structured_voronoi.metrics.divergence import Fit, goodness_of_fit
from structured_voronoi.samplers.svs import SVS, State
from structured_voronoi.targets.tabular import TabularTarget


def random_target(
    seed: int, tokens: int, length: int, dimensions: int, field_sd: float, dtype: torch.dtype = torch.float64
) -> TabularTarget:
    """Random embeddings, a random table and a random steering field."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    embeddings, log_prob = normal(tokens, dimensions), normal(*(tokens,) * length)
    field = field_sd * normal(*(tokens,) * length, length, dimensions)
    return TabularTarget(embeddings.to(dtype), log_prob.to(dtype), field.to(dtype))


class Stationarity(NamedTuple):
    fit: Fit
    moved: float
    """Share of chains that ended in another state: without it the check has no power."""
    evaluations: float


def stationarity(target: Enumerable, sampler: Sampler, chains: int, steps: int, seed: int) -> Stationarity:
    """Start many chains at the truth, take a few steps, compare with the truth."""
    support, truth = target.support(), target.probabilities()
    rng = Rng(seed, chains, device=support.device)
    first = rng.fork("truth").categorical(truth.log().expand(chains, -1))
    state, cost = sampler.init(target, rng, support[first]), 0.0
    for _ in range(steps):
        state, info = sampler.step(target, rng, state)
        cost += float(info.evaluations.double().mean())
    moved = (state.tokens != support[first]).any(-1).double().mean()
    return Stationarity(goodness_of_fit(_counts(support, state.tokens), truth.cpu().numpy()), float(moved), cost)


def _counts(support: Tensor, tokens: Tensor) -> np.ndarray:
    """How often each state of the support occurs."""
    base = int(support.max()) + 1
    weights = base ** torch.arange(support.shape[1] - 1, -1, -1, device=support.device)
    place = torch.searchsorted((support * weights).sum(-1), (tokens * weights).sum(-1))
    return torch.bincount(place, minlength=len(support)).cpu().numpy()


class RoundTrip(NamedTuple):
    """Forward, momentum turned round, forward again: how far from the start, in units of σ."""

    distance: Float[Tensor, " chain"]
    energy_error: Float[Tensor, " chain"]
    """|H' - H| / (1 + |H|) on the way out."""
    swapped: Tensor
    """Which trajectories changed a token."""

    def failures(self, tolerance: float) -> float:
        """The share of swapping trajectories that do not come back."""
        return float((~(self.distance <= tolerance))[self.swapped].double().mean())


def round_trip(target: Target, sampler: SVS, chains: int, seed: int) -> RoundTrip:
    """One trajectory and back for each chain, from random starts."""
    rng = Rng(seed, chains, device=target.embeddings.device)
    state: State = sampler.init(target, rng, None)
    space, evaluate = state.space, sampler._evaluator(target, state.space)
    start, duration = sampler._launched(rng, state), sampler._durations(rng, state.centre)

    def go(particle: Particle) -> Particle:
        end, _, _ = travel(space.cells, particle, duration, space.flow, sampler._walls, evaluate, sampler.max_events)
        return end._replace(r=-end.r)

    def energy(particle: Particle) -> Tensor:
        return particle.potential + space.flow.potential(particle.x, particle.centre) + (particle.r**2).sum((1, 2)) / 2

    there = go(start)
    back = go(there)
    sigma = space.flow.sigma if isinstance(space.flow, Rotation) else 1.0
    distance = (back.x - start.x).flatten(1).norm(dim=-1) / sigma
    distance = torch.where((back.cell == start.cell).all(-1), distance, math.inf)
    error = (energy(there) - energy(start)).abs() / (1 + energy(start).abs())
    return RoundTrip(distance, error, (there.cell != start.cell).any(-1))
