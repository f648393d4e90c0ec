"""Rejection and FUDGE on targets whose draws can be enumerated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import structured_voronoi as sv
from helpers import check_stationarity
from structured_voronoi.controls.texts import with_weight
from structured_voronoi.core.contracts import Chains
from structured_voronoi.core.streams import Rng
from structured_voronoi.metrics.divergence import pooled_chi_square
from structured_voronoi.problem.problem import bind
from structured_voronoi.targets.tabular import AutoregressiveTable
from structured_voronoi.verify.twins import RejectionOfNothing

CHAINS, SEED, LEVEL = 20_000, 7, 1e-4
IN_BULK = sv.Rejection(batch_size=4096)


def plain_table() -> AutoregressiveTable:
    """Three positions over four tokens, drawn from left to right."""
    random = sv.verify.random_target(1, 4, 3, 3, 0.2)
    return AutoregressiveTable(random.embeddings, random.table - random.table.logsumexp((0, 1, 2)))


def controlled_table(weight: float = 1.5, bound: float = 0.5) -> Any:
    """The same with a control whose highest score is its bound."""
    table = plain_table()
    scores = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    scores = weight * (scores - scores.max() + bound)
    target: Any = AutoregressiveTable(table.embeddings, table.table, scores=scores)
    target.log_bound = weight * bound
    return target


def counts(target: Any, tokens: Tensor) -> np.ndarray:
    """How often each state of a full table occurs."""
    size = len(target.embeddings)
    place = (tokens * size ** torch.arange(target.length - 1, -1, -1)).sum(-1)
    return torch.bincount(place, minlength=size**target.length).numpy()


def drawn(target: Any, sampler: Any, steps: int = 1) -> tuple[Tensor, Any]:
    *_, (state, info) = islice(Chains(sampler, target, Rng(SEED, CHAINS)), steps)
    return state.tokens, info


@dataclass(frozen=True)
class AnotherWeight(sv.Rejection):
    """Broken twin: the controls have 0.7 of their weight."""

    def log_chance(self, problem: Any, tokens: Tensor, log_rest: Tensor) -> Tensor:
        return 0.7 * super().log_chance(problem, tokens, log_rest)


@dataclass(frozen=True)
class WithoutBound(sv.Rejection):
    """Broken twin: scores above 0 are clipped instead of bounded."""

    def log_chance(self, problem: Any, tokens: Tensor, log_rest: Tensor) -> Tensor:
        return log_rest.clamp(max=0.0)


@pytest.mark.parametrize(
    ("bound", "twins"),
    [
        (0.5, [RejectionOfNothing(batch_size=4096), AnotherWeight(batch_size=4096)]),
        (1.5, [WithoutBound(batch_size=4096)]),
    ],
    ids=["weights", "a bound"],
)
def test_rejection_is_exact(bound: float, twins: list[Any]) -> None:
    target = controlled_table(bound=bound)
    check_stationarity(target, IN_BULK, *twins, chains=CHAINS, steps=2, seed=SEED, min_moved=0.5)


def test_acceptance_rate_is_the_mean_probability_of_acceptance() -> None:
    """Σ_m p_LM(m) a(m) is the acceptance rate, and p_LM(m) a(m) divided by it is the target."""
    target = controlled_table()
    states = target.support()
    model = plain_table().probabilities()
    chance = IN_BULK.log_chance(bind(target), states, target.log_prob(states) - model.log()).exp()
    assert chance.max() <= 1 + 1e-12
    accepted = model * chance
    torch.testing.assert_close(accepted / accepted.sum(), target.probabilities())
    assert IN_BULK.acceptance(target, SEED, 20_000) == pytest.approx(float(accepted.sum()), rel=0.02)
    tokens, info = drawn(target, IN_BULK)
    assert float(info.evaluations.double().mean()) == pytest.approx(1 / float(accepted.sum()), rel=0.03)
    torch.testing.assert_close(info.energy, -target.log_prob(tokens))


def test_draws_do_not_depend_on_other_chains_and_batch_size() -> None:
    target, settled = controlled_table(), []
    for batch_size, groups in (
        (64, [range(8)]),
        (64, [range(4), range(4, 8)]),
        (1, [range(8)]),
        (5, [[3, 0, 1, 2, *range(4, 8)]]),
    ):
        rows: dict[int, tuple[list[int], int]] = {}
        for group in groups:
            sampler, rng = sv.Rejection(batch_size=batch_size), Rng(SEED, list(group))
            state = sampler.init(target, rng, None)
            for _ in range(3):
                state, info = sampler.step(target, rng, state)
            for i, chain in enumerate(group):
                rows[chain] = (state.tokens[i].tolist(), int(info.evaluations[i]))
        settled.append([rows[chain] for chain in range(8)])
    assert settled[0] == settled[1] == settled[2] == settled[3]
    assert len({str(row) for row in settled[0]}) > 1


def test_successive_draws_of_a_chain_differ() -> None:
    first, second = (drawn(controlled_table(), IN_BULK, steps)[0] for steps in (1, 2))
    assert (first != second).any(-1).double().mean() > 0.5


def test_a_plain_model_accepts_every_try() -> None:
    target = plain_table()
    tokens, info = drawn(target, IN_BULK)
    assert (info.evaluations == 1).all()
    assert pooled_chi_square(counts(target, tokens), target.probabilities().numpy()) >= LEVEL


def test_rejection_gives_up_after_max_tries() -> None:
    target = controlled_table()
    target.log_bound = 40.0
    with pytest.raises(sv.SamplingError, match=r"none of 300 tries of chain 0 .*probability of acceptance was \d.*e-1"):
        sv.sample(target, sv.Rejection(max_tries=300), chains=2, draws=1, warmup=0, progress=False)


def test_infinite_or_exceeded_bounds_are_refused() -> None:
    target = controlled_table()
    target.log_bound = math.inf
    with pytest.raises(sv.SamplingError, match="log_bound is inf"):
        IN_BULK.init(target, Rng(0, 2), None)
    target.log_bound = 0.0
    with pytest.raises(sv.SamplingError, match="more than its `log_bound`"):
        drawn(target, IN_BULK)


def test_nonfinite_scores_are_rejected_and_counted() -> None:
    target = controlled_table()
    target.table = target.table.clone()
    target.table[0], target.table[1] = math.nan, -math.inf
    tokens, info = drawn(target, IN_BULK)
    assert (tokens[:, 0] >= 2).all()
    assert 0 < int(info.nonfinite.sum()) <= int((info.evaluations - 1).sum())


class Second:
    """A user's control: the score is high if the second token is the favourite."""

    name = "second"

    def __init__(self, bound: float, favourite: int) -> None:
        self.bound, self.favourite = bound, favourite

    def log_prob(self, tokens: Tensor, texts: list[str]) -> Tensor:
        return torch.where(tokens[:, 1] == self.favourite, 1.0, -1.0)


