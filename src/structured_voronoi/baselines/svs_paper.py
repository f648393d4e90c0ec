"""The paper's own algorithms: Structured Voronoi Sampling, Find Discontinuity and RefractReflect.

One leapfrog step whose drift looks for discontinuities on a grid of fractions α of the step. Corrected only where
docs/deviations.md says so: refraction divides by ‖r⊥‖, r ~ N(0, I), one potential in H and at walls, the momentum
is handed back, the drift ends at τ = 1, the box reflects. The grid itself, which misses and reorders crossings and
ignores walls with ΔU = 0, is kept. Without Metropolis the bias of the grid goes uncorrected, as in the paper's runs
on text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import Info, Target
from structured_voronoi.core.streams import Rng
from structured_voronoi.core.validation import check_choice, check_count, check_positive
from structured_voronoi.geometry.motion import refracted
from structured_voronoi.problem.problem import Problem
from structured_voronoi.samplers.voronoi_measure import (
    Base,
    OnVoronoiMeasure,
    Point,
    State,
    VoronoiMeasure,
    choose_point,
    finish,
    kinetic,
    no_events,
)


@dataclass(frozen=True)
class PaperSVS(OnVoronoiMeasure):
    """Settings of the paper's algorithm; made by `SVS.paper`."""

    step_size: float
    """ε"""
    discontinuity_step: float
    """α"""
    metropolis: bool = True
    base: Base = "gaussian"
    max_events: int = 1000
    """More rounds than this in one drift, beyond its 1/α fractions, and the step is rejected."""

    def __post_init__(self) -> None:
        check_positive(step_size=self.step_size, discontinuity_step=self.discontinuity_step)
        check_count(max_events=self.max_events)
        check_choice(Base, base=self.base)

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        """Algorithm "Structured Voronoi Sampling"."""
        measure, info = state.measure, no_events(state)
        r = rng.normal(*state.point.x.shape[1:]).to(state.point.x)  # line 1, with N(0, I)
        before = state.point.potential + kinetic(r)  # line 2
        r = r + self.step_size / 2 * measure.force(state.point)  # line 3
        drifted, info = find_discontinuities(
            measure, state.point, r, self.step_size, self.discontinuity_step, self.max_events, info
        )  # line 4
        r = drifted.r + self.step_size / 2 * measure.force(drifted.point)  # line 5
        after = drifted.point.potential + kinetic(r)  # line 6
        ratio = before - after if self.metropolis else torch.full_like(before, torch.inf)
        ratio = torch.where(info.diverging, -torch.inf, ratio)
        return finish(state, drifted.point, ratio, rng, info)  # lines 7-11


class Drift(NamedTuple):
    """The end of a drift: the point and the momentum."""

    point: Point
    r: Float[Tensor, "chain n d"]


def find_discontinuities(
    measure: VoronoiMeasure, point: Point, r: Tensor, step_size: float, alpha: float, max_events: int, info: Info
) -> tuple[Drift, Info]:
    """Algorithm "Find Discontinuity": fractions α of the step, each looked at from its two ends only."""
    reflections, diverging = info.reflections.clone(), info.diverging.clone()
    done = point.x.new_zeros(len(point.x))  # τ
    low, high = measure.bounds
    rounds = 0
    while (active := (done < 1) & ~diverging).any():
        rounds += 1
        point, info = _relabel(measure, point, active, info)
        fraction = torch.where(active, (1 - done).clamp(max=alpha), 0)
        to_box, side = _time_to_box(point.x, step_size * r, low, high)
        at_box = active & (to_box <= fraction)
        fraction = torch.where(at_box, to_box, fraction)
        there = measure.cells.nearest(point.x + fraction[:, None, None] * step_size * r, point.cell)  # line 4
        first, when = _first_boundary(measure, point, there, step_size * r)
        changed = active & when.isfinite()
        neighbour = point.cell.clone()
        rows = changed.nonzero().squeeze(-1)
        neighbour[rows, first[rows]] = there[rows, first[rows]]
        # the point goes to the boundary, or to the end of the fraction where there is none
        fraction = torch.where(changed, when.clamp(min=0).minimum(fraction), fraction)
        x = (point.x + fraction[:, None, None] * step_size * r).clamp(low, high)
        here, _ = measure.within(x, point.cell, point, info)
        beyond, info = measure.within(x, neighbour, here, info)
        jump = beyond.potential - here.potential  # line 5
        swapped, r_new = refract_reflect(measure, r, point.cell, neighbour, first, jump)  # line 13
        crossing = changed & (jump != 0)  # a wall with ΔU = 0 is not noticed
        entered = changed & (swapped | (jump == 0))
        bounced = at_box & ~changed
        reflections = reflections + (crossing & ~swapped).long() + bounced.long()
        r = torch.where(crossing[:, None, None], r_new, r)
        r = torch.where(bounced[:, None, None] & side, -r, r)
        point = choose_point(entered, beyond, here)
        done = done + fraction
        if rounds >= max_events + 1 / alpha:
            diverging = diverging | active
    return Drift(point, r), info._replace(reflections=reflections, diverging=diverging)


