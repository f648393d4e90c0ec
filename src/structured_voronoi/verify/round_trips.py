"""Reversibility of SVS: a trajectory with reversed momentum must return to its start."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from structured_voronoi.core.contracts import Target
from structured_voronoi.core.streams import Rng
from structured_voronoi.geometry.flows import Particle, Rotation
from structured_voronoi.geometry.motion import simulate
from structured_voronoi.problem.problem import bind
from structured_voronoi.samplers.svs import SVS


class RoundTrip(NamedTuple):
    """Distances of returned trajectories from their starts."""

    distance: Float[Tensor, " chain"]
    """Larger distance of x (in units of σ; of the embeddings for the uniform base) and r; inf if the tokens differ."""
    energy_error: Float[Tensor, " chain"]
    """|H' - H| / (1 + |H|) of the forward trajectory."""
    swapped: Bool[Tensor, " chain"]
    """Whether the forward trajectory changed a token."""

    def failures(self, tolerance: float) -> float:
        """Return the share of swapping trajectories that end farther than ``tolerance`` from the start."""
        return float((~(self.distance <= tolerance))[self.swapped].double().mean())


def round_trip(sampler: SVS, target: Target, chains: int = 1000, seed: int = 0) -> RoundTrip:
    """Run a trajectory forward and back for each chain.

    Parameters
    ----------
    sampler
        Settings of SVS, with a number as the scale.
    target
        Target of the sampler.
    chains
        Number of trajectories, from random starts.
    seed
        Seed of the random streams.

    Returns
    -------
    RoundTrip
        Distances from the starts, energy errors, and which trajectories changed a token.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> trip = sv.verify.round_trip(sv.SVS(1.0), sv.verify.random_target(seed=0), chains=100)
    >>> trip.failures(tolerance=1e-6)
    0.0
    """
    problem = bind(target)
    rng = Rng(seed, chains, device=problem.device)
    trajectory = sampler.trajectory(problem, rng, sampler.init(problem, rng, None))
    start = trajectory.start

    def reverse(particle: Particle) -> Particle:
        return particle._replace(r=-particle.r)

    far_end = reverse(simulate(trajectory)[0])
    back = reverse(simulate(trajectory._replace(start=far_end))[0])
    sigma = trajectory.flow.sigma if isinstance(trajectory.flow, Rotation) else 1.0
    apart = torch.stack([(back.x - start.x) / sigma, back.r - start.r])
    distance = apart.flatten(2).norm(dim=-1).amax(0)
    distance = torch.where((back.cell == start.cell).all(-1), distance, math.inf)
    error = (trajectory.energy(far_end) - trajectory.energy(start)).abs() / (1 + trajectory.energy(start).abs())
    return RoundTrip(distance, error, (far_end.cell != start.cell).any(-1))
