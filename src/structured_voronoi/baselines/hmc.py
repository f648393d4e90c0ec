"""Hamiltonian Monte Carlo on the Voronoi measure (Duane et al. 1987; the paper's algorithm "HMC").

Leapfrog steps, which ignore the walls, then Metropolis. Exact if all cells have the same mass.
"""

from __future__ import annotations

from dataclasses import dataclass

from structured_voronoi.baselines.voronoi_measure import Base, OnVoronoiMeasure, State, accept, kinetic, leapfrog
from structured_voronoi.core.contracts import Target
from structured_voronoi.core.info import Info, blank_info
from structured_voronoi.core.streams import Rng
from structured_voronoi.core.validation import check_choice, check_count, check_positive
from structured_voronoi.problem.problem import Problem


@dataclass(frozen=True)
class HMC(OnVoronoiMeasure):
    """Hamiltonian Monte Carlo on the Voronoi measure.

    Parameters
    ----------
    step_size
        ε, the size of a leapfrog step.
    leapfrog_steps
        Leapfrog steps of a trajectory.
    base
        ``"gaussian"``, or ``"uniform"`` inside the target's ``box``.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> draws = sv.sample(sv.PottsTarget(side=2), sv.baselines.HMC(0.5), chains=4, draws=10, progress=False)
    >>> draws["posterior"]["tokens"].shape
    (4, 10, 4)
    """

    step_size: float
    leapfrog_steps: int = 1
    base: Base = "gaussian"

    def __post_init__(self) -> None:
        check_positive(step_size=self.step_size)
        check_count(leapfrog_steps=self.leapfrog_steps)
        check_choice(Base, base=self.base)

    @property
    def exact(self) -> bool:
        """Uniform base: exact if all cells have the same volume."""
        return self.base == "uniform"

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        """One trajectory of every chain."""
        point, info = state.point, blank_info(state.energy)
        r = rng.normal(*point.x.shape[1:]).to(point.x)
        before = point.potential + kinetic(r)
        for _ in range(self.leapfrog_steps):
            point, r, info = leapfrog(state.measure, point, r, self.step_size, info)
        return accept(state, point, before - point.potential - kinetic(r), rng, info)