def _relabel(measure: VoronoiMeasure, point: Point, active: Tensor, info: Info) -> tuple[Point, Info]:
    """The cell is m*(x) again where a crossing was missed; a point on a boundary keeps the side it has."""
    cell = measure.cells.nearest(point.x, point.cell)
    gap = _distance(measure, point.x, point.cell) - _distance(measure, point.x, cell)
    tie = 1e3 * torch.finfo(point.x.dtype).eps * (1 + _distance(measure, point.x, point.cell))
    wrong = active[:, None] & (gap > tie)
    return measure.within(point.x, torch.where(wrong, cell, point.cell), point, info)


def _distance(measure: VoronoiMeasure, x: Tensor, cell: Tensor) -> Float[Tensor, "chain n"]:
    return ((x - measure.cells.points(cell)) ** 2).sum(-1)


def refract_reflect(
    measure: VoronoiMeasure,
    r: Float[Tensor, "chain n d"],
    cell: Int[Tensor, "chain n"],
    neighbour: Int[Tensor, "chain n"],
    position: Int[Tensor, " chain"],
    jump: Float[Tensor, " chain"],
) -> tuple[Tensor, Tensor]:
    """Algorithm "RefractReflect" at the boundary of one position; returns which chains refracted, and the momenta."""
    chain = torch.arange(len(r), device=r.device)
    normal = measure.cells.table[neighbour[chain, position]] - measure.cells.table[cell[chain, position]]
    normal = normal / normal.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(r.dtype).tiny)
    speed = (r[chain, position] * normal).sum(-1)  # lines 1-2
    swapped = speed**2 > 2 * jump  # line 3
    after = torch.where(swapped, refracted(speed, torch.where(swapped, jump, 0)).to(speed), -speed)  # lines 4-6
    r = r.clone()
    r[chain, position] += (after - speed)[:, None] * normal  # line 7
    return swapped, r


def _first_boundary(measure: VoronoiMeasure, point: Point, there: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
    """ "FindB": the position whose bisector with the cell at the fraction's end comes first, and when."""
    here = measure.cells.points(point.cell)
    a = measure.cells.points(there) - here
    b = measure.cells.half_norm[there] - measure.cells.half_norm[point.cell]
    speed = (a * velocity).sum(-1)
    time = torch.where(speed > 0, (b - (a * point.x).sum(-1)) / speed, torch.inf)
    when, position = torch.where(there != point.cell, time, torch.inf).min(-1)
    return position, when


def _time_to_box(x: Tensor, velocity: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """When the first side of the box is met, and which coordinates meet it."""
    gap = torch.where(velocity > 0, high - x, x - low).clamp(min=0)
    time = torch.where(velocity == 0, torch.inf, gap / velocity.abs())
    first = time.flatten(1).amin(-1)
    return first, time == first[:, None, None]
