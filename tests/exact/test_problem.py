"""What a user's target may do, and what binding makes of it: abilities, masks, fields without numbers, geometry."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import structured_voronoi as sv
from structured_voronoi.contracts import Chains, blank_info
from structured_voronoi.geometry.memo import empty_memo
from structured_voronoi.problem import problem as binding
from structured_voronoi.problem.problem import bind
from structured_voronoi.targets.tabular import AutoregressiveTable

CHAINS, STEPS, SEED, LEVEL = 8000, 6, 3, 1e-4


class Pairs:
    """Two tokens of five, as a user would write it."""

    length = 2

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embeddings = torch.randn(5, 2, generator=generator)
        self.log_probs = torch.randn(5, 5, generator=generator)  # almost the name of a method, and nobody's business

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
def test_misspelt_abilities_are_refused(name: str, value: object, meant: str) -> None:
    with pytest.raises(sv.SamplingError, match=rf"Pairs has `{name}`; did you mean `{meant}`\? Rename it"):
        sv.sample(with_attribute(name, value), sv.SVS(0.5), chains=2, draws=1, progress=False)


@pytest.mark.parametrize(
    ("name", "value"), [("guided", True), ("boxes", 3), ("allow", 1), ("_log_prob_and_grd", len), ("redrawn", [])]
)
def test_other_attributes_are_the_users_own(name: str, value: object) -> None:
    sv.sample(with_attribute(name, value), sv.SVS(0.5), chains=2, draws=1, warmup=0, progress=False)


def test_a_module_can_be_a_target() -> None:
    class Network(torch.nn.Module, Pairs):
        def __init__(self) -> None:
            super().__init__()
            Pairs.__init__(self)

    sv.sample(Network(), sv.SVS(0.5), chains=2, draws=1, warmup=0, progress=False)


def test_misspelt_abilities_of_controls_are_refused() -> None:
    class Bounded:
        name, bounds = "bounded", 1.0

        def log_prob(self, tokens: Tensor, texts: list[str]) -> Tensor:
            return torch.ones(len(tokens))

    model = sv.LanguageModel.load("bundled", length=2)
    with pytest.raises(sv.SamplingError, match="control Bounded has `bounds`; did you mean `bound`"):
        sv.Controlled(model, {Bounded(): 1.0})
    with pytest.raises(sv.SamplingError, match=r"is not a control: it needs a `name`.*sv\.controls\.Predicate"):
        sv.Controlled(model, {len: 1.0})


def test_what_is_no_target_is_refused() -> None:
    with pytest.raises(sv.SamplingError, match="dict is not a target: it has no `embeddings`"):
        sv.sample({}, sv.SVS(0.5), progress=False)
    for mask in (torch.ones(4, dtype=torch.bool), torch.ones(5), [True] * 5):
        with pytest.raises(sv.SamplingError, match=r"`allowed` has .*it must be a bool tensor of shape"):
            sv.sample(with_attribute("allowed", mask), sv.SVS(0.5), progress=False)


class NaNField(AutoregressiveTable):
    """A table whose steering field has no number at its most probable state."""

    only_while_steering = False
    """The broken twin: the state counts as impossible for proposals that are steered, but one may be there."""
    _asked = 0

    def log_prob_and_grad(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        log_prob, field = super().log_prob_and_grad(tokens)
        broken = (tokens == torch.tensor(self.best)).all(-1)
        self._asked += 1
        if self.only_while_steering and self._asked > 1:  # the first evaluation is that of the start
            log_prob = torch.where(broken, -torch.inf, log_prob)
        return log_prob, torch.where(broken[:, None, None], torch.nan, field)

    @property
    def best(self) -> list[int]:
        states = self.support()
        return states[self.log_prob(states).argmax()].tolist()


def test_a_field_without_a_number_steers_nowhere_and_changes_nothing() -> None:
    """The twin counts such a state as impossible: SVS then leaves it and never comes back."""
    plain = sv.verify.sentences(controlled=True)
    target = NaNField(plain.embeddings, plain.model, plain.gradient, plain.table - plain.model)
    cycle = sv.Cycle(sv.Refresh(block=1, suffix=False), sv.SVS(0.8))
    found = sv.verify.stationarity(cycle, target, CHAINS, STEPS, SEED)
    assert found.moved >= 0.3
    assert found.p_value >= LEVEL
    target.only_while_steering, target._asked = True, 0
    assert sv.verify.stationarity(cycle, target, CHAINS, STEPS, SEED).p_value < LEVEL


def masked_sentences(controlled: bool) -> Any:
    """Sentences without one common token, by a mask that the table's own conditionals know nothing of."""
    target: Any = sv.verify.sentences(controlled)
    target.allowed = torch.arange(5) != 2
    return target


