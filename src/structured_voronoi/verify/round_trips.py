"""Round trips of SVS: forward, momentum turned round, forward again must lead back to where it began."""

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
    """How far from the start each trajectory came back."""

    distance: Float[Tensor, " chain"]
    """Of x, in units of σ (of the embeddings' own for the uniform base), and of r; infinite where the tokens differ."""
    energy_error: Float[Tensor, " chain"]
    """|H' - H| / (1 + |H|) on the way out."""
    swapped: Bool[Tensor, " chain"]
    """Which trajectories changed a token."""

    def failures(self, tolerance: float) -> float:
        """The share of swapping trajectories that do not come back."""
        return float((~(self.distance <= tolerance))[self.swapped].double().mean())


def round_trip(sampler: SVS, target: Target, chains: int = 1000, seed: int = 0) -> RoundTrip:
    """One trajectory and back for each chain, from random starts."""
    problem = bind(target)
    rng = Rng(seed, chains, device=problem.device)
    trajectory = sampler.trajectory(problem, rng, sampler.init(problem, rng, None))
    start = trajectory.start

    def turn_round(particle: Particle) -> Particle:
        return particle._replace(r=-particle.r)

    far_end = turn_round(simulate(trajectory)[0])
    back = turn_round(simulate(trajectory._replace(start=far_end))[0])
    sigma = trajectory.flow.sigma if isinstance(trajectory.flow, Rotation) else 1.0
    apart = torch.stack([(back.x - start.x) / sigma, back.r - start.r])
    distance = apart.flatten(2).norm(dim=-1).amax(0)
    distance = torch.where((back.cell == start.cell).all(-1), distance, math.inf)
    error = (trajectory.energy(far_end) - trajectory.energy(start)).abs() / (1 + trajectory.energy(start).abs())
    return RoundTrip(distance, error, (far_end.cell != start.cell).any(-1))
