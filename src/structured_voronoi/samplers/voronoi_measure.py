"""The paper's Voronoi measure as a density over x, for samplers that integrate it numerically.

Gaussian base (the paper's definition 3.4 and eq. 9): on the cell of m the potential is U(m) + ½‖x - g_m‖², so the
force is g_m - x. Uniform base: U(m) inside the box K, infinite outside. All cells count as equally heavy, which is
the paper's assumption.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import Info, Start, Synchronised, Target, blank_info
from structured_voronoi.core.streams import Rng
from structured_voronoi.geometry.cells import Cells
from structured_voronoi.geometry.motion import Rotation, Straight, settle
from structured_voronoi.problem.drawing import find_start
from structured_voronoi.problem.problem import Evaluation, Problem, bind

Base = Literal["gaussian", "uniform"]


class Point(NamedTuple):
    """A point of every chain, the cell it lies in, and the measure there."""

    x: Float[Tensor, "chain n d"]
    cell: Int[Tensor, "chain n"]
    energy: Float[Tensor, " chain"]
    """U(m) of the cell."""
    gradient: Float[Tensor, "chain n d"]
    """g_m of the cell, the gradient of -U at its embeddings."""
    potential: Float[Tensor, " chain"]
    """-log of the density at x, up to a constant."""


@dataclass(frozen=True, eq=False)
class VoronoiMeasure:
    """The measure of one target; it evaluates the target only where a chain enters another cell."""

    problem: Problem
    cells: Cells
    base: Base
    bounds: tuple[Tensor, Tensor]
    """The box K in the coordinates of the cells' table; boundless for the Gaussian base."""

    def begin(self, rng: Rng, start: Start) -> Point:
        """Chains at the embeddings of their first tokens."""
        tokens, first = find_start(self.problem, rng, start, self.guidance)
        cell = self.cells.cell_of[tokens]
        x = self.cells.points(cell)
        return Point(x, cell, first.energy, first.field, self.potential(x, first.energy, first.field))

    def at(self, x: Float[Tensor, "chain n d"], before: Point, info: Info) -> tuple[Point, Info]:
        """The measure at new points of the chains that were at ``before``."""
        return self.within(x, self.cells.nearest(x, before.cell), before, info)

    def within(self, x: Tensor, cell: Tensor, before: Point, info: Info) -> tuple[Point, Info]:
        """The same for points whose cells are known."""
        moved = (cell != before.cell).any(-1) & self.inside(x)
        known = Evaluation(before.energy, before.gradient)
        evaluation = self.problem.evaluate_where(moved, self.cells.tokens[cell], known, self.guidance)
        info = info._replace(
            evaluations=info.evaluations + moved.long(),
            gradients=info.gradients + moved.long() * self.problem.steers(self.guidance),
            events=info.events + moved.long(),
            nonfinite=info.nonfinite + (~evaluation.possible).long(),
        )
        return Point(x, cell, *evaluation, self.potential(x, *evaluation)), info

    @property
    def motion(self) -> tuple[Rotation | Straight, float]:
        """How a point moves inside a cell, and a natural length of its trajectories."""
        if self.base == "gaussian":
            return Rotation(1.0), math.pi / 2
        low, high = self.bounds
        return Straight(low, high), float((high - low).mean())

    @property
    def guidance(self) -> Literal["full", "none"]:
        return "none" if self.base == "uniform" else "full"

    def inside(self, x: Tensor) -> Bool[Tensor, " chain"]:
        """Within the box K; without one, everywhere finite."""
        if self.base == "gaussian":
            return x.isfinite().flatten(1).all(-1)
        low, high = self.bounds
        return ((x >= low) & (x <= high)).flatten(1).all(-1)

    def potential(self, x: Tensor, energy: Tensor, gradient: Tensor) -> Float[Tensor, " chain"]:
        if self.base == "uniform":
            return torch.where(self.inside(x), energy, torch.inf)
        return energy + ((x + self.cells.origin - gradient) ** 2).sum((-2, -1)) / 2

    def force(self, point: Point) -> Float[Tensor, "chain n d"]:
        """-∇U(x): g_m - x (the paper's proposition 4), or zero."""
        if self.base == "uniform":
            return torch.zeros_like(point.x)
        return point.gradient - point.x - self.cells.origin