@pytest.mark.parametrize(
    ("sampler", "controlled", "steps"),
    [
        (sv.Ancestral(), False, 1),
        (sv.Rejection(wave=4096), False, 1),
        (sv.Rejection(wave=4096), True, 1),
        (sv.Refresh(block=2), False, STEPS),
        (sv.Refresh(block=2), True, STEPS),
        (sv.Cycle(sv.SVS(0.8), sv.Refresh(block=2)), True, STEPS),
    ],
    ids=str,
)
def test_masks_that_a_target_leaves_to_us_are_exact(sampler: Any, controlled: bool, steps: int) -> None:
    """The truth is p restricted to the allowed tokens; the twin takes the conditionals for masked ones."""
    target = masked_sentences(controlled)
    found = sv.verify.stationarity(sampler, target, CHAINS, steps, SEED)
    assert found.moved >= 0.3
    assert found.p_value >= LEVEL
    target.masks_itself = True
    if isinstance(sampler, sv.Cycle):  # SVS refuses to go on from a token that is not allowed
        return
    assert sv.verify.stationarity(sampler, target, CHAINS, steps, SEED).p_value < LEVEL


def test_fudge_draws_allowed_tokens_only() -> None:
    target = masked_sentences(controlled=False)
    fudge = sv.Fudge(lambda prefixes: torch.zeros(len(prefixes)))
    draws = sv.sample(target, fudge, chains=500, draws=1, progress=False)["posterior"]["tokens"].values
    assert 2 not in draws
    target.masks_itself = True
    assert 2 in sv.sample(target, fudge, chains=500, draws=1, progress=False)["posterior"]["tokens"].values


@pytest.mark.parametrize(
    "sampler", [sv.Rejection(), sv.Fudge(lambda prefixes: torch.zeros(len(prefixes))), sv.Ancestral()], ids=str
)
def test_samplers_that_forget_their_start_check_it_all_the_same(sampler: Any) -> None:
    target = masked_sentences(controlled=False)
    for start, said in (
        (torch.zeros(2, 2, dtype=torch.int64), r"start has shape \(2, 2\)"),
        (torch.zeros(2, 3), "it must be int64"),
        (torch.full((2, 3), 2), "start holds token 2 at chain 0, position 0, which is not allowed"),
        ("randon", "did you mean 'random'"),
    ):
        with pytest.raises(sv.SamplingError, match=said):
            sv.sample(target, sampler, chains=2, draws=1, start=start, progress=False)


class Counted:
    """How often geometry is built."""

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
    """By tuning, by runs, by samplers called directly; again only if the table or the mask has changed."""
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


def test_texts_build_their_geometry_once_and_redraws_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from structured_voronoi.run.presets import plan_texts
    from structured_voronoi.run.texts import draw_texts

    counted, model = Counted(monkeypatch), sv.LanguageModel.load("bundled", length=4, suffix=" pub")
    plan = plan_texts(model, "auto", warmup=0, seed=0)
    list(draw_texts(model, plan, count=20, seed=0))
    assert plan.reason is not None
    assert (counted.cells, counted.spacings) == (1, 1)
    other = sv.LanguageModel.load("bundled", length=4)
    for name in ("refresh", "rejection", "ancestral"):
        list(draw_texts(other, plan_texts(other, name), count=2, seed=0))
    assert counted.cells == 1


