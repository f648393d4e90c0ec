"""Motion through walls keeps the energy, returns when reversed, and preserves volume; its broken twins do not."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import structured_voronoi as sv
from helpers import PROPERTY, boxed_target, energy_error, trajectory, outside, round_trip_failures, svs_of
from structured_voronoi.geometry import motion
from structured_voronoi.geometry.flows import Particle
from structured_voronoi.geometry.motion import Trajectory, simulate
from structured_voronoi.geometry.segments import segments
from structured_voronoi.verify.twins import DividedBySquare, OutwardOnly

KINDS = ["open", "closed", "uniform"]
SETTINGS = [(0.3, 0.0), (0.3, 0.2), (0.3, 1.0), (0.6, 0.2), (0.6, 0.5), (1.0, 0.0), (1.0, 0.2), (2.0, 0.05)]
"""(scale, field_sd), chosen where chains move: a strong field in wide cells freezes them."""


@pytest.fixture(autouse=True, scope="module")
def settled_once() -> Iterator[None]:
    """A point somewhere in its cell will do for these tests, and is had much sooner than a random one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(motion, "SETTLING_TRAJECTORIES", 1)
        yield


@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(
    seed=st.integers(0, 10**6),
    tokens=st.integers(2, 8),
    length=st.integers(1, 3),
    dimensions=st.integers(1, 4),
    scale=st.sampled_from([0.2, 0.6, 1.5]),
)
def test_energy_is_kept(kind: str, seed: int, tokens: int, length: int, dimensions: int, scale: float) -> None:
    target = boxed_target(seed, tokens, length, dimensions, field_sd=0.5)
    assert energy_error(trajectory(svs_of(kind, scale, turn=2.0), target, seed, chains=30)) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_energy_is_kept_in_single_precision(kind: str, seed: int) -> None:
    assert energy_error(trajectory(svs_of(kind), boxed_target(seed, dtype=torch.float32), seed)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("scale", "field_sd"), SETTINGS)
def test_the_way_back_is_the_way_out(kind: str, scale: float, field_sd: float) -> None:
    there = trajectory(svs_of(kind, scale), boxed_target(1, field_sd=field_sd), seed=2, chains=500)
    assert round_trip_failures(there, tolerance=1e-9) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_way_back_is_the_way_out_in_single_precision(kind: str) -> None:
    there = trajectory(svs_of(kind), boxed_target(1, dtype=torch.float32), seed=2, chains=4000)
    assert round_trip_failures(there, tolerance=1e-2) <= 1e-3


@pytest.mark.parametrize(("scale", "field_sd"), SETTINGS)
def test_gates_that_work_outward_only_are_caught(scale: float, field_sd: float) -> None:
    there = trajectory(OutwardOnly(scale), boxed_target(1, field_sd=field_sd), seed=2, chains=500)
    assert round_trip_failures(there, tolerance=1e-9) > 0.005


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("scale", "field_sd"), SETTINGS)
def test_refraction_as_printed_is_caught(kind: str, scale: float, field_sd: float) -> None:
    twin = svs_of(kind, scale, of=DividedBySquare)
    there = trajectory(twin, boxed_target(1, field_sd=field_sd), seed=2, chains=500)
    assert round_trip_failures(there, tolerance=1e-9) > 0.5


def test_the_round_trips_that_users_can_take_tell_right_from_wrong() -> None:
    target = boxed_target(1)
    for kind in KINDS:
        right = sv.verify.round_trip(svs_of(kind), target, chains=500, seed=2)
        assert right.swapped.sum() >= 20
        assert right.failures(1e-9) == 0
        assert right.energy_error.max() < 1e-9
        wrong = sv.verify.round_trip(svs_of(kind, of=DividedBySquare), target, chains=500, seed=2)
        assert wrong.failures(1e-9) > 0.5
        assert wrong.energy_error.max() > 1e-3
    assert sv.verify.round_trip(OutwardOnly(0.6), target, chains=500, seed=2).failures(1e-9) > 0.005


