"""Binding a target: optional attributes, masks, fields of NaN, cached geometry, shapes, starts and cycles."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import structured_voronoi as sv
from structured_voronoi.core.contracts import Chains
from structured_voronoi.core.info import blank_info
from structured_voronoi.geometry.memo import empty_memo
from structured_voronoi.problem import problem as binding
from structured_voronoi.problem.problem import bind
from structured_voronoi.targets.categorical import toy
from structured_voronoi.targets.tabular import AutoregressiveTable

CHAINS, STEPS, SEED, LEVEL = 8000, 6, 3, 1e-4


class Pairs:
    """A target of two positions and five tokens, written by a user."""

    length = 2

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embeddings = torch.randn(5, 2, generator=generator)
        self.log_probs = torch.randn(5, 5, generator=generator)  # similar to the name of a method, but no ability

    def log_prob(self, tokens: Tensor) -> Tensor:
        return self.log_probs[tokens[:, 0], tokens[:, 1]]


def with_attribute(name: str, value: object) -> Pairs:
    target = Pairs()
    setattr(target, name, value)
    return target


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("log_prob_and_grd", lambda tokens: None, "log_prob_and_grad"),
        ("log_prob_and_gradient", lambda tokens: None, "log_prob_and_grad"),
        ("conditional", lambda tokens, start: None, "conditionals"),
        ("alowed", torch.ones(5, dtype=torch.bool), "allowed"),
        ("normalized", False, "normalised"),
        ("Box", 2.0, "box"),
    ],
)
def test_misspelt_attributes_of_targets_are_refused(name: str, value: object, meant: str) -> None:
    with pytest.raises(sv.SamplingError, match=rf"Pairs has `{name}`; did you mean `{meant}`\? Rename it"):
        sv.sample(with_attribute(name, value), sv.SVS(0.5), chains=2, draws=1, progress=False)


@pytest.mark.parametrize(
    ("name", "value"), [("guided", True), ("boxes", 3), ("allow", 1), ("_log_prob_and_grd", len), ("redrawn", [])]
)
def test_other_attributes_are_allowed(name: str, value: object) -> None:
    sv.sample(with_attribute(name, value), sv.SVS(0.5), chains=2, draws=1, warmup=0, progress=False)


def test_a_module_can_be_a_target() -> None:
    class Network(torch.nn.Module, Pairs):
        def __init__(self) -> None:
            super().__init__()
            Pairs.__init__(self)

    sv.sample(Network(), sv.SVS(0.5), chains=2, draws=1, warmup=0, progress=False)


def test_misspelt_attributes_of_controls_are_refused() -> None:
    class Bounded:
        name, bounds = "bounded", 1.0

        def log_prob(self, tokens: Tensor, texts: list[str]) -> Tensor:
            return torch.ones(len(tokens))

    model = sv.load("bundled").target(max_tokens=2)
    with pytest.raises(sv.SamplingError, match="control Bounded has `bounds`; did you mean `bound`"):
        model.under([Bounded()])
    with pytest.raises(sv.SamplingError, match="is not a control"):
        model.under([42])


def test_objects_that_are_no_target_are_refused() -> None:
    with pytest.raises(sv.SamplingError, match="dict is not a target: it has no `embeddings`"):
        sv.sample({}, sv.SVS(0.5), progress=False)
    for mask in (torch.ones(4, dtype=torch.bool), torch.ones(5), [True] * 5):
        with pytest.raises(sv.SamplingError, match="`allowed` has "):
            sv.sample(with_attribute("allowed", mask), sv.SVS(0.5), progress=False)


class NaNField(AutoregressiveTable):
    """A table whose steering field is NaN at its most probable state."""

    only_while_steering = False
    """The broken twin: steered proposals treat the state as impossible."""
    _asked = 0

    def log_prob_and_grad(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        log_prob, field = super().log_prob_and_grad(tokens)
        broken = (tokens == torch.tensor(self.best)).all(-1)
        self._asked += 1
        if self.only_while_steering and self._asked > 1:  # the first evaluation is of the start
            log_prob = torch.where(broken, -torch.inf, log_prob)
        return log_prob, torch.where(broken[:, None, None], torch.nan, field)

    @property
    def best(self) -> list[int]:
        states = self.support()
        return states[self.log_prob(states).argmax()].tolist()


def test_a_nonfinite_field_does_not_bias_the_draws() -> None:
    """In the twin such a state is impossible: SVS leaves it and never returns."""
    plain = sv.verify.sentences(controlled=True)
    target = NaNField(plain.embeddings, plain.model, plain.gradient, plain.table - plain.model)
    cycle = sv.Cycle(sv.Refresh(block=1, suffix=False), sv.SVS(0.8))
    found = sv.verify.stationarity(cycle, target, CHAINS, STEPS, SEED)
    assert found.moved >= 0.3
    assert found.p_value >= LEVEL
    target.only_while_steering, target._asked = True, 0
    assert sv.verify.stationarity(cycle, target, CHAINS, STEPS, SEED).p_value < LEVEL


def masked_sentences(controlled: bool) -> Any:
    """Sentences without one common token, by a mask that the conditionals of the table ignore."""
    target: Any = sv.verify.sentences(controlled)
    target.allowed = torch.arange(5) != 2
    return target


@pytest.mark.parametrize(
    ("sampler", "controlled", "steps"),
    [
        (sv.Ancestral(), False, 1),
        (sv.Rejection(batch_size=4096), False, 1),
        (sv.Rejection(batch_size=4096), True, 1),
        (sv.Refresh(block=2), False, STEPS),
        (sv.Refresh(block=2), True, STEPS),
        (sv.Cycle(sv.SVS(0.8), sv.Refresh(block=2)), True, STEPS),
    ],
    ids=str,
)
def test_masks_that_the_target_does_not_apply_are_exact(sampler: Any, controlled: bool, steps: int) -> None:
    """The truth is p restricted to the allowed tokens; the twin treats the conditionals as masked."""
    target = masked_sentences(controlled)
    found = sv.verify.stationarity(sampler, target, CHAINS, steps, SEED)
    assert found.moved >= 0.3
    assert found.p_value >= LEVEL
    if isinstance(sampler, sv.Cycle):  # SVS refuses tokens that are not allowed
        sampler = sv.Cycle(sampler.samplers[0], sv.verify.twins.RefreshWithoutRatio(block=2))
    else:
        target.masks_itself = True
    assert sv.verify.stationarity(sampler, target, CHAINS, steps, SEED).p_value < LEVEL


def test_fudge_draws_allowed_tokens_only() -> None:
    target = masked_sentences(controlled=False)
    fudge = sv.baselines.Fudge(lambda prefixes: torch.zeros(len(prefixes)))
    draws = sv.sample(target, fudge, chains=500, draws=1, progress=False)["posterior"]["tokens"].values
    assert 2 not in draws
    target.masks_itself = True
    assert 2 in sv.sample(target, fudge, chains=500, draws=1, progress=False)["posterior"]["tokens"].values


@pytest.mark.parametrize(
    "sampler",
    [sv.Rejection(), sv.baselines.Fudge(lambda prefixes: torch.zeros(len(prefixes))), sv.Ancestral()],
    ids=str,
)
def test_samplers_that_do_not_read_their_start_check_it(sampler: Any) -> None:
    target = masked_sentences(controlled=False)
    for start, said in (
        (torch.zeros(2, 2, dtype=torch.int64), r"start has shape \(2, 2\)"),
        (torch.zeros(2, 3), "type torch.float32"),
        (torch.full((2, 3), 2), "start holds token 2 at chain 0, position 0, which is not allowed"),
        ("randon", "did you mean 'random'"),
    ):
        with pytest.raises(sv.SamplingError, match=said):
            sv.sample(target, sampler, chains=2, draws=1, start=start, progress=False)


class Counted:
    """Counts how often cells and spacings are computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cells = self.spacings = 0
        build_cells, measure = binding.cells_of, binding.spacing

        def cells_of(*arguments: Any) -> Any:
            self.cells += 1
            return build_cells(*arguments)

        def spacing(*arguments: Any) -> Any:
            self.spacings += 1
            return measure(*arguments)

        monkeypatch.setattr(binding, "cells_of", cells_of)
        monkeypatch.setattr(binding, "spacing", spacing)


