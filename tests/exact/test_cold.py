"""COLD: soft readings of targets, its gradient, its texts and its errors."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import structured_voronoi as sv
from exact.test_language_models import FAMILIES, language_model, some_tokens
from structured_voronoi.controls.texts import with_weight
from structured_voronoi.core.contracts import Chains, SoftReading
from structured_voronoi.core.streams import Rng
from structured_voronoi.engine.plan import plan_texts
from structured_voronoi.engine.text_chains import TextChains, chain_status
from structured_voronoi.samplers.registry import find_sampler, text_sampler
from structured_voronoi.targets.tabular import AutoregressiveTable
from structured_voronoi.verify.checks import cases


@cache
def bundled(dtype: str = "float32", **settings: Any) -> sv.TextTarget:
    return sv.load("bundled", dtype=dtype).target(**{"max_tokens": 6, **settings})


def italian(weight: float = 2.0, **settings: Any) -> sv.ControlledTarget:
    return bundled(**settings).under([sv.label("food", "Italian", weight=weight)])


def certain(tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mixtures of two candidates whose second one has weight 1."""
    candidates = torch.stack([tokens.roll(1, 0), tokens], dim=-1)
    weights = torch.zeros(candidates.shape, dtype=dtype)
    weights[..., 1] = 1
    return weights, candidates


def tokens_of(target: Any, sampler: Any, chains: int, seed: int = 3) -> np.ndarray:
    tree = sv.sample(target, sampler, chains=chains, draws=2, seed=seed, progress=False)
    return np.asarray(tree["posterior"]["tokens"])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("suffix", ["", " by the river"])
def test_certain_mixtures_are_read_as_hard_texts(name: str, suffix: str) -> None:
    """Including untied models: mixtures of input embeddings, probabilities from output embeddings."""
    model = language_model(name, suffix=suffix, prompt="a small pub")
    check_certain(model, some_tokens(model))


def test_certain_mixtures_are_read_as_hard_texts_with_controls() -> None:
    target = italian(dtype="float64", suffix=" by the river")
    check_certain(target, some_tokens(target.text))
    table: Any = sv.verify.known_targets()["controlled"]
    check_certain(table, table.support()[:40])


def check_certain(target: Any, tokens: Tensor) -> None:
    reading = target.soft_reading(*certain(tokens, torch.float64))
    hard = target.conditionals(tokens, 0)
    assert torch.allclose(reading.log_probs, hard, atol=1e-9)
    soft_energy = -reading.log_probs.gather(-1, tokens[..., None]).sum((-2, -1)) - reading.log_rest
    assert torch.allclose(soft_energy, -target.log_prob(tokens).double(), atol=1e-9)


def mixtures(target: Any, rows: int = 3, count: int = 4) -> tuple[Tensor, Tensor]:
    """Random logits of a few distinct candidates at each position."""
    generator = torch.Generator().manual_seed(5)
    size = (rows, target.length, len(target.embeddings))
    candidates = torch.rand(size, generator=generator).argsort(-1)[..., :count]
    return torch.randn(candidates.shape, generator=generator, dtype=torch.float64), candidates


@pytest.mark.parametrize("kind", ["model", "table"])
def test_the_gradient_agrees_with_central_differences(kind: str) -> None:
    """The probabilities of the model are held constant, as in COLD."""
    target: Any = italian(dtype="float64", suffix=" in the city") if kind == "model" else cold_table()
    logits, candidates = mixtures(target)
    cold = sv.baselines.COLD(fluency=0.7)
    reading = target.soft_reading(logits.softmax(-1), candidates)
    expected = reading.log_probs.gather(-1, candidates).softmax(-1)

    def energy(logits: Tensor) -> Tensor:
        fluency = -(expected * logits.log_softmax(-1)).sum((-2, -1))
        return 0.7 * fluency - target.soft_reading(logits.softmax(-1), candidates).log_rest

    found = cold.gradient(logits.softmax(-1), expected, reading.slope)
    assert found.abs().max() > 0.01
    step = 1e-5
    for n, k in [(0, 0), (1, 3), (2, 1)]:
        moved = torch.zeros_like(logits)
        moved[:, n, k] = step
        slope = (energy(logits + moved) - energy(logits - moved)) / (2 * step)
        assert torch.allclose(found[:, n, k], slope, atol=1e-7, rtol=1e-4)


def cold_table() -> Any:
    return sv.verify.known_targets()["controlled"]


def test_texts_do_not_depend_on_the_number_of_chains() -> None:
    target = italian()
    assert (
        tokens_of(target, sv.baselines.COLD(iterations=4), 19)[:3]
        == tokens_of(target, sv.baselines.COLD(iterations=4), 3)
    ).all()


def test_texts_do_not_depend_on_the_memory_bound() -> None:
    table, narrow = cold_table(), cold_table()
    narrow.memory = 2000  # a block of 8 chains at a time
    assert (tokens_of(table, sv.baselines.COLD(), 30) == tokens_of(narrow, sv.baselines.COLD(), 30)).all()