def language_model() -> sv.TextTarget:
    return sv.load("bundled").target("Near the", max_tokens=2, allowed=[300, 310, 320, 330])


def test_rejection_on_a_controlled_language_model() -> None:
    """Two positions and four tokens, so that all texts can be listed."""
    model = language_model()
    target = model.under([with_weight(Second(1.0, 310), 1.5)])
    states = torch.cartesian_prod(*[torch.tensor([300, 310, 320, 330])] * 2)
    truth = target.log_prob(states).double().softmax(0)
    rng, sampler = Rng(SEED, 2000), sv.Rejection(batch_size=2048)
    state, info = sampler.step(target, rng, sampler.init(target, rng, None))
    found = (state.tokens[:, None] == states).all(-1).sum(0)
    assert pooled_chi_square(found.numpy(), truth.numpy()) >= LEVEL
    torch.testing.assert_close(info.energy, -target.log_prob(state.tokens), atol=1e-4, rtol=1e-4)
    for bound, said in ((math.inf, "'second' has the bound inf.*declare"), (0.5, "'second' scored 1, above its bound")):
        broken = model.under([with_weight(Second(bound, 310), 1.5)])
        with pytest.raises(sv.SamplingError, match=said):
            sampler.step(broken, rng, sampler.init(broken, rng, None))