def test_geometry_is_built_once_for_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for tuning, runs and direct calls of samplers; again only after the table or the mask has changed."""
    counted, target = Counted(monkeypatch), Pairs()
    for _ in range(2):
        sv.sample(target, sv.Cycle(sv.SVS(), sv.PNCG(1.0)), chains=2, draws=1, warmup=0, progress=False)
    rng = sv.Rng(0, 2)
    state = sv.SVS(0.5).init(target, rng, None)
    sv.SVS(0.5).step(target, rng, state)
    assert (counted.cells, counted.spacings) == (1, 1)
    target.embeddings[0] += 1
    sv.sample(target, sv.SVS(0.5), chains=2, draws=1, warmup=0, progress=False)
    assert (counted.cells, counted.spacings) == (2, 2)
    target.allowed = torch.arange(5) != 3  # type: ignore[attr-defined]
    draws = sv.sample(target, sv.SVS(0.5), chains=8, draws=9, warmup=0, progress=False)["posterior"]["tokens"].values
    assert 3 not in draws
    assert (counted.cells, counted.spacings) == (3, 3)


def test_texts_build_geometry_once_and_redraws_build_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from structured_voronoi.engine.plan import plan_texts
    from structured_voronoi.engine.text_chains import TextChains

    counted, model = Counted(monkeypatch), sv.load("bundled").target(max_tokens=4, suffix=" pub")
    list(TextChains(model, plan_texts(model, "svs+refresh", warmup=0), seed=0).draw(20))
    assert (counted.cells, counted.spacings) == (1, 1)
    other = sv.load("bundled").target(max_tokens=4)
    for name in ("refresh", "rejection", "ancestral"):
        list(TextChains(other, plan_texts(other, name), seed=0).draw(2))
    assert counted.cells == 1


def test_geometry_is_freed_with_its_target() -> None:
    target = Pairs()
    sv.sample(target, sv.SVS(0.5), chains=2, draws=1, warmup=0, progress=False)
    gc.collect()
    kept = len(binding.GEOMETRIES)
    del target
    gc.collect()
    assert len(binding.GEOMETRIES) == kept - 1


def test_a_problem_has_the_attributes_of_its_target() -> None:
    """A user's sampler may use any attribute of its target."""

    class Walk:
        def init(self, target: Any, rng: sv.Rng, start: Any) -> Any:
            return Chains  # any object with tokens will do

        def step(self, target: Any, rng: sv.Rng, state: Any) -> tuple[Any, sv.Info]:
            tokens = (rng.uniform(target.length) * len(target.log_probs)).long()
            return type("State", (), {"tokens": tokens}), blank_info(-target.log_prob(tokens))

    draws = sv.sample(Pairs(), Walk(), chains=3, draws=2, warmup=0, progress=False)
    assert draws["posterior"]["tokens"].shape == (3, 2, 2)
    with pytest.raises(AttributeError):
        bind(Pairs()).nothing_of_the_kind  # noqa: B018