def test_controls_steer_the_texts() -> None:
    """More than twice as many texts satisfy the control as of the model."""
    target = italian(4.0, max_tokens=20)
    (control,) = target.controls

    def success(target: Any, sampler: Any, chains: int) -> float:
        tree = sv.sample(target, sampler, chains=chains, draws=1, seed=1, progress=False)
        tokens = torch.tensor(tree["posterior"]["tokens"].values[:, 0])
        return float((control.log_prob(tokens, []).exp() > 0.5).float().mean())

    assert success(target.text, sv.Ancestral(), 200) < 0.15
    assert success(target, sv.baselines.COLD(), 32) > 0.35


def test_counts_and_energies_describe_the_texts() -> None:
    target = italian(suffix=" in the city")
    state, info = next(Chains(sv.baselines.COLD(iterations=5), target, Rng(2, 4)))
    assert torch.allclose(info.energy, -target.log_prob(state.tokens), atol=1e-3)
    assert info.evaluations.tolist() == [8] * 4
    assert info.gradients.tolist() == [5] * 4


class NotAllowed(AutoregressiveTable):
    """A target that does not mask its conditionals."""

    def __init__(self) -> None:
        table = cold_table()
        super().__init__(table.embeddings, table.model, scores=table.scores)
        self.allowed = torch.tensor([True, False, True, True, False])


class WithoutNumbers(AutoregressiveTable):
    """A target whose slope is NaN."""

    def __init__(self) -> None:
        table = cold_table()
        super().__init__(table.embeddings, table.model, scores=table.scores)

    def soft_reading(self, weights: Tensor, candidates: Tensor) -> SoftReading:
        return super().soft_reading(weights, candidates)._replace(slope=torch.full_like(weights, torch.nan))


def test_only_allowed_tokens_are_drawn() -> None:
    assert set(np.unique(tokens_of(NotAllowed(), sv.baselines.COLD(), 200))) == {0, 2, 3}


def test_a_nonfinite_slope_is_counted() -> None:
    state, info = next(Chains(sv.baselines.COLD(iterations=5), WithoutNumbers(), Rng(2, 9)))
    assert info.nonfinite.tolist() == [5] * 9
    assert ((state.tokens >= 0) & (state.tokens < 5)).all()


class Unreadable(AutoregressiveTable):
    soft_reading = None  # type: ignore[assignment]


class Broadcast(WithoutNumbers):
    def soft_reading(self, weights: Tensor, candidates: Tensor) -> SoftReading:
        return super().soft_reading(weights, candidates)._replace(slope=weights[:1])


def test_targets_without_a_soft_reading_are_refused() -> None:
    table = cold_table()
    with pytest.raises(sv.SamplingError, match=r"soft_reading.* Unreadable has none"):
        tokens_of(Unreadable(table.embeddings, table.model), sv.baselines.COLD(), 2)
    with pytest.raises(sv.SamplingError, match="COLD needs a target with `conditionals"):
        tokens_of(sv.PottsTarget(side=2), sv.baselines.COLD(), 2)
    with pytest.raises(sv.SamplingError, match=r"slope of soft_reading of Broadcast has shape \(1, 3, 1\)"):
        tokens_of(Broadcast(), sv.baselines.COLD(), 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"step_size": 0.0},
        {"noise": -1.0},
        {"final_noise": float("nan")},
        {"fluency": True},
        {"iterations": 0},
        {"candidates": 2.5},
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(sv.SamplingError) as caught:
        sv.baselines.COLD(**settings)
    assert [caught.value.argument] == list(settings)


class Wide:
    """A control whose gradient has a dimension too many."""

    name = "wide"

    def log_prob(self, tokens: Tensor, texts: list[str]) -> Tensor:
        return torch.zeros(len(tokens))

    def soft_log_prob_and_grad(self, embeds: Tensor) -> tuple[Tensor, Tensor]:
        return embeds.sum((1, 2)), torch.ones(*embeds.shape[:2], embeds.shape[2] + 1)


class Misspelt:
    name, log_prob, soft_logprob_and_grad = "misspelt", Wide.log_prob, Wide.soft_log_prob_and_grad


def test_controls_with_wrong_gradients_or_names_are_refused() -> None:
    with pytest.raises(sv.SamplingError, match=r"gradient of the control wide has shape \(8, 6, 129\)"):
        tokens_of(bundled().under([Wide()]), sv.baselines.COLD(), 2)
    with pytest.raises(sv.SamplingError, match="did you mean `soft_log_prob_and_grad`"):
        bundled().under([Misspelt()])


def test_it_is_declared_as_not_exact() -> None:
    assert not sv.baselines.COLD.exact
    assert not find_sampler("cold").exact
    assert [case.exact for case in cases() if case.sampler == "cold"] == [False]
    plan = plan_texts(italian(), "cold")
    assert plan.sampler == text_sampler("cold")
    assert not plan.is_exact
    status = chain_status(list(TextChains(italian(), plan, seed=0).draw(2)), plan, italian())
    assert "23 evaluations per text" in status


def test_controls_that_cannot_steer_it_are_named() -> None:
    pub, chips = sv.keyword("pub"), sv.keyword("chips")
    food = sv.label("food", "Italian")
    mixed = bundled().under([food, pub, with_weight(chips, 0.0)])
    reason = plan_texts(mixed, "cold").reason or ""
    assert "keyword=pub" in reason
    assert "chips" not in reason
    assert plan_texts(italian(), "cold").reason is None
