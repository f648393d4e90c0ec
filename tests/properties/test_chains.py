"""What holds for every sampler: chains do not disturb each other, and only allowed tokens are sampled."""

from typing import Any

import pytest
import torch
from torch import Tensor

import structured_voronoi as sv
from helpers import ALL_SAMPLERS, random_target
from structured_voronoi.base import Rng
from structured_voronoi.samplers import svs

EVERY_SAMPLER = pytest.mark.parametrize("sampler", ALL_SAMPLERS.values(), ids=ALL_SAMPLERS.keys())
PRECISIONS = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


@pytest.fixture(autouse=True)
def two_pilot_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuning on fewer scales is as good a test, and faster."""
    monkeypatch.setattr(svs, "PILOT_SCALES", (0.3, 0.7))


def run(target: Any, sampler: Any, start: Tensor, **settings: Any) -> Any:
    return sv.sample(
        target, sampler, chains=len(start), draws=5, warmup=1, thin=2, start=start, progress=False, **settings
    )


@PRECISIONS
@EVERY_SAMPLER
def test_a_draw_does_not_depend_on_how_many_chains_run_beside_it(sampler: Any, dtype: torch.dtype) -> None:
    target = random_target(3, tokens=7, length=3, dimensions=5, dtype=dtype)
    start = torch.randint(7, (11, 3), generator=torch.Generator().manual_seed(1))
    many, few = (run(target, sampler, start[:chains], seed=4) for chains in (11, 3))
    assert int(many["sample_stats"]["swaps"].sum()) > 0
    for group in ("posterior", "sample_stats"):
        assert many[group].dataset.isel(chain=slice(3)).identical(few[group].dataset)


@PRECISIONS
@EVERY_SAMPLER
def test_a_chain_does_not_depend_on_which_chains_run_before_it(sampler: Any, dtype: torch.dtype) -> None:
    """The last three of eleven chains by themselves, as on another worker: the whole state agrees to the last bit."""
    target = random_target(3, tokens=7, length=3, dimensions=5, dtype=dtype)
    start = torch.randint(7, (11, 3), generator=torch.Generator().manual_seed(1))
    if hasattr(sampler, "tuned"):
        sampler = sampler.tuned(target, 4)
    states = []
    for chains in (range(11), range(8, 11)):
        rng = Rng(4, list(chains))
        state = sampler.init(target, rng, start[list(chains)])
        for _ in range(10):
            state, _ = sampler.step(target, rng, state)
        states.append(state)
    together, alone = ([part[-3:] for part in per_chain(state)] for state in states)
    assert len(together) >= 3
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)


def per_chain(state: Any) -> list[Tensor]:
    """The tensors of a state that have one row for each chain, those of its parts included."""
    found: list[Tensor] = []
    for name, part in state._asdict().items():
        if isinstance(part, Tensor):
            found.append(part)
        elif name == "point":
            found += per_chain(part)
    return found


@EVERY_SAMPLER
def test_only_allowed_tokens_are_sampled(sampler: Any) -> None:
    """Two tokens are left out; one of them has no embedding at all, so that touching it would show."""
    target = random_target(5, tokens=8, length=2, dimensions=3)
    target.embeddings[2] = torch.nan
    target.box = float(target.embeddings.nan_to_num().abs().max()) + 0.5
    target.allowed = (torch.arange(8) != 2) & (torch.arange(8) != 6)
    draws = sv.sample(target, sampler, chains=20, draws=20, warmup=0, progress=False)
    seen = set(draws["posterior"]["tokens"].values.flatten().tolist())
    assert seen <= {0, 1, 3, 4, 5, 7}
    assert len(seen) > 2
    assert int(draws["sample_stats"]["swaps"].sum()) > 0


@pytest.mark.parametrize("walls", ["open", "closed"])
def test_remembering_neighbours_saves_evaluations_and_changes_nothing_else(walls: str) -> None:
    target = random_target(6)
    start = torch.randint(6, (20, 2), generator=torch.Generator().manual_seed(1))
    short, long = (run(target, sv.SVS(scale=0.6, walls=walls, remember=slots), start) for slots in (1, 16))
    assert int(long["sample_stats"]["evaluations"].sum()) < int(short["sample_stats"]["evaluations"].sum())
    assert short["posterior"].dataset.identical(long["posterior"].dataset)
    for name in ("energy", "events", "swaps", "reflections"):
        assert short["sample_stats"][name].identical(long["sample_stats"][name])
