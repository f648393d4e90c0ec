"""p-NCG, Gibbs-with-gradients and Refresh on targets so small that their transition matrix can be written down."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

import structured_voronoi as sv
from helpers import random_target
from structured_voronoi.base import Rng
from structured_voronoi.experiments.verify import sentences
from structured_voronoi.samplers import gwg, pncg, proposals, refresh
from structured_voronoi.samplers.evaluation import cells_of_target
from structured_voronoi.targets.tabular import AutoregressiveTable

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


def refresh_matrix(target: AutoregressiveTable, begin: int, end: int, ratio: Any) -> Tensor:
    """K of a redraw of one block: every state, every block that could be drawn, and the sampler's own ratio."""
    states = target.support()
    every = sv.Refresh().init(target, Rng(0, len(states)), states)
    step = target.conditionals(states, 0).gather(-1, states[..., None]).squeeze(-1)  # log p of each token
    matrix = torch.zeros(len(states), len(states), dtype=torch.float64)
    for i in range(len(states)):
        here = refresh.State(*(part[i : i + 1].expand_as(part) for part in every[:3]), 0)
        same = torch.ones(len(states), dtype=torch.bool)
        for n in [*range(begin), *range(end, target.length)]:
            same &= states[:, n] == states[i, n]
        drawn = step[:, begin:end].sum(-1).exp()  # given what stands before, which is the same
        matrix[i] = torch.where(same, drawn * ratio(here, every, end).exp().clamp(max=1), 0)
    matrix.fill_diagonal_(0)
    return matrix + torch.diag(1 - matrix.sum(-1))


@pytest.mark.parametrize("controlled", [False, True])
@pytest.mark.parametrize(("begin", "end"), [(0, 1), (1, 2), (0, 2), (1, 3), (0, 3)])
def test_the_truth_is_stationary_under_redraws(begin: int, end: int, controlled: bool) -> None:
    target = sentences(controlled)
    truth = target.probabilities()
    apart = truth @ refresh_matrix(target, begin, end, refresh.log_ratio) - truth
    assert apart.abs().max() < 1e-12
    if controlled or end < 3:  # a suffix of a plain model is always accepted
        blind = refresh_matrix(target, begin, end, lambda here, there, stop: torch.zeros(len(there.tokens)))
        assert (truth @ blind - truth).abs().max() > 1e-4
