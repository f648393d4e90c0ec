"""Langevin dynamics on the Voronoi measure (the paper's algorithm "Langevin Dynamics").

One leapfrog step, as in the paper without Metropolis and with a step size that decays exponentially, so the draws are
biased. With Metropolis it is HMC with a single leapfrog step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from structured_voronoi.baselines.voronoi_measure import Base, OnVoronoiMeasure, State, accept, kinetic, leapfrog
from structured_voronoi.core.contracts import Target
from structured_voronoi.core.info import Info, blank_info
from structured_voronoi.core.streams import Rng
from structured_voronoi.core.validation import check_choice, check_count, check_positive
from structured_voronoi.problem.problem import Problem


@dataclass(frozen=True)
class Langevin(OnVoronoiMeasure):
    """Langevin dynamics on the Voronoi measure.

    Parameters
    ----------
    step_size
        ε at the first step.
    final_step_size
        ε after ``decay_steps`` steps of exponential decay; None: no decay.
    decay_steps
        Steps until the final step size.
    metropolis
        Accept with probability min(1, exp(H - H')).
    base
        ``"gaussian"``, or ``"uniform"`` inside the target's ``box``.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> draws = sv.sample(sv.PottsTarget(side=2), sv.baselines.Langevin(0.5), chains=4, draws=10, progress=False)
    >>> draws["posterior"]["tokens"].shape
    (4, 10, 4)
    """

    step_size: float
    final_step_size: float | None = 0.05
    decay_steps: int = 500
    metropolis: bool = False
    base: Base = "gaussian"

    def __post_init__(self) -> None:
        check_positive(step_size=self.step_size, final_step_size=self.final_step_size)
        check_count(decay_steps=self.decay_steps)
        check_choice(Base, base=self.base)

    @property
    def exact(self) -> bool:
        """Uniform base with Metropolis: exact if all cells have the same volume."""
        return self.metropolis and self.base == "uniform"

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        """One Langevin step of every chain."""
        step_size = decayed(self.step_size, self.final_step_size, self.decay_steps, state.steps)
        r = rng.normal(*state.point.x.shape[1:]).to(state.point.x)
        point, r_after, info = leapfrog(state.measure, state.point, r, step_size, blank_info(state.energy))
        ratio = state.point.potential + kinetic(r) - point.potential - kinetic(r_after) if self.metropolis else None
        return accept(state, point, ratio, rng, info)


def decayed(first: float, final: float | None, decay_steps: int, step: int) -> float:
    """The step size after ``step`` steps of exponential decay; a step size below the final one is constant."""
    if final is None or first <= final:
        return first
    return first * math.exp(math.log(final / first) * min(1.0, step / decay_steps))
