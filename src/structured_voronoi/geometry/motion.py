"""Exact motion through any number of walls: rotate (or go straight) to the next crossing, cross it, go on.

Nothing is approximated, so nothing is rejected: the motion keeps the energy, preserves volume and is its own time
reversal. See docs/method.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.geometry.cells import Cells
from structured_voronoi.geometry.crossings import (
    Crossing,
    Cursor,
    fresh_cursor,
    next_on_circle,
    next_on_line,
)
from structured_voronoi.geometry.memo import Memo, Proposal, empty_memo


class Particle(NamedTuple):
    """Where every chain is: its cell, the point, the momentum, and what the cell says about energy and force."""

    cell: Int[Tensor, "chain n"]
    x: Float[Tensor, "chain n k"]
    r: Float[Tensor, "chain n k"]
    potential: Float[Tensor, " chain"]
    """U(m), plus log μ(C_m) for closed cells."""
    centre: Float[Tensor, "chain n k"]
    """c_m: the middle of the Gaussian of the cell; not used by straight motion."""


class Walls(NamedTuple):
    """What a crossing does when there is not enough energy to change the token."""

    inward: bool
    """Are bisectors also gates when crossed towards the current token's side?"""
    reflect: bool
    """Turn back, or pass through unchanged?"""


OPEN = Walls(inward=True, reflect=False)
CLOSED = Walls(inward=False, reflect=True)