def prefix_scores(prefixes: Tensor) -> Tensor:
    """log p(label | prefix) from a random table."""
    numbers = torch.randn(3, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    places = torch.arange(prefixes.shape[1])
    return torch.nn.functional.logsigmoid(2 * numbers[places, prefixes].sum(-1))


def fudge_truth(target: AutoregressiveTable, weight: float, candidates: int) -> Tensor:
    """The probability of every path: the product of its normalised steps."""
    states = torch.cartesian_prod(*[torch.arange(4)] * 3)
    total = torch.zeros(len(states), dtype=torch.float64)
    for n in range(3):
        log_weight = target.conditionals(states, n)[:, 0].clone()
        for token in range(4):
            prefix = torch.cat([states[:, :n], torch.full((len(states), 1), token)], dim=-1)
            rank = (target.conditionals(states, n)[:, 0] > target.conditionals(states, n)[:, 0, token, None]).sum(-1)
            log_weight[:, token] += weight * prefix_scores(prefix)
            log_weight[rank >= candidates, token] = -math.inf
        total += log_weight.log_softmax(-1).gather(-1, states[:, n : n + 1]).squeeze(-1)
    return total.exp()


@pytest.mark.parametrize("candidates", [200, 3])
def test_fudge_draws_paths_with_their_probability(candidates: int) -> None:
    target = plain_table()
    truth = fudge_truth(target, 1.3, candidates)
    assert float(truth.sum()) == pytest.approx(1.0)
    tokens, info = drawn(target, sv.baselines.Fudge(prefix_scores, weight=1.3, candidates=candidates))
    found = counts(target, tokens)
    assert found[truth.numpy() == 0].sum() == 0
    assert pooled_chi_square(found[truth.numpy() > 0], truth[truth > 0].numpy()) >= LEVEL
    assert (info.events == 3 * min(candidates, 4)).all()
    unguided, _ = drawn(target, sv.baselines.Fudge(prefix_scores, weight=0.0, candidates=candidates))
    assert pooled_chi_square(counts(target, unguided), truth.numpy().clip(1e-12)) < 1e-10
    if candidates == 200:
        assert pooled_chi_square(counts(target, unguided), target.probabilities().numpy()) >= LEVEL


def test_fudge_ignores_nonfinite_predictions() -> None:
    tokens, info = drawn(plain_table(), sv.baselines.Fudge(lambda prefixes: torch.full((len(prefixes),), math.nan)))
    assert pooled_chi_square(counts(controlled_table(), tokens), plain_table().probabilities().numpy()) >= LEVEL
    assert (info.nonfinite == 12).all()


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"predictor": None}, "predictor"),
        ({"predictor": prefix_scores, "candidates": 0}, "candidates"),
        ({"predictor": prefix_scores, "weight": math.nan}, "weight"),
    ],
)
def test_wrong_settings_of_fudge_are_refused(settings: dict[str, Any], argument: str) -> None:
    with pytest.raises(sv.SamplingError) as caught:
        sv.baselines.Fudge(**settings)
    assert caught.value.argument == argument


def test_a_try_does_not_depend_on_its_place_in_the_batch() -> None:
    target = controlled_table()
    together = IN_BULK.tries(bind(target), Rng(SEED, [5, 2, 5]), torch.tensor([3, 0, 9]))
    alone = IN_BULK.tries(bind(target), Rng(SEED, [5]), torch.tensor([9]))
    assert torch.equal(together.tokens[2:], alone.tokens)
    assert torch.equal(together.accepted[2:], alone.accepted)


def test_texts_do_not_depend_on_the_batch_size() -> None:
    """Draws of a language model in batches of 8 and of 64, alone and with other chains, are the same."""
    model = sv.load("bundled").target(max_tokens=10)
    target = model.under([Second(1.0, 310)])
    found = []
    for batch_size, groups in ((64, [range(8)]), (8, [range(4), range(4, 8)]), (24, [range(8)])):
        rows = []
        for group in groups:
            rng, sampler = Rng(SEED, list(group)), sv.Rejection(batch_size=batch_size)
            state, info = sampler.step(target, rng, sampler.init(target, rng, None))
            rows.append(torch.cat([state.tokens, info.evaluations[:, None]], dim=-1))
        found.append(torch.cat(rows))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
