"""Motion and samplers in degenerate cases: corners, parallel walls, rounding, impossible states."""

import itertools

import pytest
import torch
from torch import Tensor

import structured_voronoi as sv
from helpers import boxed_target, energy_error, outside, round_trip_failures, svs_of, trajectory, with_embeddings
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.streams import Rng
from structured_voronoi.geometry.cells import cells_of
from structured_voronoi.geometry.motion import simulate
from structured_voronoi.targets.categorical import toy

KINDS = ["open", "closed", "uniform"]


def lattice(side: int = 3) -> Tensor:
    """The points of a square lattice: four cells meet at every corner."""
    return torch.tensor(list(itertools.product(range(side), repeat=2)), dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_momentum(kind: str) -> None:
    """Circles begin at their outermost point; lines do not move."""
    there = trajectory(svs_of(kind), boxed_target(1), seed=1)
    there = there._replace(start=there.start._replace(r=torch.zeros_like(there.start.r)))
    assert energy_error(there) < 1e-9
    if kind == "uniform":
        end, tally, _ = simulate(there)
        assert torch.equal(end.x, there.start.x)
        assert tally.events.sum() == tally.reflections.sum() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_parallel_walls(kind: str) -> None:
    """Collinear embeddings in the plane: no two walls ever meet."""
    line = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None] * torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    there = trajectory(svs_of(kind), with_embeddings(line, length=2), seed=1)
    assert energy_error(there) < 1e-9
    assert round_trip_failures(there, tolerance=1e-9) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_one_dimension(kind: str) -> None:
    there = trajectory(svs_of(kind), boxed_target(3, dimensions=1), seed=1)
    assert energy_error(there) < 1e-9
    assert round_trip_failures(there, tolerance=1e-9) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [(0.5, 0.0), (0.5, 0.5)], ids=["on a wall", "on a corner"])
def test_starting_exactly_on_walls(kind: str, place: tuple[float, float]) -> None:
    """x is where two or four cells touch, in any of these cells, with any direction."""
    there = trajectory(svs_of(kind), with_embeddings(lattice()), seed=2, chains=400)
    x = torch.tensor(place, dtype=torch.float64) - there.cells.origin
    gaps = (x - there.cells.table).norm(dim=-1)
    touching = (gaps < gaps.min() + 1e-9).nonzero().flatten()
    cell = touching[torch.arange(400) % len(touching)][:, None]
    first = there.evaluate(cell)
    there = there._replace(
        start=there.start._replace(
            cell=cell, x=x.expand(400, 1, 2).clone(), potential=first.potential, centre=first.centre
        )
    )
    assert energy_error(there) < 1e-9
    if kind != "open":
        end, *_ = simulate(there)
        assert outside(there.cells, end) < 1e-9


@pytest.mark.parametrize("towards", [1.0, -1.0], ids=["a corner of the box", "a corner of the cells"])
def test_two_walls_at_once(towards: float) -> None:
    """On the diagonal of the toy both coordinates cross walls at the same time."""
    there = trajectory(svs_of("uniform"), toy(), seed=0, chains=8)
    cell = torch.zeros(8, 1, dtype=torch.int64)
    x = there.cells.table[0].expand(8, 1, 2).clone()
    r = towards * torch.arange(1, 9, dtype=torch.float64)[:, None, None].expand(8, 1, 2)
    start = there.start._replace(cell=cell, x=x, r=r.clone(), potential=there.evaluate(cell).potential)
    there = there._replace(start=start, duration=torch.full((8,), 3.0, dtype=torch.float64))
    end, tally, _ = simulate(there)
    assert not tally.abandoned.any()
    assert energy_error(there) < 1e-9
    assert outside(there.cells, end) < 1e-9
    assert (end.x.abs() <= 2 + 1e-9).all()


@pytest.mark.parametrize("kind", KINDS)
def test_single_precision_far_from_the_origin(kind: str) -> None:
    target = boxed_target(1, dtype=torch.float32, mean=100.0)
    there = trajectory(svs_of(kind), target, seed=1, chains=2000)
    assert energy_error(there) < 1e-5
    assert round_trip_failures(there, tolerance=1e-2) <= 1e-3