def test_a_cycle_counts_the_evaluations_of_synchronisation() -> None:
    """After a redraw p-NCG evaluates the new tokens with a field; a redraw itself takes no field."""
    target = sv.verify.sentences(controlled=False)
    cycle = sv.Cycle(sv.PNCG(1e-9), sv.Refresh(block=1))  # p-NCG proposes nothing, redraws do
    rng = sv.Rng(0, 50)
    state = cycle.init(target, rng, None)
    state, first = cycle.step(target, rng, state)
    state, second = cycle.step(target, rng, state)
    assert (first.evaluations == 1).all()
    assert (first.gradients == 0).all()
    assert torch.equal(second.evaluations, 1 + (first.swaps > 0))
    assert torch.equal(second.gradients, (first.swaps > 0).long())


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        (sv.Ancestral(), "Ancestral cannot take part in a cycle"),
        (sv.Rejection(), "Rejection cannot"),
        (sv.baselines.Fudge(len), "Fudge cannot"),
        (object(), "object cannot"),
    ],
    ids=["ancestral", "rejection", "fudge", "nothing"],
)
def test_a_cycle_refuses_samplers_that_cannot_synchronise(sampler: Any, said: str) -> None:
    with pytest.raises(sv.SamplingError, match=said):
        sv.Cycle(sv.SVS(0.5), sampler)
    with pytest.raises(sv.SamplingError, match="a cycle of 1 samplers"):
        sv.Cycle(sv.SVS(0.5))


