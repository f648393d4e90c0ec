"""The paper's Voronoi measure as a density of x, for samplers that integrate the motion numerically.

Gaussian base (definition 3.4 and equation 9 of Amini et al. 2023): on the cell of m the potential is
U(m) + ½‖x - g_m‖², so the force is g_m - x. Uniform base: U(m) inside the box K, infinite outside. As in the paper the
masses of all cells are assumed equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import Start, Synchronised, Target
from structured_voronoi.core.info import Info
from structured_voronoi.core.streams import Rng
from structured_voronoi.geometry.cells import Cells
from structured_voronoi.geometry.flows import Rotation, Straight
from structured_voronoi.geometry.motion import settle
from structured_voronoi.problem.problem import Evaluation, Problem, bind
from structured_voronoi.problem.starts import find_start

Base = Literal["gaussian", "uniform"]


class Point(NamedTuple):
    """The point of every chain, its cell, and the measure there."""

    x: Float[Tensor, "chain n d"]
    cell: Int[Tensor, "chain n"]
    energy: Float[Tensor, " chain"]
    """U(m) of the cell."""
    gradient: Float[Tensor, "chain n d"]
    """g_m of the cell, the gradient of -U at its embeddings."""
    potential: Float[Tensor, " chain"]
    """-log of the density at x, up to a constant."""


class State(NamedTuple):
    """The tokens, the point in their cell, and the number of steps, on which step sizes may depend."""

    tokens: Int[Tensor, "chain n"]
    point: Point
    measure: VoronoiMeasure
    steps: int

    @property
    def energy(self) -> Float[Tensor, " chain"]:
        """U(m)."""
        return self.point.energy


@dataclass(frozen=True, eq=False)
class VoronoiMeasure:
    """The measure of one target, which is evaluated only where a chain enters another cell."""

    problem: Problem
    cells: Cells
    base: Base
    bounds: tuple[Tensor, Tensor]
    """The box K in the coordinates of the cells' table; infinite for the Gaussian base."""

    def at(self, x: Float[Tensor, "chain n d"], before: Point, info: Info) -> tuple[Point, Info]:
        """The measure at new points of chains that were at ``before``."""
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
        """The exact flow inside a cell, and a natural length of its trajectories."""
        if self.base == "gaussian":
            return Rotation(1.0), math.pi / 2
        low, high = self.bounds
        return Straight(low, high), float((high - low).mean())

    @property
    def guidance(self) -> Literal["full", "none"]:
        """The field that evaluations take."""
        return "none" if self.base == "uniform" else "full"

    def inside(self, x: Tensor) -> Bool[Tensor, " chain"]:
        """Whether x is finite and inside the box K."""
        if self.base == "gaussian":
            return x.isfinite().flatten(1).all(-1)
        low, high = self.bounds
        return ((x >= low) & (x <= high)).flatten(1).all(-1)

    def potential(self, x: Tensor, energy: Tensor, gradient: Tensor) -> Float[Tensor, " chain"]:
        """U(x)."""
        if self.base == "uniform":
            return torch.where(self.inside(x), energy, torch.inf)
        return energy + ((x + self.cells.origin - gradient) ** 2).sum((-2, -1)) / 2

    def force(self, point: Point) -> Float[Tensor, "chain n d"]:
        """-∇U(x): g_m - x (the paper's proposition 4), or zero."""
        if self.base == "uniform":
            return torch.zeros_like(point.x)
        return point.gradient - point.x - self.cells.origin


class OnVoronoiMeasure:
    """Start and synchronisation of samplers that move a point on the Voronoi measure."""

    base: Base

    def init(self, target: Target | Problem, rng: Rng, start: Start) -> State:
        """The first state: points at the embeddings of the first tokens."""
        problem = bind(target)
        cells = problem.cells()
        infinite = torch.full_like(cells.origin, torch.inf)
        bounds = problem.box_bounds(cells) if self.base == "uniform" else (-infinite, infinite)
        measure = VoronoiMeasure(problem, cells, self.base, bounds)
        tokens, first = find_start(problem, rng, start, measure.guidance)
        cell = cells.cell_of[tokens]
        x = cells.points(cell)
        point = Point(x, cell, first.energy, first.field, measure.potential(x, first.energy, first.field))
        return State(tokens, point, measure, 0)

    def synchronise(
        self,
        target: Target | Problem,
        rng: Rng,
        state: State,
        tokens: Int[Tensor, "chain n"],
        energy: Float[Tensor, " chain"],
    ) -> Synchronised:
        """The state after another sampler has moved the tokens, with a random point in the new cell."""
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
    """A leapfrog step, which ignores discontinuities."""
    r = r + step_size / 2 * measure.force(point)
    moved, info = measure.at(point.x + step_size * r, point, info)
    return moved, r + step_size / 2 * measure.force(moved), info


def choose_point(mask: Bool[Tensor, " chain"], yes: Point, no: Point) -> Point:
    """For each chain one point or the other."""
    return Point(*(torch.where(mask.view(-1, *[1] * (a.ndim - 1)), a, b) for a, b in zip(yes, no, strict=True)))


def accept(state: State, proposal: Point, log_ratio: Tensor | None, rng: Rng, info: Info) -> tuple[State, Info]:
    """Accept with probability min(1, exp(log_ratio)), or always if it is None; impossible points never."""
    old = state.point
    level = rng.uniform()
    accepted = proposal.potential.isfinite()
    if log_ratio is not None:
        accepted = accepted & (level.log() < log_ratio)
    point = choose_point(accepted, proposal, old)
    info = info._replace(energy=point.energy, swaps=(point.cell != old.cell).sum(-1))
    return State(state.measure.cells.tokens[point.cell], point, state.measure, state.steps + 1), info
