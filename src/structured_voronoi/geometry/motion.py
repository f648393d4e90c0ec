"""Exact motion through any number of walls: rotate (or go straight) to the next crossing, cross it, go on.

Nothing is approximated, so nothing is rejected: the motion keeps the energy, preserves volume and is its own time
reversal. See docs/method.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.streams import Rng, widened
from structured_voronoi.geometry.cells import Cells
from structured_voronoi.geometry.crossings import (
    NOWHERE,
    Crossing,
    Cursor,
    fresh_cursor,
    next_on_circle,
    next_on_line,
    root_index,
)
from structured_voronoi.geometry.memo import Memo, Proposal, empty_memo


class Particle(NamedTuple):
    """Where every chain is: its cell, the point, the momentum, and the potential and centre of the cell."""

    cell: Int[Tensor, "chain n"]
    x: Float[Tensor, "chain n k"]
    r: Float[Tensor, "chain n k"]
    potential: Float[Tensor, " chain"]
    """U(m), plus log μ(C_m) for closed cells."""
    centre: Float[Tensor, "chain n k"]
    """c_m: the middle of the Gaussian of the cell; not used by straight motion."""


def refracted(speed: Tensor, jump: Tensor) -> Tensor:
    """r⊥ after a jump ΔΦ of the potential: sign(r⊥) √(r⊥² - 2ΔΦ), where r⊥² > 2ΔΦ.

    The paper divides r⊥ by ‖r⊥‖² instead of ‖r⊥‖, which does not keep the energy (docs/deviations.md).
    """
    return torch.copysign((speed**2 - 2 * jump).clamp(min=0).sqrt(), speed)


class Walls(NamedTuple):
    """The rule at a crossing: swap the token, reflect or pass."""

    inward: bool
    """Whether bisectors are also gates when crossed towards the current token's side."""
    reflect: bool
    """Whether a point without enough energy to change the token is reflected; otherwise it passes unchanged."""
    refract: Callable[[Tensor, Tensor], Tensor] = refracted
    """The normal momentum after a change of token, from the one before and the jump of the potential."""


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

    def potential_change(self, x: Tensor, before: Tensor, after: Tensor) -> Float[Tensor, " chain"]:
        """(‖x-c'‖² - ‖x-c‖²)/2σ² as one sum: the difference of two, each about N·k/2, would lose its digits."""
        return ((before - after) * (2 * x - before - after)).sum((-2, -1)) / (2 * self.sigma**2)


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

    def potential_change(self, x: Tensor, before: Tensor, after: Tensor) -> Float[Tensor, " chain"]:
        return x.new_zeros(len(x))


Evaluate = Callable[[Int[Tensor, "row n"]], Proposal]
"""The proposed cells of some chains -> Proposal. Called once per round of events, for all chains together."""


class Tally(NamedTuple):
    """The counts of a trajectory, per chain."""

    events: Int[Tensor, " chain"]
    """Bisectors met."""
    evaluations: Int[Tensor, " chain"]
    crossings: Int[Tensor, " chain"]
    """Bisectors at which the token changed."""
    reflections: Int[Tensor, " chain"]
    nonfinite: Int[Tensor, " chain"]
    abandoned: Bool[Tensor, " chain"]


class Journey(NamedTuple):
    """Chains about to set out, and everything that decides where they go."""

    cells: Cells
    start: Particle
    duration: Float[Tensor, " chain"]
    flow: Rotation | Straight
    walls: Walls
    evaluate: Evaluate | None
    """Without it every wall reflects and no energy is needed."""
    max_events: int = 1000

    def energy(self, p: Particle) -> Float[Tensor, " chain"]:
        """H = U + ‖x-c‖²/2σ² + ½‖r‖² somewhere on the way."""
        return p.potential + self.flow.potential(p.x, p.centre) + (p.r**2).sum((-2, -1)) / 2


def travel(journey: Journey, memo: Memo | None = None) -> tuple[Particle, Tally, Memo]:
    """Move every chain for its duration.

    ``memo`` is what the chains remember from earlier trajectories; what they remember now is returned. A chain with
    more than ``max_events`` events is put back to where it started: the count is the same backwards, so this is exact,
    while stopping midway would not be.
    """
    start, motion = journey.start, _Motion(journey, memo)
    active = torch.arange(len(journey.duration), device=journey.duration.device)
    while len(active):
        active = motion.to_next_event(active)
        active = active[motion.met[active] <= journey.max_events]
    abandoned = motion.met > journey.max_events
    end = Particle(*(_where(abandoned, old, new) for old, new in zip(start, motion.p, strict=True)))
    events, evaluations, crossings, reflections, nonfinite = motion.counts.unbind(-1)
    crossings = torch.where(abandoned, 0, crossings)  # all undone
    return end, Tally(events, evaluations, crossings, reflections, nonfinite, abandoned), motion.memo


