"""The time at which a moving point next crosses a bisector, for all positions and tokens at once.

The bisector between the current token w and another token j is a·x = b with a = v_j - v_w and
b = ½‖v_j‖² - ½‖v_w‖². A crossing is *outward* if the point leaves the side of w, else *inward*. Each bisector has one
root for each direction; the root (position, cell, direction) has a single integer index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.streams import block_rows
from structured_voronoi.geometry.cells import Cells, products

FULL_TURN = 2 * math.pi
NO_ROOT = -1


class Crossing(NamedTuple):
    """The next crossing of every chain; ``time`` is infinite if there is none."""

    time: Float[Tensor, " chain"]
    position: Int[Tensor, " chain"]
    cell: Int[Tensor, " chain"]
    outward: Bool[Tensor, " chain"]


def root_index(position: Tensor, cell: Tensor, outward: Tensor | int, m: int) -> Tensor:
    """The index of a root."""
    return (position * m + cell) * 2 + outward


class Cursor(NamedTuple):
    """The progress of a chain along its current arc, which begins where the momentum last changed.

    Events of an arc are ordered by (time, index of the root). Times are always computed from the beginning of the arc,
    so they are constant along it, and rounding never repeats a crossing.
    """

    time: Float[Tensor, " chain"]
    last: Int[Tensor, " chain"]
    """The index of the root crossed at that time."""
    barred: Int[Tensor, "chain 3"]
    """The root (position, cell, outward) at which the arc began: its time is 0, its next one a full turn later."""


def initial_cursor(chains: int, like: Tensor) -> Cursor:
    """The cursor of trajectories that begin inside a cell."""
    index = torch.full((chains,), NO_ROOT, device=like.device)
    return Cursor(like.new_zeros(chains), index, index[:, None].expand(-1, 3).clone())


def next_on_circle(
    cells: Cells,
    here: Int[Tensor, "chain n"],
    offset: Float[Tensor, "chain n k"],
    velocity: Float[Tensor, "chain n k"],
    centre: Float[Tensor, "chain n k"],
    limit: Float[Tensor, " chain"],
    cursor: Cursor,
    inward: bool,
    confined: bool,
) -> Crossing:
    """The next crossing, up to angle ``limit``, of x(θ) = centre + offset cos θ + velocity sin θ.

    With A = a·offset, B = a·velocity, C = b - a·centre, R = √(A²+B²), φ = atan2(B, A), the bisector is crossed at
    θ = φ ∓ arccos(C/R), minus outward, plus inward, and never if |C| > R (docs/method.md). Inward crossings are
    reported only if ``inward`` is set. If rounding has moved a ``confined`` point out of its cell and it moves outward,
    the crossing is at θ = 0.
    """
    best = _Earliest(here)
    for chains, columns in _chunks(cells, here, sides=3):
        a, b, c = _products(cells, here[chains], columns, offset[chains], velocity[chains], centre[chains])
        c = cells.half_norm[columns] - cells.half_norm[here[chains]][..., None] - c
        squared = a * a + b * b
        # most bisectors are out of reach, and only the others need trigonometry
        chain, position, column = _select_others(cells, c * c <= squared, here[chains], columns)
        chain, cell = chain + chains.start, column + columns.start
        a, b, c = _recompute(cells, here, chain, position, cell, offset, velocity, centre)
        phase, half_arc = _angle(a, b), torch.arccos((c / (a * a + b * b).sqrt()).clamp(-1, 1))
        leaving = phase - half_arc
        if confined:  # if moving outward (b > 0), the root lies in (-π, π), and before 0 only if the point is outside
            leaving = torch.where(b > 0, leaving.clamp(min=0), leaving + FULL_TURN)
        else:
            leaving = torch.remainder(leaving, FULL_TURN)
        branches = [(leaving, 1)]
        if inward:
            branches.append((torch.remainder(phase + half_arc, FULL_TURN), 0))
        for time, outward in branches:
            best.offer(*_in_order(time, chain, position, cell, outward, limit, cursor, len(cells.table)))
    return best.crossing(len(cells.table))


def next_on_line(
    cells: Cells,
    here: Int[Tensor, "chain n"],
    start: Float[Tensor, "chain n k"],
    velocity: Float[Tensor, "chain n k"],
    limit: Float[Tensor, " chain"],
) -> Crossing:
    """The next outward crossing, up to time ``limit``, of x(t) = start + velocity t; at t = 0 if it is outside."""
    best = start.new_full((len(here),), torch.inf)
    index = torch.zeros_like(here[:, 0])
    for chains, columns in _chunks(cells, here, sides=2):
        a, b = _products(cells, here[chains], columns, start[chains], velocity[chains])
        c = cells.half_norm[columns] - cells.half_norm[here[chains]][..., None]
        cell, own = torch.arange(columns.start, columns.stop, device=here.device), here[chains][..., None]
        barred = cell == own
        if cells.pinned is not None:
            barred = barred | (cell == cells.pinned) | (own == cells.pinned)
        time = ((c - a) / b).clamp(min=0).masked_fill(barred | ~(b > 0), torch.inf)
        first, flat_index = time.flatten(1).min(-1)
        earlier = first < best[chains]
        best[chains] = torch.where(earlier, first, best[chains])
        width = columns.stop - columns.start
        root = root_index(flat_index // width, flat_index % width + columns.start, 1, len(cells.table))
        index[chains] = torch.where(earlier, root, index[chains])
    return _crossing(torch.where(best <= limit, best, torch.inf), index, len(cells.table))


def _recompute(
    cells: Cells, here: Tensor, chain: Tensor, position: Tensor, cell: Tensor, *sides: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A, B and C of the selected bisectors from v_j - v_w: differences of products lose digits for close tokens."""
    offset, velocity, centre = sides
    size = block_rows(6 * cells.table.shape[1] * cells.table.element_size(), cells.memory)
    parts = []
    for i in range(0, max(1, len(chain)), size):
        rows = (chain[i : i + size], position[i : i + size])
        other_point, own_point = cells.table[cell[i : i + size]], cells.table[here[rows]]
        across, middle = other_point - own_point, (other_point + own_point) / 2
        parts.append([(across * side).sum(-1) for side in (offset[rows], velocity[rows], middle - centre[rows])])
    a, b, c = (torch.cat(part) for part in zip(*parts, strict=True))
    return a, b, c