@pytest.mark.parametrize("kind", ["open", "closed"])
def test_longer_than_a_full_turn(kind: str) -> None:
    """Every wall is crossed again after a full turn."""
    there = trajectory(svs_of(kind, scale=0.4, turn=6.0), boxed_target(1), seed=1)
    assert there.duration.max() > 2 * torch.pi
    assert energy_error(there) < 1e-9
    assert round_trip_failures(there, tolerance=1e-7) == 0


@pytest.mark.parametrize("dimensions", [None, 5, 2])
def test_identical_embeddings_are_refused(dimensions: int | None) -> None:
    """Also after projection, where rounding may separate equal points."""
    embeddings = torch.randn(40, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    embeddings[31] = embeddings[4]
    with pytest.raises(SamplingError, match="tokens 4 and 31 have identical embeddings"):
        cells_of(embeddings, dimensions=dimensions)
    allowed = torch.arange(40) != 31
    assert len(cells_of(embeddings, allowed, dimensions).table) == 39


@pytest.mark.parametrize("walls", ["open", "closed"])
def test_a_chain_does_not_move_after_too_many_events(walls: str) -> None:
    target, sampler = boxed_target(1), sv.SVS(scale=0.8, walls=walls, turn=4.0, max_events=1)
    rng = Rng(0, 200)
    state = sampler.init(target, rng, None)
    after, info = sampler.step(target, rng, state)
    stayed = info.diverging
    assert stayed.any()
    assert not stayed.all()
    for name in ("tokens", "energy", "centre"):
        assert torch.equal(getattr(after, name)[stayed], getattr(state, name)[stayed])
    if walls == "closed":
        assert torch.equal(after.x[stayed], state.x[stayed])


STEERED = {
    "svs": sv.SVS(scale=0.8),
    "pncg": sv.PNCG(step_size=4.0),
    "gibbs with gradients": sv.GibbsWithGradients(),
    "mucola": sv.baselines.MuCoLa(step_size=2.0),
}


@pytest.mark.parametrize("sampler", STEERED.values(), ids=STEERED.keys())
def test_a_nonfinite_field_does_not_make_a_state_impossible(sampler: object) -> None:
    """A field of NaN counts as zero; the state has its energy and is sampled."""
    target = sv.verify.random_target(1)
    broken = torch.rand(6, 6, generator=torch.Generator().manual_seed(3)) < 0.5
    target.gradient[broken] = torch.nan
    draws = sv.sample(target, sampler, chains=40, draws=20, warmup=0, progress=False)
    tokens = torch.as_tensor(draws["posterior"]["tokens"].values).flatten(0, 1)
    lp = torch.as_tensor(draws["sample_stats"]["lp"].values).flatten()
    torch.testing.assert_close(lp, target.log_prob(tokens))
    assert int(draws["sample_stats"]["nonfinite"].sum()) == 0
    assert broken[tokens[:, 0], tokens[:, 1]].double().mean() > 0.1


IMPOSSIBLE_SAMPLERS = {
    "open": sv.SVS(scale=0.8),
    "closed": sv.SVS(scale=0.8, walls="closed"),
    "uniform": sv.SVS(base="uniform", walls="closed", length=1.5),
    "paper": sv.SVS.paper(step_size=0.5, discontinuity_step=0.2),
    "hmc": sv.baselines.HMC(step_size=1.0),
    "langevin": sv.baselines.Langevin(step_size=1.0),
    "mucola": sv.baselines.MuCoLa(step_size=2.0),
    "pncg": sv.PNCG(step_size=4.0),
    "gibbs with gradients": sv.GibbsWithGradients(),
}


@pytest.mark.parametrize("sampler", IMPOSSIBLE_SAMPLERS.values(), ids=IMPOSSIBLE_SAMPLERS.keys())
def test_impossible_states_are_counted_and_never_entered(sampler: object) -> None:
    """Half of the states have probability zero: proposals of them are rejected and counted."""
    target = boxed_target(1)
    target.table[torch.rand(6, 6, generator=torch.Generator().manual_seed(3)) < 0.5] = -torch.inf
    draws = sv.sample(target, sampler, chains=40, draws=20, warmup=0, progress=False)
    tokens = torch.as_tensor(draws["posterior"]["tokens"].values).flatten(0, 1)
    assert target.log_prob(tokens).isfinite().all()
    assert int(draws["sample_stats"]["nonfinite"].sum()) > 0
    assert int(draws["sample_stats"]["swaps"].sum()) > 0
