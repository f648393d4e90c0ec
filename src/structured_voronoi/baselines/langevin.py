"""Langevin dynamics on the Voronoi measure (the paper's algorithm "Langevin Dynamics").

One leapfrog step, by default uncorrected and with a step size that decays exponentially, as the paper runs it; the
draws are then biased by design. With Metropolis it is HMC with one leapfrog step.
"""

from __future__ import annotations

import math
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
class Langevin(OnVoronoiMeasure):
    """Settings of Langevin dynamics."""

    step_size: float
    """ε at the first step"""
    final_step_size: float | None = 0.05
    """ε after `decay_steps` steps and from then on; None: no decay."""
    decay_steps: int = 500
    metropolis: bool = False
    base: Base = "gaussian"

    def __post_init__(self) -> None:
        check_positive(step_size=self.step_size, final_step_size=self.final_step_size)
        check_count(decay_steps=self.decay_steps)
        check_choice(Base, base=self.base)

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        step_size = decayed(self.step_size, self.final_step_size, self.decay_steps, state.steps)
        r = rng.normal(*state.point.x.shape[1:]).to(state.point.x)
        point, r_after, info = leapfrog(state.measure, state.point, r, step_size, no_events(state))
        ratio = state.point.potential + kinetic(r) - point.potential - kinetic(r_after) if self.metropolis else None
        return finish(state, point, ratio, rng, info)


def decayed(first: float, final: float | None, decay_steps: int, step: int) -> float:
    """The step size after ``step`` steps of exponential decay; one that is below the final one already stays."""
    if final is None or first <= final:
        return first
    return first * math.exp(math.log(final / first) * min(1.0, step / decay_steps))