def _angle(a: Tensor, b: Tensor) -> Tensor:
    """atan2(b, a), without torch.atan2, whose last bits depend on the position of an element in the tensor."""
    return torch.atan(b / a) + torch.where(a < 0, torch.copysign(torch.full_like(b, math.pi), b), 0.0)


def _chunks(cells: Cells, here: Tensor, sides: int) -> Iterator[tuple[slice, slice]]:
    """Slices of chains and columns whose temporary tensors fit into the memory bound."""
    # dense and gathered tensors per chain and column if every bisector is within reach
    bytes_each = ((sides + 14) * cells.table.element_size() + 100) * here.shape[1]
    width = min(len(cells.table), block_rows(8 * bytes_each, cells.memory))
    height = block_rows(width * bytes_each, cells.memory)
    for i in range(0, len(here), height):
        for j in range(0, len(cells.table), width):
            yield slice(i, min(i + height, len(here))), slice(j, min(j + width, len(cells.table)))


def _products(cells: Cells, here: Tensor, columns: slice, *sides: Tensor) -> list[Tensor]:
    """(v_j - v_w)·side for every position and every token j of the columns, w being the current token."""
    rows = torch.stack(sides, dim=1)  # (chain, side, n, k)
    chains, count, n, k = rows.shape
    table = cells.table[columns]
    with_all = products(rows.reshape(-1, k), table)
    with_own = (rows * cells.points(here)[:, None]).sum(-1, keepdim=True)
    return list((with_all.view(chains, count, n, -1) - with_own).unbind(1))


def _select_others(cells: Cells, mask: Tensor, here: Tensor, columns: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Where the mask holds, except for the current token (its products are rounding noise) and the pinned cell."""
    chain, position, column = mask.nonzero(as_tuple=True)
    own, cell = here[chain, position], column + columns.start
    other = cell != own
    if cells.pinned is not None:
        other &= (cell != cells.pinned) & (own != cells.pinned)
    return chain[other], position[other], column[other]


def _in_order(
    time: Tensor,
    chain: Tensor,
    position: Tensor,
    cell: Tensor,
    outward: int,
    limit: Tensor,
    cursor: Cursor,
    m: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The roots up to the limit, each at its next time after the cursor."""
    index = root_index(position, cell, outward, m)
    barred = cursor.barred[chain]
    is_barred = (barred[:, 0] == position) & (barred[:, 1] == cell) & (barred[:, 2] == outward)
    # the arc began at this root: up to rounding its angle is 0, and its next crossing is a full turn later
    time = torch.where(is_barred, FULL_TURN, time)
    now = cursor.time[chain]
    time = time + FULL_TURN * torch.floor(now / FULL_TURN)
    ahead = (time > now) | ((time == now) & (index > cursor.last[chain]))
    time = torch.where(ahead, time, time + FULL_TURN)
    soon = time <= limit[chain]
    return time[soon], chain[soon], index[soon]


class _Earliest:
    """A running minimum: the earliest root of each chain, and among equal times the smallest index."""

    def __init__(self, here: Tensor) -> None:
        self.chains, self.device = len(here), here.device
        self.time: Tensor | None = None
        self.index = torch.full((self.chains,), torch.iinfo(torch.int64).max, device=self.device)

    def offer(self, time: Tensor, chain: Tensor, index: Tensor) -> None:
        if self.time is None:
            self.time = time.new_full((self.chains,), torch.inf)
        earliest = self.time.scatter_reduce(0, chain, time, "amin")
        self.index = torch.where(earliest < self.time, torch.iinfo(torch.int64).max, self.index)
        first = time == earliest[chain]
        self.index = self.index.scatter_reduce(0, chain[first], index[first], "amin")
        self.time = earliest

    def crossing(self, m: int) -> Crossing:
        assert self.time is not None  # there are at least two cells, so at least one chunk
        return _crossing(self.time, self.index, m)


def _crossing(time: Tensor, index: Tensor, m: int) -> Crossing:
    """The inverse of `root_index`."""
    return Crossing(time, index // 2 // m, index // 2 % m, index % 2 == 1)