def volume_failures(there: Trajectory, tolerance: float = 1e-3, nudge: float = 1e-6) -> float:
    """The share of swapping trajectories around which (x, r) -> (x', r') does not keep the volume.

    |det J| is taken by central differences. Where the nudged trajectories do not all meet the same number of walls
    the map is not smooth, and nothing can be said.
    """
    n, k = there.start.x.shape[1:]
    size, chains = 2 * n * k, len(there.start.x)
    nudges = nudge * torch.cat([torch.eye(size), -torch.eye(size)]).double()
    rows = torch.arange(chains).repeat_interleave(2 * size)
    start = Particle(*(part[rows] for part in there.start))
    start = start._replace(
        x=start.x + nudges[:, : n * k].reshape(-1, n, k).repeat(chains, 1, 1),
        r=start.r + nudges[:, n * k :].reshape(-1, n, k).repeat(chains, 1, 1),
    )
    end, tally, _ = simulate(there._replace(start=start, duration=there.duration[rows]))
    flat = torch.cat([end.x.flatten(1), end.r.flatten(1)], dim=-1).view(chains, 2, size, size)
    determinant = torch.linalg.det((flat[:, 0] - flat[:, 1]) / (2 * nudge)).abs()

    def same(part: Tensor) -> Tensor:
        grouped = part.view(chains, 2 * size, -1)
        return (grouped == grouped[:, :1]).flatten(1).all(-1)

    swapping = (tally.crossings.view(chains, -1)[:, 0] > 0) & ~tally.abandoned.view(chains, -1).any(-1)
    smooth = swapping & same(end.cell) & same(tally.events) & same(tally.crossings) & same(tally.reflections)
    assert smooth.sum() >= 20, "too few smooth swapping trajectories for this check to mean anything"
    return float((smooth & ((determinant - 1).abs() > tolerance)).sum() / smooth.sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0.6, 1.5])
def test_volume_is_preserved(kind: str, scale: float) -> None:
    there = trajectory(svs_of(kind, scale), boxed_target(4, dimensions=2), seed=5, chains=150)
    assert volume_failures(there) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0.6, 1.5])
def test_refraction_as_printed_does_not_preserve_volume(kind: str, scale: float) -> None:
    twin = svs_of(kind, scale, of=DividedBySquare)
    there = trajectory(twin, boxed_target(4, dimensions=2), seed=5, chains=150)
    assert volume_failures(there) > 0.5


@PROPERTY
@given(seed=st.integers(0, 10**6), tokens=st.integers(2, 30), dimensions=st.integers(1, 5))
def test_the_cell_of_a_point_is_its_nearest_embedding(seed: int, tokens: int, dimensions: int) -> None:
    there = trajectory(svs_of("open"), boxed_target(seed, tokens, 1, dimensions), seed, chains=50)
    x, table = there.start.x, there.cells.table
    assert torch.equal(there.cells.nearest(x), torch.cdist(x[:, 0], table).argmin(-1, keepdim=True))


@pytest.mark.parametrize("kind", ["closed", "uniform"])
@PROPERTY
@given(seed=st.integers(0, 10**6), tokens=st.integers(2, 8), dimensions=st.integers(1, 4))
def test_points_stay_in_the_cells_of_their_tokens(kind: str, seed: int, tokens: int, dimensions: int) -> None:
    there = trajectory(svs_of(kind, turn=2.0), boxed_target(seed, tokens, 2, dimensions), seed, chains=50)
    assert outside(there.cells, there.start) < 1e-9
    end, *_ = simulate(there)
    assert outside(there.cells, end) < 1e-9
    if kind == "uniform":
        assert ((end.x >= there.flow.low - 1e-9) & (end.x <= there.flow.high + 1e-9)).all()


@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(seed=st.integers(0, 10**6), tokens=st.integers(2, 8), length=st.integers(1, 3))
def test_legs_tell_where_a_trajectory_goes(kind: str, seed: int, tokens: int, length: int) -> None:
    """They join without a gap, keep the energy, end where `simulate` does, and meet as many walls of each kind."""
    there = trajectory(svs_of(kind, turn=2.0), boxed_target(seed, tokens, length, 2, field_sd=0.5), seed, chains=1)
    told, (end, tally, _) = list(segments(there)), simulate(there)
    assert torch.stack([there.energy(leg.begin) for leg in told]).std(correction=0) < 1e-9
    for leg, following in zip(told, [*(leg.begin for leg in told[1:]), end], strict=True):
        reached, _ = there.flow.advance(leg.begin, torch.tensor([leg.time], dtype=torch.float64))
        assert torch.allclose(reached, following.x, atol=1e-9)
    met = [leg.meets for leg in told]
    assert (met.count("refraction"), met.count("reflection")) == (int(tally.crossings), int(tally.reflections))
    assert len([leg for leg in told if leg.wall >= 0]) == int(tally.events)
    assert met.count("end") == 1
    assert torch.equal(told[-1].begin.cell, end.cell)
