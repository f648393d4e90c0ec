"""The paper's own algorithms: Structured Voronoi Sampling, Find Discontinuity and RefractReflect.

Amini, Du and Cotterell (2023). One leapfrog step, whose drift looks for discontinuities on a grid of fractions α of the
step. It is corrected only where docs/deviations.md says so: refraction divides by ‖r⊥‖, r ~ N(0, I), one potential in H
and at walls, the momentum is returned, the drift ends at τ = 1, and the box reflects. The grid, which misses and
reorders crossings and ignores walls with ΔU = 0, is kept. Without Metropolis, as in the paper's runs on text, its bias
is not corrected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.baselines.voronoi_measure import (
    Base,
    OnVoronoiMeasure,
    Point,
    State,
    VoronoiMeasure,
    accept,
    choose_point,
    kinetic,
)
from structured_voronoi.core.contracts import Target
from structured_voronoi.core.info import Info, blank_info
from structured_voronoi.core.streams import Rng
from structured_voronoi.core.validation import check_choice, check_count, check_positive
from structured_voronoi.geometry.flows import refracted
from structured_voronoi.problem.problem import Problem


@dataclass(frozen=True)
class PaperSVS(OnVoronoiMeasure):
    """The paper's algorithm; `SVS.paper` constructs it. Not exact.

    Parameters
    ----------
    step_size
        ε, the size of the leapfrog step.
    discontinuity_step
        α, the fraction of a step at which discontinuities are looked for.
    metropolis
        Accept or reject each step.
    base
        ``"gaussian"``, or ``"uniform"`` inside the target's ``box``.
    max_events
        A drift with more rounds than this, beyond its 1/α fractions, is rejected.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> draws = sv.sample(sv.PottsTarget(side=2), sv.SVS.paper(0.5, 0.2), chains=4, draws=10, progress=False)
    >>> draws["posterior"]["tokens"].shape
    (4, 10, 4)
    """

    step_size: float
    discontinuity_step: float
    metropolis: bool = True
    base: Base = "gaussian"
    max_events: int = 1000

    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_positive(step_size=self.step_size, discontinuity_step=self.discontinuity_step)
        check_count(max_events=self.max_events)
        check_choice(Base, base=self.base)

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        """Algorithm "Structured Voronoi Sampling"."""
        measure, info = state.measure, blank_info(state.energy)
        r = rng.normal(*state.point.x.shape[1:]).to(state.point.x)  # line 1, with N(0, I)
        before = state.point.potential + kinetic(r)  # line 2
        r = r + self.step_size / 2 * measure.force(state.point)  # line 3
        point, r, info = find_discontinuities(
            measure, state.point, r, self.step_size, self.discontinuity_step, self.max_events, info
        )  # line 4
        r = r + self.step_size / 2 * measure.force(point)  # line 5
        after = point.potential + kinetic(r)  # line 6
        ratio = before - after if self.metropolis else torch.full_like(before, torch.inf)
        ratio = torch.where(info.diverging, -torch.inf, ratio)
        return accept(state, point, ratio, rng, info)  # lines 7-11


def find_discontinuities(
    measure: VoronoiMeasure, point: Point, r: Tensor, step_size: float, alpha: float, max_events: int, info: Info
) -> tuple[Point, Tensor, Info]:
    """Algorithm "Find Discontinuity": the cells at both ends of each fraction α of the step are compared."""
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
        # to the boundary, or to the end of the fraction if there is none
        fraction = torch.where(changed, when.clamp(min=0).minimum(fraction), fraction)
        x = (point.x + fraction[:, None, None] * step_size * r).clamp(low, high)
        here, _ = measure.within(x, point.cell, point, info)
        beyond, info = measure.within(x, neighbour, here, info)
        jump = beyond.potential - here.potential  # line 5
        swapped, r_new = refract_reflect(measure, r, point.cell, neighbour, first, jump)  # line 13
        crossing = changed & (jump != 0)  # a wall with ΔU = 0 is ignored
        entered = changed & (swapped | (jump == 0))
        bounced = at_box & ~changed
        reflections = reflections + (crossing & ~swapped).long() + bounced.long()
        r = torch.where(crossing[:, None, None], r_new, r)
        r = torch.where(bounced[:, None, None] & side, -r, r)
        point = choose_point(entered, beyond, here)
        done = done + fraction
        if rounds >= max_events + 1 / alpha:
            diverging = diverging | active
    return point, r, info._replace(reflections=reflections, diverging=diverging)


def _relabel(measure: VoronoiMeasure, point: Point, active: Tensor, info: Info) -> tuple[Point, Info]:
    """Set the cell to m*(x) if a crossing was missed; a point on a boundary keeps its cell."""
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
    """Algorithm "RefractReflect" at the boundary of one position: the chains that refract, and the momenta."""
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
    """Algorithm "FindB": the position that first crosses its bisector with the cell at the end, and the time."""
    here = measure.cells.points(point.cell)
    a = measure.cells.points(there) - here
    b = measure.cells.half_norm[there] - measure.cells.half_norm[point.cell]
    speed = (a * velocity).sum(-1)
    time = torch.where(speed > 0, (b - (a * point.x).sum(-1)) / speed, torch.inf)
    when, position = torch.where(there != point.cell, time, torch.inf).min(-1)
    return position, when


def _time_to_box(x: Tensor, velocity: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The time at which the first side of the box is met, and the coordinates that meet it."""
    gap = torch.where(velocity > 0, high - x, x - low).clamp(min=0)
    time = torch.where(velocity == 0, torch.inf, gap / velocity.abs())
    first = time.flatten(1).amin(-1)
    return first, time == first[:, None, None]
