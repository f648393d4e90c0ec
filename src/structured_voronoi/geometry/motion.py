"""Exact Hamiltonian motion through any number of walls.

Between walls the flow is exact, and at walls the potential is exchanged with the kinetic energy, so the motion
conserves the energy, preserves volume and is reversible, and no trajectory has to be rejected (docs/method.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.streams import Rng, widened
from structured_voronoi.geometry.cells import Cells
from structured_voronoi.geometry.crossings import NO_ROOT, Crossing, Cursor, initial_cursor, root_index
from structured_voronoi.geometry.flows import CLOSED_WALLS, Particle, Rotation, Straight, Walls
from structured_voronoi.geometry.memo import Memo, Proposal, empty_memo

Evaluate = Callable[[Int[Tensor, "row n"]], Proposal]
"""(proposed cells) -> their evaluation. Called once for all chains that cross a wall at the same round of events."""


class EventCounts(NamedTuple):
    """The counts of a trajectory, per chain."""

    events: Int[Tensor, " chain"]
    """Bisectors met."""
    evaluations: Int[Tensor, " chain"]
    crossings: Int[Tensor, " chain"]
    """Bisectors at which the token changed."""
    reflections: Int[Tensor, " chain"]
    nonfinite: Int[Tensor, " chain"]
    abandoned: Bool[Tensor, " chain"]
    """The trajectory had too many events, and the chain was put back to its start."""


class Trajectory(NamedTuple):
    """The start of one trajectory of every chain, and everything that determines its end."""

    cells: Cells
    start: Particle
    duration: Float[Tensor, " chain"]
    flow: Rotation | Straight
    walls: Walls
    evaluate: Evaluate | None
    """None: every wall reflects and the target is never evaluated."""
    max_events: int = 1000

    def energy(self, p: Particle) -> Float[Tensor, " chain"]:
        """H = U + ‖x-c‖²/2σ² + ½‖r‖²."""
        return p.potential + self.flow.potential(p.x, p.centre) + (p.r**2).sum((-2, -1)) / 2


def simulate(trajectory: Trajectory, memo: Memo | None = None) -> tuple[Particle, EventCounts, Memo]:
    """Move every chain for its duration.

    Parameters
    ----------
    trajectory
        Start, duration and rules of the motion.
    memo
        Evaluations known from earlier trajectories.

    Returns
    -------
    tuple of Particle, EventCounts and Memo
        The end of the trajectory, its counts, and the evaluations known now. A chain with more than ``max_events``
        events ends where it started. The reversed trajectory has as many events, so this is exact; stopping midway
        would not be.
    """
    start, motion = trajectory.start, Motion(trajectory, memo)
    active = torch.arange(len(trajectory.duration), device=trajectory.duration.device)
    while len(active):
        active = motion.advance(active)
        active = active[motion.met[active] <= trajectory.max_events]
    abandoned = motion.met > trajectory.max_events
    end = Particle(*(_where(abandoned, old, new) for old, new in zip(start, motion.p, strict=True)))
    events, evaluations, crossings, reflections, nonfinite = motion.counts.unbind(-1)
    crossings = torch.where(abandoned, 0, crossings)
    return end, EventCounts(events, evaluations, crossings, reflections, nonfinite, abandoned), motion.memo


def settle(
    cells: Cells,
    cell: Int[Tensor, "chain n"],
    centre: Float[Tensor, "chain n k"],
    flow: Rotation | Straight,
    mean_duration: float,
    rng: Rng,
    trajectories: int = 15,
) -> Float[Tensor, "chain n k"]:
    """A random point of every closed cell: trajectories from its embedding which all walls reflect."""
    x, no_potential = cells.points(cell), centre.new_zeros(len(cell))
    for _ in range(trajectories):
        particle = Particle(cell, x, rng.normal(*x.shape[1:]).to(x), no_potential, centre)
        duration = (mean_duration * (0.5 + rng.uniform())).to(x)
        x = simulate(Trajectory(cells, particle, duration, flow, CLOSED_WALLS, None))[0].x
    return x


class Motion:
    """The chains during a trajectory. All tensors have one row per chain and are changed in place."""

    def __init__(self, trajectory: Trajectory, memo: Memo | None) -> None:
        self.cells, self.flow = trajectory.cells, trajectory.flow
        self.walls, self.evaluate = trajectory.walls, trajectory.evaluate
        start = trajectory.start
        p = Particle(*(part.clone() for part in start))
        self.p = p._replace(potential=widened(p.potential))  # at the beginning of the current arc
        self.remaining = trajectory.duration.clone()  # from the beginning of the current arc
        self.cursor = initial_cursor(len(self.remaining), start.x)
        self.memo = empty_memo(1, start.centre) if memo is None else memo.copy()
        self.met = torch.zeros_like(start.cell[:, 0])  # walls of any kind
        self.counts = self.met.new_zeros(len(self.met), 5)  # the first five of EventCounts

    def next_crossing(self, rows: Tensor) -> Crossing:
        """The next wall of some chains."""
        cursor = Cursor(*(part[rows] for part in self.cursor))
        return self.flow.next(self.cells, _rows(self.p, rows), self.remaining[rows], cursor, self.walls)

    def advance(self, rows: Tensor) -> Tensor:
        """Move some chains to their next event or to the end; returns the chains that are not at the end."""
        now, remaining, hit = _rows(self.p, rows), self.remaining[rows], self.next_crossing(rows)
        x, r = self.flow.advance(now, hit.time.minimum(remaining))
        going = hit.time <= remaining
        if not going.all():
            done = ~going
            self.p.x[rows[done]], self.p.r[rows[done]] = x[done], r[done]
        rows, hit, now = _keep(going, rows, hit, now._replace(x=x, r=r))
        self.met[rows] += 1
        at_box = hit.cell < 0
        if at_box.any():
            self._reflect_at_box(*_keep(at_box, rows, hit, now))
            self._cross(*_keep(~at_box, rows, hit, now))
        else:
            self._cross(rows, hit, now)
        return rows

    def _reflect_at_box(self, rows: Tensor, hit: Crossing, now: Particle) -> None:
        """Negate the coordinate of the momentum that is normal to the side of the box."""
        coordinate = (torch.arange(len(rows), device=rows.device), hit.position, -1 - hit.cell)
        r = now.r.clone()
        r[coordinate] = -r[coordinate]
        self._begin_arc(rows, now.x, r, hit.time)
        self.counts[rows, 3] += 1

    def _cross(self, rows: Tensor, hit: Crossing, now: Particle) -> None:
        """Change the token, reflect, or pass at a bisector."""
        if not len(rows):
            return
        row = torch.arange(len(rows), device=rows.device)
        proposed = now.cell.clone()
        proposed[row, hit.position] = hit.cell
        new, evaluated = self._look_up(rows, proposed, now)

        old = now.cell[row, hit.position]
        normal = torch.nn.functional.normalize(self.cells.table[hit.cell] - self.cells.table[old], eps=0)
        momentum = now.r[row, hit.position]
        # the branch of the root, not the rounded product, tells the direction of a grazing crossing
        speed = torch.copysign((momentum * normal).sum(-1), hit.outward.to(momentum.dtype) - 0.5)
        jump = new.potential - now.potential + self.flow.potential_change(now.x, now.centre, new.centre)
        jump = torch.where(new.finite, jump, torch.inf)
        changed = speed**2 > 2 * jump
        after = torch.where(changed, self.walls.refract(speed, jump).to(speed), -speed if self.walls.reflect else speed)
        r = now.r.clone()
        r[row, hit.position] = momentum + (after - speed)[:, None] * normal

        reflected = ~changed & self.walls.reflect
        counted = (torch.ones_like(evaluated), evaluated, changed, reflected, evaluated & ~new.finite)
        self.counts[rows] += torch.stack(counted, dim=-1).long()

        if self.walls.reflect:
            self._begin_arc(rows, now.x, r, hit.time)
        else:
            self._begin_arc(rows[changed], now.x[changed], r[changed], hit.time[changed])
            self._move_cursor(rows, hit, changed, old)
        if changed.any():
            moved = rows[changed]
            self.p.cell[moved], self.p.potential[moved] = proposed[changed], new.potential[changed]
            self.p.centre[moved] = new.centre[changed]

    def _move_cursor(self, rows: Tensor, hit: Crossing, changed: Tensor, old: Tensor) -> None:
        """Open walls: a change of token begins an arc at a known root; after a pass the arc goes on."""
        index = root_index(hit.position, hit.cell, hit.outward.long(), len(self.cells.table))
        self.cursor.time[rows] = torch.where(changed, 0, hit.time)
        self.cursor.last[rows] = torch.where(changed, NO_ROOT, index)
        # for the new token the same wall belongs to the old one and is crossed in the opposite direction
        behind = torch.stack([hit.position, old, (~hit.outward).long()], dim=-1)
        self.cursor.barred[rows[changed]] = behind[changed]

    def _look_up(self, rows: Tensor, proposed: Tensor, now: Particle) -> tuple[Proposal, Tensor]:
        """The evaluations of the proposed cells, and the rows for which the target was called."""
        if self.evaluate is None:
            impossible = torch.zeros_like(rows, dtype=torch.bool)
            return Proposal(now.potential, now.centre, impossible), impossible
        new, known = self.memo.recall(rows, proposed)
        unknown = ~known
        if unknown.any():
            found = self.evaluate(proposed[unknown])
            found = found._replace(potential=widened(found.potential))
            self.memo.store(rows[unknown], proposed[unknown], found)
            for part, value in zip(new, found, strict=True):
                part[unknown] = value
        return new, unknown

    def _begin_arc(self, rows: Tensor, x: Tensor, r: Tensor, time: Tensor) -> None:
        self.p.x[rows], self.p.r[rows] = x, r
        self.remaining[rows] -= time


def _rows(p: Particle, rows: Tensor) -> Particle:
    return Particle(*(part[rows] for part in p))


def _keep(mask: Tensor, rows: Tensor, hit: Crossing, now: Particle) -> tuple[Tensor, Crossing, Particle]:
    return rows[mask], Crossing(*(part[mask] for part in hit)), Particle(*(part[mask] for part in now))


def _where(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(mask.view(-1, *[1] * (yes.ndim - 1)), yes, no)