class Rotation(NamedTuple):
    """The flow of ½‖r‖² + ‖x-c‖²/2σ²; time is the angle θ."""

    sigma: float

    def advance(self, p: Particle, angle: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
        offset = p.x - p.centre
        return p.centre + offset * cos + self.sigma * p.r * sin, p.r * cos - offset / self.sigma * sin

    def next(self, cells: Cells, p: Particle, limit: Tensor, cursor: Cursor, walls: Walls) -> Crossing:
        return next_on_circle(
            cells,
            p.cell,
            p.x - p.centre,
            self.sigma * p.r,
            p.centre,
            limit,
            cursor,
            walls.inward,
            confined=walls.reflect,
        )

    def potential(self, x: Tensor, centre: Tensor) -> Float[Tensor, " chain"]:
        return ((x - centre) ** 2).sum((-2, -1)) / (2 * self.sigma**2)


class Straight(NamedTuple):
    """Free motion inside the box K (uniform base); time is time. The box always reflects, at no cost."""

    low: Float[Tensor, " k"]
    high: Float[Tensor, " k"]

    def advance(self, p: Particle, time: Tensor) -> tuple[Tensor, Tensor]:
        return p.x + p.r * time[:, None, None], p.r

    def next(self, cells: Cells, p: Particle, limit: Tensor, cursor: Cursor, walls: Walls) -> Crossing:
        """The next bisector or side of the box; a side has cell -1 - (its coordinate)."""
        wall = next_on_line(cells, p.cell, p.x, p.r, limit)
        gap = torch.where(p.r > 0, self.high - p.x, p.x - self.low).clamp(min=0)
        time, side = torch.where(p.r == 0, torch.inf, gap / p.r.abs()).flatten(1).min(-1)
        first = (time < wall.time) & (time <= limit)
        k = p.x.shape[-1]
        return Crossing(
            torch.where(first, time, wall.time),
            torch.where(first, side // k, wall.position),
            torch.where(first, -1 - side % k, wall.cell),
            wall.outward | first,
        )

    def potential(self, x: Tensor, centre: Tensor) -> Float[Tensor, " chain"]:
        return x.new_zeros(len(x))


Evaluate = Callable[[Int[Tensor, "row n"]], Proposal]
"""The proposed cells of some chains -> Proposal. Called once per round of events, for all chains together."""


class Tally(NamedTuple):
    """What happened on the way, per chain."""

    events: Int[Tensor, " chain"]
    evaluations: Int[Tensor, " chain"]
    swaps: Int[Tensor, " chain"]
    reflections: Int[Tensor, " chain"]
    nonfinite: Int[Tensor, " chain"]
    abandoned: Bool[Tensor, " chain"]


def travel(
    cells: Cells,
    start: Particle,
    duration: Float[Tensor, " chain"],
    flow: Rotation | Straight,
    walls: Walls,
    evaluate: Evaluate | None,
    max_events: int = 1000,
    memo: Memo | None = None,
) -> tuple[Particle, Tally, Memo]:
    """Move every chain for its duration. Without ``evaluate`` every wall reflects and no energy is needed.

    ``memo`` is what the chains remember from earlier trajectories.

    A chain with more than ``max_events`` events is put back to where it started: the count is the same backwards,
    so this is exact, while stopping midway would not be.
    """
    chains = len(start.cell)
    p = Particle(*(part.clone() for part in start))
    left = duration.clone()
    cursor = fresh_cursor(chains, p.x)
    memo = empty_memo(1, p.centre) if memo is None else Memo(*(part.clone() for part in memo))
    events, evaluations, swaps, reflections, nonfinite, met = (torch.zeros_like(p.cell[:, 0]) for _ in range(6))
    active = torch.arange(chains, device=p.x.device)
    while len(active):
        now, ahead = _rows(p, active), left[active]
        hit = flow.next(cells, now, ahead, Cursor(*(part[active] for part in cursor)), walls)
        going = hit.time <= ahead
        x, r = flow.advance(now, torch.where(going, hit.time, ahead))
        done = active[~going]
        p.x[done], p.r[done] = x[~going], r[~going]

        active, hit = active[going], Crossing(*(part[going] for part in hit))
        now = Particle(now.cell[going], x[going], r[going], now.potential[going], now.centre[going])
        met[active] += 1
        active, hit, now = _keep(met[active] <= max_events, active, hit, now)

        bounced, r = _box(now, hit)
        if bounced.any():
            rows = active[bounced]
            reflections[rows] += 1
            _restart(p, left, cursor, rows, now.x[bounced], r[bounced], hit.time[bounced])
            active_rest, hit, now = _keep(~bounced, active, hit, now)
        else:
            active_rest = active

        if len(active_rest):
            new, asked = _look(active_rest, hit, now, evaluate, memo)
            swapped = _cross(cells, p, left, cursor, active_rest, hit, now, flow, walls, new)
            _remember_left(memo, active_rest[swapped], now, swapped)
            events[active_rest] += 1
            evaluations[active_rest] += asked.long()
            swaps[active_rest] += swapped.long()
            nonfinite[active_rest] += (asked & ~new.finite).long()
            if walls.reflect:
                reflections[active_rest] += (~swapped).long()
    abandoned = met > max_events
    back = Particle(*(_where(abandoned, old, new) for old, new in zip(start, p, strict=True)))
    return back, Tally(events, evaluations, swaps, reflections, nonfinite, abandoned), memo


def _look(rows: Tensor, hit: Crossing, now: Particle, evaluate: Evaluate | None, memo: Memo) -> tuple[Proposal, Tensor]:
    """What lies beyond the bisectors the rows have met, and for which rows the target had to be asked."""
    if evaluate is None:
        impossible = torch.zeros_like(rows, dtype=torch.bool)
        return Proposal(now.potential, now.centre, impossible), impossible
    proposed = now.cell.clone()
    proposed[torch.arange(len(rows), device=rows.device), hit.position] = hit.cell
    new, known = memo.recall(rows, proposed)
    asked = ~known
    if asked.any():
        answer = evaluate(proposed[asked])
        memo.store(rows[asked], proposed[asked], answer)
        for part, value in zip(new, answer, strict=True):
            part[asked] = value
    return new, asked


def _cross(
    cells: Cells,
    p: Particle,
    left: Tensor,
    cursor: Cursor,
    rows: Tensor,
    hit: Crossing,
    now: Particle,
    flow: Rotation | Straight,
    walls: Walls,
    new: Proposal,
) -> Tensor:
    """Swap, reflect or pass at the bisectors the rows have met; returns which rows swapped."""
    each = torch.arange(len(rows), device=rows.device)
    old = now.cell[each, hit.position]
    normal = cells.table[hit.cell] - cells.table[old]
    normal = normal / normal.norm(dim=-1, keepdim=True)
    momentum = now.r[each, hit.position]
    # the branch of the root, not the rounded product, says which way a grazing wall is crossed
    speed = torch.copysign((momentum * normal).sum(-1), hit.outward.to(momentum.dtype) - 0.5)
    jump = new.potential - now.potential + flow.potential(now.x, new.centre) - flow.potential(now.x, now.centre)
    jump = torch.where(new.finite, jump, torch.inf)
    swapped = speed**2 > 2 * jump
    after = torch.where(swapped, refracted(speed, jump), -speed if walls.reflect else speed)

    turned = swapped | walls.reflect
    # an open gate that is passed leaves the arc as it is: only the cursor moves on
    cursor.time[rows[~turned]] = hit.time[~turned]
    cursor.last[rows[~turned]] = _index(cells, hit)[~turned]
    r = now.r.clone()
    r[each, hit.position] = momentum + (after - speed)[:, None] * normal
    _restart(p, left, cursor, rows[turned], now.x[turned], r[turned], hit.time[turned])

    changed = rows[swapped]
    p.cell[changed, hit.position[swapped]] = hit.cell[swapped]
    p.potential[changed], p.centre[changed] = new.potential[swapped], new.centre[swapped]
    # seen from the new token the same wall belongs to the old one, and is crossed the other way
    cursor.barred[changed] = torch.stack([hit.position, old, (~hit.outward).long()], dim=-1)[swapped]
    return swapped


def _remember_left(memo: Memo, rows: Tensor, now: Particle, swapped: Tensor) -> None:
    """States that are left are remembered too, unless they were evaluated a moment ago."""
    cell, potential, centre = now.cell[swapped], now.potential[swapped], now.centre[swapped]
    _, known = memo.recall(rows, cell)
    finite = torch.ones_like(known)
    memo.store(rows[~known], cell[~known], Proposal(potential[~known], centre[~known], finite[~known]))


def refracted(speed: Tensor, jump: Tensor) -> Tensor:
    """r⊥ after a jump ΔΦ of the potential: sign(r⊥) √(r⊥² - 2ΔΦ), where r⊥² > 2ΔΦ.

    The paper divides r⊥ by ‖r⊥‖² instead of ‖r⊥‖, which does not keep the energy (docs/deviations.md).
    """
    return torch.copysign((speed**2 - 2 * jump).clamp(min=0).sqrt(), speed)


def _restart(p: Particle, left: Tensor, cursor: Cursor, rows: Tensor, x: Tensor, r: Tensor, time: Tensor) -> None:
    """A new arc begins here and now."""
    p.x[rows], p.r[rows] = x, r
    left[rows] -= time
    cursor.time[rows], cursor.last[rows], cursor.barred[rows] = 0, -1, -1


def _box(now: Particle, hit: Crossing) -> tuple[Tensor, Tensor]:
    """Which rows have met a side of the box, and all momenta with those rows' turned back."""
    bounced = hit.cell < 0
    r = now.r.clone()
    rows = bounced.nonzero().squeeze(-1)
    at = (rows, hit.position[rows], -1 - hit.cell[rows])
    r[at] = -r[at]
    return bounced, r


def _index(cells: Cells, hit: Crossing) -> Tensor:
    return (hit.position * len(cells.table) + hit.cell) * 2 + hit.outward.long()


def _rows(p: Particle, rows: Tensor) -> Particle:
    return Particle(*(part[rows] for part in p))


def _keep(mask: Tensor, rows: Tensor, hit: Crossing, now: Particle) -> tuple[Tensor, Crossing, Particle]:
    return rows[mask], Crossing(*(part[mask] for part in hit)), Particle(*(part[mask] for part in now))


def _where(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(mask.view(-1, *[1] * (yes.ndim - 1)), yes, no)