def test_cycles_are_values_and_nest() -> None:
    assert sv.Cycle(sv.SVS(0.5), sv.Refresh()) == sv.Cycle(sv.SVS(0.5), sv.Refresh())
    nested = sv.Cycle(sv.Cycle(sv.SVS(0.8), sv.PNCG(4.0)), sv.Refresh(block=2))
    target, broken = sv.verify.sentences(controlled=True), sv.verify.twins.PNCGWithoutReverse(4.0)
    found = sv.verify.stationarity(nested, target, CHAINS, STEPS, SEED)
    assert found.p_value >= LEVEL
    assert found.moved > 0.3
    twin = sv.Cycle(sv.Cycle(sv.SVS(0.8), broken), sv.verify.twins.RefreshWithoutRatio(block=2))
    assert sv.verify.stationarity(twin, target, CHAINS, STEPS, SEED).p_value < LEVEL


def test_the_memo_of_a_chain_is_bounded() -> None:
    """64 chains of 64 positions in 768 dimensions stay within 256 MiB, whatever `remember` asks for."""
    centre = torch.zeros(1, 64, 768)
    memo = empty_memo(4096, centre, 256 * 2**20 // 64)
    assert 8 <= memo.cell.shape[1] <= 4 * 2**20 / (64 * 768 * 4)
    assert empty_memo(4096, centre).cell.shape[1] == 4096
    assert sv.SVS(0.5, remember=10**6, memory=2**20).init(Pairs(), sv.Rng(0, 3), None).memo.cell.shape[1] < 1000


def test_devices_without_float64_use_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Apple GPUs: every tensor on the device is float32."""
    from structured_voronoi.core import streams
    from structured_voronoi.samplers import rejection

    for module in (streams, rejection):
        monkeypatch.setattr(module, "widest_dtype", lambda device: torch.float32)
    model = sv.load("bundled").target(max_tokens=4)
    target = model.under([sv.label("food", "Italian", weight=0.5)])
    samplers = (sv.Cycle(sv.SVS(0.4, dimensions=8), sv.PNCG(0.02), sv.Refresh()), sv.Rejection())
    for sampler in samplers:
        running = Chains(sampler, bind(target), sv.Rng(0, 3))
        state, info = next(running)
        assert info.energy.dtype == torch.float32
        assert not [part for part in flat(state) if part.dtype == torch.float64]


def flat(state: Any) -> list[Tensor]:
    """The tensors of a state and of its parts."""
    if isinstance(state, Tensor):
        return [state]
    return [part for inner in state for part in flat(inner)] if isinstance(state, tuple) else []


def test_a_mask_that_the_model_rarely_satisfies_is_an_error() -> None:
    target = masked_sentences(controlled=False)
    table = target.model.clone()
    table[2] += 60.0  # the excluded token is almost certain
    target = AutoregressiveTable(target.embeddings, table)
    target.allowed = torch.arange(5) != 2  # type: ignore[attr-defined]
    with pytest.raises(sv.SamplingError, match="tokens that are not allowed"):
        sv.sample(target, sv.Ancestral(max_refused=50), chains=2, draws=1, progress=False)


class LeavesPointBehind:
    """Broken twin of samplers with a point, which synchronisation does not move."""

    def synchronise(self, target: Any, rng: Any, state: Any, tokens: Tensor, energy: Tensor) -> Any:
        found = super().synchronise(target, rng, state, tokens, energy)  # type: ignore[misc]
        if hasattr(state, "point"):
            point = found.state.point._replace(x=state.point.x)
            return found._replace(state=found.state._replace(point=point))
        return found._replace(state=found.state._replace(x=state.x))


@dataclass(frozen=True)
class ClosedTwin(LeavesPointBehind, sv.SVS):
    pass


@dataclass(frozen=True)
class AcceptsEverything(sv.PNCG):
    def log_ratio(self, energy: Tensor, proposed_energy: Tensor, log_forward: Tensor, log_reverse: Tensor) -> Tensor:
        return torch.zeros_like(energy)


@pytest.mark.parametrize(
    "sampler",
    [
        sv.SVS(base="uniform", walls="closed"),
        sv.baselines.HMC(1.0, base="uniform"),
        sv.baselines.Langevin(1.0, None, metropolis=True, base="uniform"),
        sv.baselines.MuCoLa(1.0, None, metropolis=True),
    ],
    ids=["svs uniform", "hmc", "langevin", "mucola"],
)
def test_samplers_with_a_point_are_exact_in_cycles(sampler: Any) -> None:
    """On the toy all of them are exact; a cycle with a p-NCG that always accepts is not."""
    target = toy(0.5)
    found = sv.verify.stationarity(sv.Cycle(sampler, sv.PNCG(4.0)), target, CHAINS, STEPS, SEED)
    assert found.p_value >= LEVEL
    assert found.moved >= 0.3
    twin = sv.Cycle(sampler, AcceptsEverything(4.0))
    assert sv.verify.stationarity(twin, target, CHAINS, STEPS, SEED).p_value < LEVEL


def test_a_point_that_is_not_synchronised_is_detected() -> None:
    """Closed walls: the point must move to the cell of the new tokens."""
    right, twin = (kind(base="uniform", walls="closed", length=1.0) for kind in (sv.SVS, ClosedTwin))
    cycles = [sv.Cycle(sv.PNCG(8.0), sampler) for sampler in (right, twin)]
    assert sv.verify.stationarity(cycles[0], toy(1.0), CHAINS, STEPS, SEED).p_value >= LEVEL
    assert sv.verify.stationarity(cycles[1], toy(1.0), CHAINS, STEPS, SEED).p_value < LEVEL


def test_results_may_require_gradients() -> None:
    class Learnt:
        name = "learnt"
        factor = torch.nn.Parameter(torch.tensor(-0.5))

        def log_prob(self, tokens: Tensor, texts: list[str]) -> Tensor:
            return self.factor * torch.ones(len(texts))

    target = sv.load("bundled").target(max_tokens=3).under([Learnt()])
    for sampler in (sv.Refresh(), sv.Rejection(), sv.Cycle(sv.SVS(0.4, dimensions=8), sv.Refresh())):
        sv.sample(target, sampler, chains=2, draws=1, warmup=0, progress=False)


def test_redraws_refuse_results_of_the_wrong_shape() -> None:
    class Wrong(AutoregressiveTable):
        def log_prob(self, tokens: Tensor) -> Tensor:
            return super().log_prob(tokens)[:, None]

    class Narrow(AutoregressiveTable):
        def conditionals(self, tokens: Tensor, start: int) -> Tensor:
            return super().conditionals(tokens, start)[..., :-1]

    table = sv.verify.sentences(controlled=False)
    for kind, said in ((Wrong, "log_prob of Wrong"), (Narrow, "conditionals of Narrow")):
        for sampler in (sv.Rejection(), sv.Ancestral()):
            with pytest.raises(sv.SamplingError, match=said):
                sv.sample(kind(table.embeddings, table.model), sampler, chains=3, draws=1, progress=False)


def test_a_target_that_differs_from_its_conditionals_is_refused() -> None:
    target = sv.verify.sentences(controlled=True)
    target.normalised = True
    for sampler in (sv.Rejection(), sv.Ancestral()):
        with pytest.raises(sv.SamplingError, match="set `normalised = False`"):
            sv.sample(target, sampler, chains=20, draws=1, progress=False)


def test_states_that_the_conditionals_exclude_keep_finite_energies() -> None:
    """log_prob allows a token that the conditionals exclude: redraws keep it, and energies are finite."""
    table = sv.verify.sentences(controlled=False)

    class Partial(AutoregressiveTable):
        def conditionals(self, tokens: Tensor, start: int) -> Tensor:
            found = super().conditionals(tokens, start).clone()
            found[..., 0] = -torch.inf
            return found.log_softmax(-1)

    target = Partial(table.embeddings, table.model, table.gradient)
    start = torch.zeros(40, 3, dtype=torch.int64)
    draws = sv.sample(target, sv.Cycle(sv.SVS(0.8), sv.Refresh()), chains=40, draws=5, start=start, progress=False)
    assert torch.tensor(draws["sample_stats"]["lp"].values).isfinite().all()


def test_plans_report_whether_chains_start_at_the_truth() -> None:
    from structured_voronoi.engine.plan import plan_texts

    assert plan_texts(sv.load("bundled").target(max_tokens=2), "refresh").starts_at_truth
    assert not plan_texts(masked_sentences(controlled=False), "refresh").starts_at_truth
    assert not plan_texts(sv.verify.random_target(0), "svs").starts_at_truth


def test_targets_of_one_network_share_their_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, loaded = Counted(monkeypatch), sv.load("bundled").target(max_tokens=2)
    for prompt in ("", "Near the", "The"):
        model = sv.LanguageModel(loaded.network, loaded.tokenizer).target(prompt, max_tokens=2)
        sv.sample(model, sv.SVS(0.4, dimensions=8), chains=2, draws=1, warmup=0, progress=False)
    assert counted.cells == 1
    target = Pairs()
    for _ in range(3):
        target.embeddings += 1
        bind(target).cells()
    assert len(binding.GEOMETRIES[target.embeddings]) == 1


def test_absent_attributes_may_be_none_and_wrong_ones_are_refused() -> None:
    target = with_attribute("log_prob_and_grad", None)
    target.conditionals = target.allowed = target.box = None  # type: ignore[attr-defined]
    sv.sample(target, sv.SVS(0.5), chains=2, draws=1, warmup=0, progress=False)
    for name, value, said in (
        ("embeddings", [[0.0, 1.0]], "embeddings of Pairs"),
        ("length", 2.0, r"length of Pairs is 2\.0"),
        ("length", "2", "length of Pairs is '2'"),
        ("allowed", torch.zeros(5, dtype=torch.bool), "excludes every token"),
    ):
        with pytest.raises(sv.SamplingError, match=said):
            sv.sample(with_attribute(name, value), sv.PNCG(1.0), chains=2, draws=1, progress=False)


def test_evaluations_are_split_into_blocks_of_rows() -> None:
    class Counting(Pairs):
        most, memory, row_bytes = 0, 2**20, 2**15

        def log_prob(self, tokens: Tensor) -> Tensor:
            self.most = max(self.most, len(tokens))
            return super().log_prob(tokens)

    target = Counting()
    bind(target).evaluate(torch.zeros(1000, 2, dtype=torch.int64), "none")
    assert target.most == 32
