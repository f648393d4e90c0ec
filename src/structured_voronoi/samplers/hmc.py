"""Plain Hamiltonian Monte Carlo on the Voronoi measure (Duane et al. 1987; the paper's algorithm "HMC").

Leapfrog steps that do not notice the walls, then Metropolis. Exact where all cells are equally heavy.
"""

from __future__ import annotations

from dataclasses import dataclass

from structured_voronoi.base import Info, Rng, Start, Target
from structured_voronoi.samplers.evaluation import one_of, positive, whole
from structured_voronoi.samplers.voronoi_measure import (
    Base,
    State,
    finish,
    initial_state,
    kinetic,
    leapfrog,
    no_news,
)


@dataclass(frozen=True)
class HMC:
    """Settings of plain HMC."""

    step_size: float
    """ε"""
    leapfrog_steps: int = 1
    base: Base = "gaussian"

    def __post_init__(self) -> None:
        positive(step_size=self.step_size)
        whole(leapfrog_steps=self.leapfrog_steps)
        one_of(Base, base=self.base)

    def init(self, target: Target, rng: Rng, start: Start) -> State:
        return initial_state(target, self.base, rng, start)

    def step(self, target: Target, rng: Rng, state: State) -> tuple[State, Info]:
        point, info = state.point, no_news(state)
        r = rng.normal(*point.x.shape[1:]).to(point.x)
        before = point.potential + kinetic(r)
        for _ in range(self.leapfrog_steps):
            point, r, info = leapfrog(state.measure, point, r, self.step_size, info)
        return finish(state, point, before - point.potential - kinetic(r), rng, info)
