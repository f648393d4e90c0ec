"""p-NCG and Gibbs-with-gradients on targets so small that their whole transition matrix can be written down."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

import structured_voronoi as sv
from helpers import random_target
from structured_voronoi.base import Rng
from structured_voronoi.samplers import gwg, pncg, proposals
from structured_voronoi.samplers.evaluation import cells_of_target

SAMPLERS: dict[str, Any] = {
    "pncg norm 2": sv.PNCG(step_size=3.0),
    "pncg norm 1": sv.PNCG(step_size=3.0, norm=1.0),
    "gibbs with gradients": sv.GibbsWithGradients(),
}
EVERY_SAMPLER = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
TARGET = random_target(8, tokens=4, length=2, dimensions=3, field_sd=1.0)
CHAINS = 200_000


def proposal_matrix(sampler: Any, target: sv.TabularTarget) -> Tensor:
    """q(m' | m) for every pair of states, from the sampler's own log_proposal."""
    states, cells = target.support(), cells_of_target(target)
    log_q = sampler.log_proposal(cells, cells.cell_of[states], target.log_prob_and_grad(states)[1])
    if isinstance(sampler, sv.PNCG):
        return sum(log_q[:, n, states[:, n]] for n in range(target.length)).exp()
    log_q = log_q.view(len(states), target.length, -1)
    matrix = torch.zeros(len(states), len(states), dtype=torch.float64)
    for n in range(target.length):
        only_n = ((states[:, None] != states).sum(-1) == 1) & (states[:, None, n] != states[:, n])
        matrix += torch.where(only_n, log_q[:, n, states[:, n]].exp(), 0)
    return matrix


def formula_matrix(sampler: Any, target: sv.TabularTarget) -> Tensor:
    """The same from the published formulas, one pair of states at a time."""
    states, v = target.support(), target.embeddings
    weight = torch.zeros(len(states), len(states), dtype=torch.float64)
    for i, here in enumerate(states):
        slope = target.gradient[tuple(here)]
        for j, there in enumerate(states):
            step = v[there] - v[here]
            if isinstance(sampler, sv.PNCG):
                length = (step.abs() ** sampler.norm).sum()
                weight[i, j] = ((slope * step).sum() / 2 - length / (2 * sampler.step_size)).exp()
            elif (here != there).sum() == 1:
                weight[i, j] = ((slope * step).sum() / 2).exp()
    return weight / weight.sum(-1, keepdim=True)


def transition_matrix(proposal: Tensor, truth: Tensor, reverse: bool = True) -> Tensor:
    """K, with acceptance min(1, p(m') q(m|m') / p(m) q(m'|m)); the twin leaves the proposals' ratio out."""
    ratio = truth / truth[:, None]
    if reverse:
        ratio = torch.where(proposal > 0, ratio * proposal.T / proposal, 0)
    moves = proposal * ratio.clamp(max=1)
    moves.fill_diagonal_(0)
    return moves + torch.diag(1 - moves.sum(-1))


@EVERY_SAMPLER
def test_the_proposal_is_the_published_one(sampler: Any) -> None:
    assert torch.allclose(proposal_matrix(sampler, TARGET), formula_matrix(sampler, TARGET), rtol=1e-10, atol=1e-15)


@EVERY_SAMPLER
@pytest.mark.parametrize("seed", range(3))
def test_the_truth_is_stationary(sampler: Any, seed: int) -> None:
    target = random_target(seed, tokens=4, length=2, field_sd=1.0)
    truth, proposal = target.probabilities(), proposal_matrix(sampler, target)
    assert (truth @ transition_matrix(proposal, truth) - truth).abs().max() < 1e-12
    assert (truth @ transition_matrix(proposal, truth, reverse=False) - truth).abs().max() > 1e-4


def row_p_value(sampler: Any, state: int) -> float:
    """Chi-square of where 200,000 chains go in one step from a state against the state's row of K."""
    truth = TARGET.probabilities()
    row = transition_matrix(proposal_matrix(sampler, TARGET), truth)[state]
    start = TARGET.support()[state].expand(CHAINS, -1).clone()
    rng = Rng(11, CHAINS)
    after, _ = sampler.step(TARGET, rng, sampler.init(TARGET, rng, start))
    counts = torch.bincount(after.tokens[:, 0] * 4 + after.tokens[:, 1], minlength=16).double()
    common = row * CHAINS > 5
    assert counts[row == 0].sum() == 0
    seen, expected = (torch.cat([part[common], part[~common].sum()[None]]) for part in (counts, row * CHAINS))
    used = expected > 0
    return float(stats.chisquare(seen[used], expected[used] * (seen.sum() / expected.sum())).pvalue)


@EVERY_SAMPLER
@pytest.mark.parametrize("state", [0, 9])
def test_a_step_follows_its_row_of_the_matrix(sampler: Any, state: int) -> None:
    assert row_p_value(sampler, state) > 1e-4


@EVERY_SAMPLER
def test_a_step_without_the_reverse_proposal_is_caught(sampler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_reverse(target: Any, guidance: Any, state: Any, proposed: Tensor, *rest: Any) -> Any:
        log_forward, _, level = rest
        return proposals.metropolis_hastings(
            target, guidance, state, proposed, log_forward, lambda cells, gradient: log_forward, level
        )

    for module in (pncg, gwg):
        monkeypatch.setattr(module, "metropolis_hastings", without_reverse)
    assert row_p_value(sampler, state=9) < 1e-9