class State(NamedTuple):
    """The state of HMC, Langevin and the paper's SVS: a point in its cell."""

    tokens: Int[Tensor, "chain n"]
    point: Point
    measure: VoronoiMeasure
    steps: int
    """Steps taken, for step sizes that decay."""

    @property
    def energy(self) -> Float[Tensor, " chain"]:
        return self.point.energy


class OnVoronoiMeasure:
    """Base of samplers that move a point on the Voronoi measure: their start and synchronisation."""

    base: Base

    def init(self, target: Target | Problem, rng: Rng, start: Start) -> State:
        """Chains at the embeddings of their first tokens."""
        problem = bind(target)
        cells = problem.cells()
        endless = torch.full_like(cells.origin, torch.inf)
        bounds = problem.box_bounds(cells) if self.base == "uniform" else (-endless, endless)
        measure = VoronoiMeasure(problem, cells, self.base, bounds)
        point = measure.begin(rng, start)
        return State(measure.cells.tokens[point.cell], point, measure, 0)

    def synchronise(
        self,
        target: Target | Problem,
        rng: Rng,
        state: State,
        tokens: Int[Tensor, "chain n"],
        energy: Float[Tensor, " chain"],
    ) -> Synchronised:
        """The state after another sampler has moved the tokens; the point settles in its new cell."""
        measure, moved = state.measure, (tokens != state.tokens).any(-1)
        problem, rows, cell = measure.problem, moved.nonzero().squeeze(-1), measure.cells.cell_of[tokens]
        known = Evaluation(state.point.energy, state.point.gradient)
        gradient = problem.evaluate_where(moved, tokens, known, measure.guidance).field
        x = state.point.x.clone()
        if len(rows):
            row_rng = rng.select(rows)
            x[rows] = settle(measure.cells, cell[rows], gradient[rows] - measure.cells.origin, *measure.motion, row_rng)
            rng.catch_up(rows, row_rng)
        point = Point(x, cell, energy.clone(), gradient, measure.potential(x, energy, gradient))
        count = moved.long()
        return Synchronised(State(tokens, point, measure, state.steps), count, count * problem.steers(measure.guidance))


def kinetic(r: Float[Tensor, "chain n d"]) -> Float[Tensor, " chain"]:
    """½‖r‖²."""
    return (r**2).sum((-2, -1)) / 2


def leapfrog(
    measure: VoronoiMeasure, point: Point, r: Tensor, step_size: float, info: Info
) -> tuple[Point, Tensor, Info]:
    """Half a kick, a drift, half a kick; the discontinuities are not noticed."""
    r = r + step_size / 2 * measure.force(point)
    moved, info = measure.at(point.x + step_size * r, point, info)
    return moved, r + step_size / 2 * measure.force(moved), info


def choose_point(mask: Bool[Tensor, " chain"], yes: Point, no: Point) -> Point:
    """For each chain one point or the other."""
    return Point(*(torch.where(mask.view(-1, *[1] * (a.ndim - 1)), a, b) for a, b in zip(yes, no, strict=True)))


def finish(state: State, proposal: Point, log_ratio: Tensor | None, rng: Rng, info: Info) -> tuple[State, Info]:
    """Accept with probability min(1, exp(log_ratio)), or always (None); impossible points are never accepted."""
    old = state.point
    level = rng.uniform()
    accepted = proposal.potential.isfinite()
    if log_ratio is not None:
        accepted = accepted & (level.log() < log_ratio)
    point = choose_point(accepted, proposal, old)
    info = info._replace(energy=point.energy, swaps=(point.cell != old.cell).sum(-1))
    return State(state.measure.cells.tokens[point.cell], point, state.measure, state.steps + 1), info


def no_events(state: State) -> Info:
    """The counts a step starts from."""
    return blank_info(state.point.energy)
