"""Motion through walls conserves energy, is reversible and preserves volume; its broken twins do not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import structured_voronoi as sv
from helpers import PROPERTY, boxed_target, energy_error, outside, round_trip_failures, svs_of, trajectory
from structured_voronoi.geometry.flows import Particle
from structured_voronoi.geometry.motion import Trajectory, simulate
from structured_voronoi.geometry.segments import segments
from structured_voronoi.verify.twins import DividedBySquare, OutwardOnly

KINDS = ["open", "closed", "uniform"]
SETTINGS = [(0.3, 0.0), (0.3, 0.2), (0.3, 1.0), (0.6, 0.2), (0.6, 0.5), (1.0, 0.0), (1.0, 0.2), (2.0, 0.05)]
"""(scale, field_sd) at which chains move; a strong field with a large scale stops them."""


@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(
    seed=st.integers(0, 10**6),
    tokens=st.integers(2, 8),
    length=st.integers(1, 3),
    dimensions=st.integers(1, 4),
    scale=st.sampled_from([0.2, 0.6, 1.5]),
)
def test_energy_is_conserved(kind: str, seed: int, tokens: int, length: int, dimensions: int, scale: float) -> None:
    target = boxed_target(seed, tokens, length, dimensions, field_sd=0.5)
    assert energy_error(trajectory(svs_of(kind, scale, turn=2.0), target, seed, chains=30)) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_energy_is_conserved_in_single_precision(kind: str, seed: int) -> None:
    assert energy_error(trajectory(svs_of(kind), boxed_target(seed, dtype=torch.float32), seed)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("scale", "field_sd"), SETTINGS)
def test_trajectories_are_reversible(kind: str, scale: float, field_sd: float) -> None:
    there = trajectory(svs_of(kind, scale), boxed_target(1, field_sd=field_sd), seed=2, chains=500)
    assert round_trip_failures(there, tolerance=1e-9) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_trajectories_are_reversible_in_single_precision(kind: str) -> None:
    there = trajectory(svs_of(kind), boxed_target(1, dtype=torch.float32), seed=2, chains=4000)
    assert round_trip_failures(there, tolerance=1e-2) <= 1e-3


@pytest.mark.parametrize(("scale", "field_sd"), SETTINGS)
def test_outward_only_walls_are_not_reversible(scale: float, field_sd: float) -> None:
    there = trajectory(OutwardOnly(scale), boxed_target(1, field_sd=field_sd), seed=2, chains=500)
    assert round_trip_failures(there, tolerance=1e-9) > 0.005


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("scale", "field_sd"), SETTINGS)
def test_refraction_as_printed_is_not_reversible(kind: str, scale: float, field_sd: float) -> None:
    twin = svs_of(kind, scale, of=DividedBySquare)
    there = trajectory(twin, boxed_target(1, field_sd=field_sd), seed=2, chains=500)
    assert round_trip_failures(there, tolerance=1e-9) > 0.5


def test_public_round_trips_detect_broken_twins() -> None:
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
    """The share of swapping trajectories around which (x, r) -> (x', r') does not preserve volume.

    |det J| is computed by central differences. Trajectories whose perturbations meet different walls are left out,
    because the map is not smooth there.
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
    assert smooth.sum() >= 20, "too few smooth swapping trajectories for this check"
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
def test_nearest_returns_the_nearest_embedding(seed: int, tokens: int, dimensions: int) -> None:
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
def test_segments_agree_with_simulate(kind: str, seed: int, tokens: int, length: int) -> None:
    """They are contiguous, conserve the energy, end where `simulate` does, and have as many events of each kind."""
    there = trajectory(svs_of(kind, turn=2.0), boxed_target(seed, tokens, length, 2, field_sd=0.5), seed, chains=1)
    found, (end, tally, _) = list(segments(there)), simulate(there)
    assert torch.stack([there.energy(segment.begin) for segment in found]).std(correction=0) < 1e-9
    for segment, following in zip(found, [*(segment.begin for segment in found[1:]), end], strict=True):
        reached, _ = there.flow.advance(segment.begin, torch.tensor([segment.time], dtype=torch.float64))
        assert torch.allclose(reached, following.x, atol=1e-9)
    met = [segment.meets for segment in found]
    assert (met.count("refraction"), met.count("reflection")) == (int(tally.crossings), int(tally.reflections))
    assert len([segment for segment in found if segment.wall >= 0]) == int(tally.events)
    assert met.count("end") == 1
    assert torch.equal(found[-1].begin.cell, end.cell)
