"""Properties of every sampler: chains are independent, steps do not change their input, only allowed tokens occur."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import structured_voronoi as sv
from helpers import ALL_SAMPLERS, boxed_target
from structured_voronoi.core.contracts import Chains, tune
from structured_voronoi.core.streams import Rng
from structured_voronoi.samplers import svs

CYCLES: dict[str, Any] = {
    "pncg, gibbs with gradients": sv.Cycle(sv.PNCG(step_size=2.0), sv.GibbsWithGradients()),
    "svs open, pncg": sv.Cycle(sv.SVS(scale=0.6), sv.PNCG(step_size=2.0)),
    "langevin metropolis, pncg": sv.Cycle(
        sv.baselines.Langevin(step_size=0.5, metropolis=True), sv.PNCG(step_size=2.0)
    ),
    "svs closed, pncg": sv.Cycle(sv.SVS(scale=0.6, walls="closed"), sv.PNCG(step_size=2.0)),
}
SAMPLERS = ALL_SAMPLERS | CYCLES
EVERY_SAMPLER = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
PRECISIONS = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
SHARED = ("space", "measure")
"""Parts of states that all chains share."""


@pytest.fixture(autouse=True)
def fewer_pilots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svs, "PILOT_SCALES", (0.3, 0.7))


def run(target: Any, sampler: Any, start: Tensor, **settings: Any) -> Any:
    return sv.sample(
        target, sampler, chains=len(start), draws=5, warmup=1, thin=2, start=start, progress=False, **settings
    )


def starts(chains: int = 11) -> Tensor:
    return torch.randint(7, (chains, 3), generator=torch.Generator().manual_seed(1))


@PRECISIONS
@EVERY_SAMPLER
def test_draws_do_not_depend_on_the_number_of_chains(sampler: Any, dtype: torch.dtype) -> None:
    target = boxed_target(3, tokens=7, length=3, dimensions=5, dtype=dtype)
    many, few = (run(target, sampler, starts()[:chains], seed=4) for chains in (11, 3))
    assert int(many["sample_stats"]["swaps"].sum()) > 0
    for group in ("posterior", "sample_stats"):
        assert many[group].dataset.isel(chain=slice(3)).identical(few[group].dataset)


@PRECISIONS
@EVERY_SAMPLER
def test_draws_do_not_depend_on_the_other_chains(sampler: Any, dtype: torch.dtype) -> None:
    """The last three of eleven chains, run alone as on another worker, have the same state to the last bit."""
    target = boxed_target(3, tokens=7, length=3, dimensions=5, dtype=dtype)
    sampler = tune(sampler, target, 4)
    states = []
    for chains in (range(11), range(8, 11)):
        running = Chains(sampler, target, Rng(4, list(chains)), starts()[list(chains)])
        for _ in range(10):
            next(running)
        states.append(running.state)
    together, alone = (per_chain(state) for state in states)
    assert len(together) >= 3
    assert together.keys() == alone.keys()
    for name in alone:
        assert torch.equal(together[name][-3:], alone[name]), name


@EVERY_SAMPLER
def test_step_does_not_change_its_input(sampler: Any) -> None:
    """Two steps from one state with the same random numbers give the same result at the same cost."""
    target = boxed_target(3, tokens=7, length=3, dimensions=5)
    sampler = tune(sampler, target, 4)
    running = Chains(sampler, target, Rng(4, 11), starts())
    for _ in range(3):
        next(running)
    state, counter = running.state, running.rng.counter.clone()
    before = {name: part.clone() for name, part in per_chain(state).items()}
    ends, infos = [], []
    for _ in range(2):
        rng = Rng(4, 11)
        rng.counter = counter.clone()
        end, info = sampler.step(target, rng, state)
        ends.append(per_chain(end))
        infos.append({name: part for name, part in info._asdict().items() if part is not None})
    assert int(infos[0]["evaluations"].sum()) > 0
    assert int(infos[0]["events"].sum()) > 0
    for first, second in (ends, infos, (before, per_chain(state))):
        assert first.keys() == second.keys()
        for name in first:
            assert torch.equal(first[name], second[name]), name


def per_chain(state: Any) -> dict[str, Tensor]:
    """The tensors with one row per chain of a state and its parts, by name."""
    parts = state._asdict() if hasattr(state, "_asdict") else dict(enumerate(state))
    found: dict[str, Tensor] = {}
    for name, part in parts.items():
        if isinstance(part, Tensor):
            found[str(name)] = part
        elif isinstance(part, tuple) and name not in SHARED:
            found |= {f"{name}.{inner}": tensor for inner, tensor in per_chain(part).items()}
    return found


def test_per_chain_finds_the_tensors_of_nested_states() -> None:
    target = boxed_target(3, tokens=7, length=3, dimensions=5)
    cycle = CYCLES["svs closed, pncg"]
    found = per_chain(cycle.init(target, Rng(4, 11), starts()))
    assert {"tokens", "parts.0.x", "parts.0.memo.centre", "parts.1.gradient"} <= found.keys()
    assert all(len(part) == 11 for part in found.values())


@EVERY_SAMPLER
def test_only_allowed_tokens_are_sampled(sampler: Any) -> None:
    """Two tokens are excluded, one of them with an embedding of NaN."""
    target = boxed_target(5, tokens=8, length=2, dimensions=3)
    target.embeddings[2] = torch.nan
    target.box = float(target.embeddings.nan_to_num().abs().max()) + 0.5
    target.allowed = (torch.arange(8) != 2) & (torch.arange(8) != 6)
    draws = sv.sample(target, sampler, chains=20, draws=20, warmup=0, progress=False)
    seen = set(draws["posterior"]["tokens"].values.flatten().tolist())
    assert seen <= {0, 1, 3, 4, 5, 7}
    assert len(seen) > 2
    assert int(draws["sample_stats"]["swaps"].sum()) > 0


@pytest.mark.parametrize("walls", ["open", "closed"])
def test_remembered_states_save_evaluations_and_do_not_change_draws(walls: str) -> None:
    target = boxed_target(6)
    start = torch.randint(6, (20, 2), generator=torch.Generator().manual_seed(1))
    short, long = (run(target, sv.SVS(scale=0.6, walls=walls, remember=slots), start) for slots in (1, 16))
    assert int(long["sample_stats"]["evaluations"].sum()) < int(short["sample_stats"]["evaluations"].sum())
    assert short["posterior"].dataset.identical(long["posterior"].dataset)
    for name in ("lp", "events", "swaps", "crossings", "reflections"):
        assert short["sample_stats"][name].identical(long["sample_stats"][name])


@EVERY_SAMPLER
def test_swaps_count_the_positions_whose_token_changed(sampler: Any) -> None:
    target = boxed_target(3, tokens=7, length=3, dimensions=5)
    cycled = isinstance(sampler, sv.Cycle)
    running = Chains(tune(sampler, target, 4), target, Rng(4, 11), starts())
    for _ in range(5):
        before = running.state.tokens.clone()
        state, info = next(running)
        changed = (state.tokens != before).sum(-1)
        assert (info.swaps >= changed).all() if cycled else torch.equal(info.swaps, changed)
        if info.crossings is not None and not cycled:
            assert (info.crossings >= info.swaps).all()
