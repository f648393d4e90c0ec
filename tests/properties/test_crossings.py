"""Crossing times against a brute-force search along the path."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import structured_voronoi as sv
from helpers import PROPERTY
from structured_voronoi.core.streams import Rng
from structured_voronoi.geometry.cells import Cells, cells_of
from structured_voronoi.geometry.crossings import Crossing, Cursor, initial_cursor, next_on_circle, next_on_line

GRID = 4001
TURNS = 9.0
"""Length of the circles in radians: almost one and a half turns."""

Event = tuple[float, int, int, bool]


class Paths:
    """Random chains on random circles and lines, each starting in the cell of its own tokens."""

    def __init__(self, seed: int, tokens: int, length: int, dimensions: int, chains: int = 6, memory: int = 2**28):
        self.cells = cells_of(sv.verify.random_target(seed, tokens, 1, dimensions).embeddings, memory=memory)
        rng = Rng(seed, chains)
        self.centre, self.velocity = (rng.normal(length, dimensions) for _ in range(2))
        self.x = 1.5 * rng.normal(length, dimensions)
        self.here = self.cells.nearest(self.x)
        self.offset = self.x - self.centre

    def next_on_circle(self, cursor: Cursor, inward: bool, limit: float = TURNS) -> Crossing:
        limits = torch.full((len(self.here),), limit, dtype=torch.float64)
        return next_on_circle(
            self.cells, self.here, self.offset, self.velocity, self.centre, limits, cursor, inward, confined=False
        )

    def next_on_line(self, limit: float = 3.0) -> Crossing:
        limits = torch.full((len(self.here),), limit, dtype=torch.float64)
        return next_on_line(self.cells, self.here, self.x, self.velocity, limits)

    def circle(self, chain: int) -> Callable[[Tensor], Tensor]:
        return lambda time: (
            self.centre[chain]
            + self.offset[chain] * time.cos()[:, None, None]
            + self.velocity[chain] * time.sin()[:, None, None]
        )

    def line(self, chain: int) -> Callable[[Tensor], Tensor]:
        return lambda time: self.x[chain] + self.velocity[chain] * time[:, None, None]


def root(hit: Crossing, chain: int) -> tuple[int, int, int]:
    """The root of a crossing: (position, cell, outward)."""
    return int(hit.position[chain]), int(hit.cell[chain]), int(hit.outward[chain])


def brute_force(cells: Cells, here: Tensor, path: Callable[[Tensor], Tensor], limit: float) -> list[Event]:
    """Every crossing of a bisector along a path, in order, found on a grid and refined by bisection."""
    own = cells.points(here)

    def nearer(x: Tensor) -> Tensor:
        """Positive where x is nearer to token j than to its own."""
        return ((x - own) ** 2).sum(-1)[..., None] - ((x[..., None, :] - cells.table) ** 2).sum(-1)

    time = torch.linspace(0, limit, GRID, dtype=torch.float64)
    beyond = nearer(path(time)) > 0
    step, position, cell = (beyond[1:] != beyond[:-1]).nonzero(as_tuple=True)
    low, high, each = time[step], time[step + 1], torch.arange(len(step))
    outward = beyond[step + 1, position, cell]
    for _ in range(40):
        middle = (low + high) / 2
        after = (nearer(path(middle))[each, position, cell] > 0) == outward
        low, high = torch.where(after, low, middle), torch.where(after, middle, high)
    return sorted(zip(low.tolist(), position.tolist(), cell.tolist(), outward.tolist(), strict=True))


def all_on_circle(paths: Paths, inward: bool) -> list[list[Event]]:
    """Every crossing of each chain, following the cursor as `simulate` does when walls are passed."""
    cursor = initial_cursor(len(paths.here), paths.x)
    events: list[list[Event]] = [[] for _ in paths.here]
    while (hit := paths.next_on_circle(cursor, inward)).time.isfinite().any():
        for chain in hit.time.isfinite().nonzero().flatten().tolist():
            events[chain].append((float(hit.time[chain]), *root(hit, chain)))
        index = (hit.position * len(paths.cells.table) + hit.cell) * 2 + hit.outward.long()
        cursor = cursor._replace(time=hit.time, last=index)
    return events


def without_grazes(events: list[Event]) -> list[Event]:
    """Leave out walls that are crossed twice within two steps of the grid."""
    close = 2 * TURNS / GRID
    return [
        one
        for one in events
        if not any(0 < abs(one[0] - other[0]) < close and one[1:3] == other[1:3] for other in events)
    ]


def assert_same(found: list[Event], expected: list[Event]) -> None:
    found, expected = without_grazes(found), without_grazes(expected)
    assert [event[1:] for event in found] == [event[1:] for event in expected]
    assert torch.allclose(
        torch.tensor([event[0] for event in found]), torch.tensor([event[0] for event in expected]), rtol=0, atol=1e-9
    )


SIZES = {
    "seed": st.integers(0, 10**6),
    "tokens": st.integers(2, 9),
    "length": st.integers(1, 3),
    "dimensions": st.integers(1, 4),
}


@pytest.mark.parametrize("inward", [True, False], ids=["both directions", "outward only"])
@PROPERTY
@given(**SIZES)
def test_crossings_on_circles_agree_with_brute_force(
    inward: bool, seed: int, tokens: int, length: int, dimensions: int
) -> None:
    """Times, order, walls and branches of all events of more than a turn."""
    paths = Paths(seed, tokens, length, dimensions)
    for chain, found in enumerate(all_on_circle(paths, inward)):
        expected = brute_force(paths.cells, paths.here[chain], paths.circle(chain), TURNS)
        assert_same(found, [event for event in expected if inward or event[3]])


@PROPERTY
@given(**SIZES)
def test_first_crossings_on_lines_agree_with_brute_force(seed: int, tokens: int, length: int, dimensions: int) -> None:
    paths = Paths(seed, tokens, length, dimensions)
    hit = paths.next_on_line(limit=3.0)
    for chain, here in enumerate(paths.here):
        found = [(float(hit.time[chain]), *root(hit, chain))] if hit.time[chain] <= 3 else []
        assert_same(found, brute_force(paths.cells, here, paths.line(chain), 3.0)[:1])


def test_no_crossing_is_reported_beyond_the_limit() -> None:
    paths = Paths(seed=3, tokens=8, length=2, dimensions=3)
    first = paths.next_on_circle(initial_cursor(6, paths.x), inward=True).time.min()
    assert paths.next_on_circle(initial_cursor(6, paths.x), inward=True, limit=float(first) * 0.99).time.isinf().all()
    first = paths.next_on_line().time.min()
    assert paths.next_on_line(limit=float(first) * 0.99).time.isinf().all()


@pytest.mark.parametrize("memory", [1, 20_000, 60_000])
def test_crossings_do_not_depend_on_the_memory_bound(memory: int) -> None:
    """Rows and columns in chunks give the same crossings; times differ by rounding only."""
    whole, parts = (Paths(5, tokens=30, length=2, dimensions=4, chains=13, memory=m) for m in (2**28, memory))
    cursor = initial_cursor(13, whole.x)
    for one, other in (
        (whole.next_on_circle(cursor, True), parts.next_on_circle(cursor, True)),
        (whole.next_on_circle(cursor, False), parts.next_on_circle(cursor, False)),
        (whole.next_on_line(), parts.next_on_line()),
    ):
        assert one.time.isfinite().any()
        assert all(torch.equal(part, again) for part, again in zip(one[1:], other[1:], strict=True))
        assert torch.allclose(one.time, other.time, rtol=0, atol=1e-13)
