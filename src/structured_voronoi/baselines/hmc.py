"""Plain Hamiltonian Monte Carlo on the Voronoi measure (Duane et al. 1987; the paper's algorithm "HMC").

Leapfrog steps that do not notice the walls, then Metropolis. Exact where all cells are equally heavy.
"""

from __future__ import annotations

from dataclasses import dataclass

from structured_voronoi.core.contracts import Info, Target
from structured_voronoi.core.streams import Rng
from structured_voronoi.core.validation import check_choice, check_count, check_positive
from structured_voronoi.problem.problem import Problem
from structured_voronoi.samplers.voronoi_measure import (
    Base,
    OnVoronoiMeasure,
    State,
    finish,
    kinetic,
    leapfrog,
    no_events,
)


@dataclass(frozen=True)
class HMC(OnVoronoiMeasure):
    """Settings of plain HMC."""

    step_size: float
    """ε"""
    leapfrog_steps: int = 1
    base: Base = "gaussian"

    def __post_init__(self) -> None:
        check_positive(step_size=self.step_size)
        check_count(leapfrog_steps=self.leapfrog_steps)
        check_choice(Base, base=self.base)

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        point, info = state.point, no_events(state)
        r = rng.normal(*point.x.shape[1:]).to(point.x)
        before = point.potential + kinetic(r)
        for _ in range(self.leapfrog_steps):
            point, r, info = leapfrog(state.measure, point, r, self.step_size, info)
        return finish(state, point, before - point.potential - kinetic(r), rng, info)