def test_geometry_goes_with_its_target() -> None:
    target = Pairs()
    sv.sample(target, sv.SVS(0.5), chains=2, draws=1, warmup=0, progress=False)
    gc.collect()
    kept = len(binding._KEPT)
    del target
    gc.collect()
    assert len(binding._KEPT) == kept - 1


def test_a_problem_has_what_its_target_has() -> None:
    """A sampler of one's own may ask its target for anything."""

    class Walk:
        def init(self, target: Any, rng: sv.Rng, start: Any) -> Any:
            return Chains  # any object will do that has tokens

        def step(self, target: Any, rng: sv.Rng, state: Any) -> tuple[Any, sv.Info]:
            tokens = (rng.uniform(target.length) * len(target.log_probs)).long()
            return type("State", (), {"tokens": tokens}), blank_info(-target.log_prob(tokens))

    draws = sv.sample(Pairs(), Walk(), chains=3, draws=2, warmup=0, progress=False)
    assert draws["posterior"]["tokens"].shape == (3, 2, 2)
    with pytest.raises(AttributeError):
        bind(Pairs()).nothing_of_the_kind  # noqa: B018


def test_a_cycle_counts_the_evaluations_and_fields_that_it_asks_for() -> None:
    """Redraws move the tokens, so that p-NCG must evaluate where it is, with a field; a redraw takes none."""
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
        (sv.Fudge(len), "Fudge cannot"),
        (object(), "object cannot"),
    ],
    ids=["ancestral", "rejection", "fudge", "nothing"],
)
def test_a_cycle_refuses_who_cannot_take_part(sampler: Any, said: str) -> None:
    with pytest.raises(sv.SamplingError, match=said):
        sv.Cycle(sv.SVS(0.5), sampler)
    with pytest.raises(sv.SamplingError, match="a cycle of 1 samplers"):
        sv.Cycle(sv.SVS(0.5))


def test_cycles_are_values_and_nest() -> None:
    assert sv.Cycle(sv.SVS(0.5), sv.Refresh()) == sv.Cycle(sv.SVS(0.5), sv.Refresh())
    nested = sv.Cycle(sv.Cycle(sv.SVS(0.8), sv.PNCG(4.0)), sv.Refresh(block=2))
    found = sv.verify.stationarity(nested, sv.verify.sentences(controlled=True), 5000, 4, SEED)
    assert found.p_value >= LEVEL
    assert found.moved > 0.3


def test_what_a_chain_remembers_is_bounded() -> None:
    """64 chains of 64 positions in 768 dimensions stay within 256 MiB, whatever `remember` asks for."""
    centre = torch.zeros(1, 64, 768)
    memo = empty_memo(4096, centre, 256 * 2**20 // 64)
    assert 8 <= memo.cell.shape[1] <= 4 * 2**20 / (64 * 768 * 4)
    assert empty_memo(4096, centre).cell.shape[1] == 4096
    assert sv.SVS(0.5, remember=10**6, memory=2**20).init(Pairs(), sv.Rng(0, 3), None).memo.cell.shape[1] < 1000


def test_devices_without_float64_get_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Apple's: everything that stays on the device is float32 then."""
    from structured_voronoi import streams
    from structured_voronoi.samplers import rejection

    for module in (streams, rejection):
        monkeypatch.setattr(module, "widest_dtype", lambda device: torch.float32)
    model = sv.LanguageModel.load("bundled", length=4)
    target = sv.Controlled(model, {sv.controls.Classifier.load("food", "Italian"): 0.5})
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


def test_a_mask_that_the_model_hardly_ever_meets_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from structured_voronoi.samplers import ancestral

    monkeypatch.setattr(ancestral, "MASKED_TRIES", 50)
    target = masked_sentences(controlled=False)
    table = target.model.clone()
    table[2] += 60.0  # what is not allowed is almost certain
    target = AutoregressiveTable(target.embeddings, table)
    target.allowed = torch.arange(5) != 2  # type: ignore[attr-defined]
    with pytest.raises(sv.SamplingError, match=r"50 texts of one chain in turn were refused.*allow more of them"):
        sv.sample(target, sv.Ancestral(), chains=2, draws=1, progress=False)