Meeting = Literal["refraction", "reflection", "passage", "end"]
"""The token changes, the point turns back, it passes a gate unchanged, or its time is over."""


class Leg(NamedTuple):
    """A part of one chain's trajectory, from one event to the next."""

    begin: Particle
    time: float
    """How long it takes."""
    meets: Meeting
    wall: int
    """The cell whose bisector with the present one is met at the end; -1 for a side of the box, or for nothing."""


def legs(journey: Journey) -> Iterator[Leg]:
    """The trajectory of a single chain, leg by leg: the motion of `travel`, for those who want to see it.

    One that `travel` abandons stops at its last event and has no end.
    """
    motion, rows = _Motion(journey, None), torch.zeros_like(journey.start.cell[:, 0])
    begin, remaining = journey.start, journey.duration
    while len(rows):
        hit = motion.flow.next(motion.cells, motion.p, motion.remaining, motion.cursor, motion.walls)
        time = hit.time.minimum(motion.remaining)  # since the momentum last changed
        x, r = motion.flow.advance(motion.p, time)
        left, counts = motion.remaining - time, motion.counts.clone()
        rows = motion.to_next_event(rows)
        if int(motion.met) > journey.max_events:
            return
        _, _, crossings, reflections, _ = (motion.counts - counts)[0].tolist()
        meets: Meeting = "refraction" if crossings else "reflection" if reflections else "passage"
        if len(rows):
            yield Leg(begin, float(remaining - left), meets, max(int(hit.cell), -1))
        else:
            yield Leg(begin, float(remaining), "end", -1)
        now = motion.p._replace(x=x, r=r) if meets == "passage" else motion.p
        begin, remaining = Particle(*(part.clone() for part in now)), left


SETTLING_TRAJECTORIES = 15


def settle(
    cells: Cells,
    cell: Int[Tensor, "chain n"],
    centre: Float[Tensor, "chain n k"],
    flow: Rotation | Straight,
    mean_duration: float,
    rng: Rng,
) -> Float[Tensor, "chain n k"]:
    """A point of every closed cell: from its embedding, along trajectories that all walls reflect."""
    x, no_potential = cells.points(cell), centre.new_zeros(len(cell))
    for _ in range(SETTLING_TRAJECTORIES):
        particle = Particle(cell, x, rng.normal(*x.shape[1:]).to(x), no_potential, centre)
        duration = (mean_duration * (0.5 + rng.uniform())).to(x)
        x = travel(Journey(cells, particle, duration, flow, CLOSED, None))[0].x
    return x


