"""Motion inside a cell, and the rule at a wall.

The Gaussian base rotates the point around the centre of its cell, the uniform base moves it in a straight line inside
the box K. Both flows are exact, so there is no integration error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.geometry.cells import Cells
from structured_voronoi.geometry.crossings import Crossing, Cursor, next_on_circle, next_on_line


class Particle(NamedTuple):
    """The cell, position and momentum of every chain, with the potential and the centre of the cell."""

    cell: Int[Tensor, "chain n"]
    x: Float[Tensor, "chain n k"]
    r: Float[Tensor, "chain n k"]
    potential: Float[Tensor, " chain"]
    """U(m), plus log μ(C_m) for closed cells."""
    centre: Float[Tensor, "chain n k"]
    """c_m, the mean of the cell's Gaussian; unused by straight motion."""


def refracted(speed: Tensor, jump: Tensor) -> Tensor:
    """r⊥ after a jump ΔΦ of the potential: sign(r⊥) √(r⊥² - 2ΔΦ), where r⊥² > 2ΔΦ.

    The paper divides by ‖r⊥‖² instead of ‖r⊥‖, which does not conserve the energy (docs/deviations.md).
    """
    return torch.copysign((speed**2 - 2 * jump).clamp(min=0).sqrt(), speed)


class Walls(NamedTuple):
    """The rule at a crossing: change the token, reflect, or pass."""

    inward: bool
    """Also propose a change of token where a bisector is crossed towards the current token."""
    reflect: bool
    """Without enough energy to change the token, reflect; otherwise pass unchanged."""
    refract: Callable[[Tensor, Tensor], Tensor] = refracted
    """(normal momentum, jump of the potential) -> normal momentum after a change of token."""


OPEN_WALLS = Walls(inward=True, reflect=False)
CLOSED_WALLS = Walls(inward=False, reflect=True)


class Rotation(NamedTuple):
    """The flow of ½‖r‖² + ‖x-c‖²/2σ²: x(θ) = c + (x-c) cos θ + σ r sin θ. Time is the angle θ."""

    sigma: float

    def advance(self, p: Particle, angle: Tensor) -> tuple[Tensor, Tensor]:
        """x and r after this angle."""
        cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
        offset = p.x - p.centre
        return p.centre + offset * cos + self.sigma * p.r * sin, p.r * cos - offset / self.sigma * sin

    def next(self, cells: Cells, p: Particle, limit: Tensor, cursor: Cursor, walls: Walls) -> Crossing:
        """The next bisector up to angle ``limit``."""
        offset, velocity = p.x - p.centre, self.sigma * p.r
        return next_on_circle(
            cells, p.cell, offset, velocity, p.centre, limit, cursor, walls.inward, confined=walls.reflect
        )

    def potential(self, x: Tensor, centre: Tensor) -> Float[Tensor, " chain"]:
        """‖x-c‖²/2σ²."""
        return ((x - centre) ** 2).sum((-2, -1)) / (2 * self.sigma**2)

    def potential_change(self, x: Tensor, before: Tensor, after: Tensor) -> Float[Tensor, " chain"]:
        """(‖x-c'‖² - ‖x-c‖²)/2σ² as one sum: a difference of two sums of about N·k/2 each would lose digits."""
        return ((before - after) * (2 * x - before - after)).sum((-2, -1)) / (2 * self.sigma**2)


class Straight(NamedTuple):
    """Free motion inside the box K (uniform base). Time is time. The sides of the box always reflect."""

    low: Float[Tensor, " k"]
    high: Float[Tensor, " k"]

    def advance(self, p: Particle, time: Tensor) -> tuple[Tensor, Tensor]:
        """x and r after this time."""
        return p.x + p.r * time[:, None, None], p.r

    def next(self, cells: Cells, p: Particle, limit: Tensor, cursor: Cursor, walls: Walls) -> Crossing:
        """The next bisector or side of the box up to time ``limit``; side i of the box has cell -1 - i."""
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
        """Zero: the density is constant on a cell."""
        return x.new_zeros(len(x))

    def potential_change(self, x: Tensor, before: Tensor, after: Tensor) -> Float[Tensor, " chain"]:
        """Zero."""
        return x.new_zeros(len(x))