class _Motion:
    """The chains on their way. All tensors have one row a chain and are changed in place."""

    def __init__(self, journey: Journey, memo: Memo | None) -> None:
        self.cells, self.flow, self.walls, self.evaluate = journey.cells, journey.flow, journey.walls, journey.evaluate
        start = journey.start
        p = Particle(*(part.clone() for part in start))
        self.p = p._replace(potential=widened(p.potential))  # as it was at the beginning of the present arc
        self.remaining = journey.duration.clone()  # what remains, counted from there
        self.cursor = fresh_cursor(len(self.remaining), start.x)
        self.memo = empty_memo(1, start.centre) if memo is None else memo.copy()
        self.met = torch.zeros_like(start.cell[:, 0])  # walls of any kind
        self.counts = self.met.new_zeros(len(self.met), 5)  # the first five of Tally

    def to_next_event(self, rows: Tensor) -> Tensor:
        """Take some chains to their next event or to the end; returns the chains that are not at the end."""
        now, remaining = _rows(self.p, rows), self.remaining[rows]
        hit = self.flow.next(self.cells, now, remaining, Cursor(*(part[rows] for part in self.cursor)), self.walls)
        x, r = self.flow.advance(now, hit.time.minimum(remaining))
        going = hit.time <= remaining
        if not going.all():
            done = ~going
            self.p.x[rows[done]], self.p.r[rows[done]] = x[done], r[done]
        rows, hit, now = _keep(going, rows, hit, now._replace(x=x, r=r))
        self.met[rows] += 1
        at_box = hit.cell < 0
        if at_box.any():
            self._bounce(*_keep(at_box, rows, hit, now))
            self._cross(*_keep(~at_box, rows, hit, now))
        else:
            self._cross(rows, hit, now)
        return rows

    def _bounce(self, rows: Tensor, hit: Crossing, now: Particle) -> None:
        """A side of the box turns its coordinate of the momentum round."""
        coordinate = (torch.arange(len(rows), device=rows.device), hit.position, -1 - hit.cell)
        r = now.r.clone()
        r[coordinate] = -r[coordinate]
        self._new_arc(rows, now.x, r, hit.time)
        self.counts[rows, 3] += 1

    def _cross(self, rows: Tensor, hit: Crossing, now: Particle) -> None:
        """Swap, reflect or pass at a bisector."""
        if not len(rows):
            return
        row = torch.arange(len(rows), device=rows.device)
        proposed = now.cell.clone()
        proposed[row, hit.position] = hit.cell
        new, asked = self._look_up(rows, proposed, now)

        old = now.cell[row, hit.position]
        normal = torch.nn.functional.normalize(self.cells.table[hit.cell] - self.cells.table[old], eps=0)
        momentum = now.r[row, hit.position]
        # the branch of the root, not the rounded product, says which way a grazing wall is crossed
        speed = torch.copysign((momentum * normal).sum(-1), hit.outward.to(momentum.dtype) - 0.5)
        jump = new.potential - now.potential + self.flow.potential_change(now.x, now.centre, new.centre)
        jump = torch.where(new.finite, jump, torch.inf)
        swapped = speed**2 > 2 * jump
        after = torch.where(swapped, self.walls.refract(speed, jump).to(speed), -speed if self.walls.reflect else speed)
        r = now.r.clone()
        r[row, hit.position] = momentum + (after - speed)[:, None] * normal

        reflected = ~swapped & self.walls.reflect
        happened = (torch.ones_like(asked), asked, swapped, reflected, asked & ~new.finite)
        self.counts[rows] += torch.stack(happened, dim=-1).long()

        if self.walls.reflect:
            self._new_arc(rows, now.x, r, hit.time)
        else:
            self._new_arc(rows[swapped], now.x[swapped], r[swapped], hit.time[swapped])
            self._move_cursor(rows, hit, swapped, old)
        if swapped.any():
            changed = rows[swapped]
            self.p.cell[changed], self.p.potential[changed] = proposed[swapped], new.potential[swapped]
            self.p.centre[changed] = new.centre[swapped]

    def _move_cursor(self, rows: Tensor, hit: Crossing, swapped: Tensor, old: Tensor) -> None:
        """Open gates: a new arc begins at a known root; a gate that is passed leaves the arc as it is."""
        index = root_index(hit.position, hit.cell, hit.outward.long(), len(self.cells.table))
        self.cursor.time[rows] = torch.where(swapped, 0, hit.time)
        self.cursor.last[rows] = torch.where(swapped, NOWHERE, index)
        # seen from the new token the same wall belongs to the old one, and is crossed the other way
        behind = torch.stack([hit.position, old, (~hit.outward).long()], dim=-1)
        self.cursor.barred[rows[swapped]] = behind[swapped]

    def _look_up(self, rows: Tensor, proposed: Tensor, now: Particle) -> tuple[Proposal, Tensor]:
        """The proposals beyond the bisectors, and for which rows the target was evaluated."""
        if self.evaluate is None:
            impossible = torch.zeros_like(rows, dtype=torch.bool)
            return Proposal(now.potential, now.centre, impossible), impossible
        new, known = self.memo.recall(rows, proposed)
        asked = ~known
        if asked.any():
            answer = self.evaluate(proposed[asked])
            answer = answer._replace(potential=widened(answer.potential))
            self.memo.store(rows[asked], proposed[asked], answer)
            for part, value in zip(new, answer, strict=True):
                part[asked] = value
        return new, asked

    def _new_arc(self, rows: Tensor, x: Tensor, r: Tensor, time: Tensor) -> None:
        self.p.x[rows], self.p.r[rows] = x, r
        self.remaining[rows] -= time


def _rows(p: Particle, rows: Tensor) -> Particle:
    return Particle(*(part[rows] for part in p))


def _keep(mask: Tensor, rows: Tensor, hit: Crossing, now: Particle) -> tuple[Tensor, Crossing, Particle]:
    return rows[mask], Crossing(*(part[mask] for part in hit)), Particle(*(part[mask] for part in now))


def _where(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(mask.view(-1, *[1] * (yes.ndim - 1)), yes, no)
