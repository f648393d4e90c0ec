"""Transition matrices of p-NCG, Gibbs with gradients, Refresh and Guided on small targets.

Matrices are built from the samplers' own proposals and ratios, and frequencies of single steps are compared with their
rows. This detects a wrong proposal, a wrong ratio, and a step that uses another ratio, as the broken twins show.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

import structured_voronoi as sv
from structured_voronoi.core.streams import Rng
from structured_voronoi.lookahead.lookahead import untrained
from structured_voronoi.lookahead.settings import LookaheadSettings
from structured_voronoi.problem.problem import bind
from structured_voronoi.samplers import refresh
from structured_voronoi.targets.tabular import AutoregressiveTable
from structured_voronoi.verify.twins import (
    GibbsWithoutReverse,
    GuidedWithoutPresent,
    GuidedWithoutProposal,
    PNCGWithoutReverse,
    RefreshBlindToControls,
    RefreshWithoutProposal,
    RefreshWithoutRatio,
)

SAMPLERS: dict[str, tuple[Any, Any]] = {
    "pncg norm 2": (sv.PNCG(step_size=3.0), PNCGWithoutReverse(step_size=3.0)),
    "pncg norm 1": (sv.PNCG(step_size=3.0, norm=1.0), PNCGWithoutReverse(step_size=3.0, norm=1.0)),
    "gibbs with gradients": (sv.GibbsWithGradients(), GibbsWithoutReverse()),
}
EVERY_SAMPLER = pytest.mark.parametrize(("sampler", "twin"), SAMPLERS.values(), ids=SAMPLERS.keys())
TARGET = sv.verify.random_target(8, tokens=4, length=2, dimensions=3, field_sd=1.0)
CHAINS = 50_000
"""Enough to tell the row of a twin from that of its sampler at p < 1e-9."""


def proposal_matrix(sampler: Any, target: sv.TabularTarget) -> Tensor:
    """q(m' | m) of every pair of states, from the sampler's log_proposal."""
    states, cells = target.support(), bind(target).cells()
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


def transition_matrix(sampler: Any, target: sv.TabularTarget) -> Tensor:
    """K: the sampler's proposals, accepted with probability min(1, its ratio)."""
    proposal, energy = proposal_matrix(sampler, target), -target.log_prob(target.support())
    here, there = ((proposal > 0).nonzero()).unbind(-1)
    log_q = proposal.log()
    ratio = sampler.log_ratio(energy[here], energy[there], log_q[here, there], log_q[there, here])
    moves = torch.zeros_like(proposal)
    moves[here, there] = proposal[here, there] * ratio.exp().clamp(max=1)
    moves.fill_diagonal_(0)
    return moves + torch.diag(1 - moves.sum(-1))


@EVERY_SAMPLER
def test_proposals_agree_with_the_published_formulas(sampler: Any, twin: Any) -> None:
    assert torch.allclose(proposal_matrix(sampler, TARGET), formula_matrix(sampler, TARGET), rtol=1e-10, atol=1e-15)


@EVERY_SAMPLER
@pytest.mark.parametrize("seed", range(3))
def test_the_truth_is_stationary(sampler: Any, twin: Any, seed: int) -> None:
    target = sv.verify.random_target(seed, tokens=4, length=2, field_sd=1.0)
    truth = target.probabilities()
    assert (truth @ transition_matrix(sampler, target) - truth).abs().max() < 1e-12
    assert (truth @ transition_matrix(twin, target) - truth).abs().max() > 1e-4


def row_p_value(matrix: Tensor, sampler: Any, state: int) -> float:
    """Chi-square test of one step from a state against the state's row of a matrix."""
    row = matrix[state]
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
def test_steps_follow_the_transition_matrix(sampler: Any, twin: Any, state: int) -> None:
    """The twin, which accepts differently, follows its own matrix only."""
    right, wrong = (transition_matrix(one, TARGET) for one in (sampler, twin))
    assert row_p_value(right, sampler, state) > 1e-4
    assert row_p_value(right, twin, state) < 1e-9
    assert row_p_value(wrong, twin, state) > 1e-4


def refresh_matrix(sampler: sv.Refresh, target: AutoregressiveTable, begin: int, end: int) -> Tensor:
    """K of a redraw of one block, with the sampler's ratio."""
    states = target.support()
    every = sampler.init(target, Rng(0, len(states)), states)
    step = target.conditionals(states, 0).gather(-1, states[..., None]).squeeze(-1)  # log p of each token
    matrix = torch.zeros(len(states), len(states), dtype=torch.float64)
    for i in range(len(states)):
        here = refresh.State(*(part[i : i + 1].expand_as(part) for part in every[:4]), 0)
        same = torch.ones(len(states), dtype=torch.bool)
        for n in [*range(begin), *range(end, target.length)]:
            same &= states[:, n] == states[i, n]
        drawn = step[:, begin:end].sum(-1).exp()  # given what stands before, which is the same
        matrix[i] = torch.where(same, drawn * sampler.log_ratio(here, every, end).exp().clamp(max=1), 0)
    matrix.fill_diagonal_(0)
    return matrix + torch.diag(1 - matrix.sum(-1))


@pytest.mark.parametrize("controlled", [False, True])
@pytest.mark.parametrize(("begin", "end"), [(0, 1), (1, 2), (0, 2), (1, 3), (0, 3)])
def test_the_truth_is_stationary_under_redraws(begin: int, end: int, controlled: bool) -> None:
    target = sv.verify.sentences(controlled)
    truth = target.probabilities()

    def apart(sampler: sv.Refresh) -> float:
        return float((truth @ refresh_matrix(sampler, target, begin, end) - truth).abs().max())

    assert apart(sv.Refresh()) < 1e-12
    if controlled or end < 3:  # a suffix of a plain model is always accepted
        assert apart(RefreshWithoutRatio()) > 1e-4
    if controlled:
        assert apart(RefreshBlindToControls()) > 1e-4


def listed_texts() -> AutoregressiveTable:
    """Three positions over two tokens with a control: eight texts."""
    random, other = (sv.verify.random_target(seed, 2, 3, 3) for seed in (5, 6))
    table = random.table - random.table.logsumexp((0, 1, 2))
    return AutoregressiveTable(random.embeddings, table, random.gradient, -2 * other.table.abs())


EIGHT = listed_texts()
RANDOM = untrained(bind(EIGHT), {"rest": "token"}, LookaheadSettings(delta=0.01), seed=2)
"""An untrained lookahead with random values."""


def choice_matrix(sampler: sv.Guided) -> Tensor:
    """K of a choice among the current text and fresh ones, with the sampler's weights."""
    every = RANDOM.score(bind(EIGHT), EIGHT.support())
    weight, q = sampler.log_weight(every).exp(), every.log_q.sum(-1).exp()
    assert abs(float(q.sum()) - 1) < 1e-12
    matrix = torch.zeros(8, 8, dtype=torch.float64)
    for here in range(8):
        for fresh in itertools.product(range(8), repeat=sampler.tries - 1):
            texts = torch.tensor([here, *fresh])
            matrix[here].index_add_(0, texts, q[list(fresh)].prod() * weight[texts] / weight[texts].sum())
    return matrix


def suffix_matrix(sampler: sv.Guided | sv.Refresh, start: int) -> Tensor:
    """K of a guided redraw of all positions from ``start`` on, with the sampler's weights."""
    states = EIGHT.support()
    every = RANDOM.score(bind(EIGHT), states)
    same = (states[:, None, :start] == states[None, :, :start]).all(-1)
    log_weight, drawn = sampler.log_weight(every), every.log_q[:, start:].sum(-1).exp()
    accepted = (log_weight[None] - log_weight[:, None]).exp().clamp(max=1)
    matrix = torch.where(same, drawn[None] * accepted, 0)
    matrix.fill_diagonal_(0)
    return matrix + torch.diag(1 - matrix.sum(-1))


@pytest.mark.parametrize("tries", [2, 3])
def test_the_truth_is_stationary_under_guided_choices(tries: int) -> None:
    truth = EIGHT.probabilities()
    assert (truth @ choice_matrix(sv.Guided(RANDOM, tries)) - truth).abs().max() < 1e-12
    assert (truth @ choice_matrix(GuidedWithoutProposal(RANDOM, tries)) - truth).abs().max() > 1e-4


@pytest.mark.parametrize("start", range(3))
def test_the_truth_is_stationary_under_guided_suffixes(start: int) -> None:
    truth = EIGHT.probabilities()
    pairs = [(sv.Guided(RANDOM), GuidedWithoutProposal(RANDOM))]
    pairs += [(sv.Refresh(lookahead=RANDOM), RefreshWithoutProposal(lookahead=RANDOM))]
    for sampler, twin in pairs:
        assert (truth @ suffix_matrix(sampler, start) - truth).abs().max() < 1e-12
        assert (truth @ suffix_matrix(twin, start) - truth).abs().max() > 1e-4


def guided_p_value(matrix: Tensor, sampler: Any, state: int, moves: int) -> float:
    """Chi-square test of one step from a text against the text's row of a matrix."""
    chains = 2 * CHAINS  # plain redraws are similar to guided ones
    start, rng = EIGHT.support()[state].expand(chains, -1).clone(), Rng(11, chains)
    after, _ = sampler.step(EIGHT, rng, sampler.init(EIGHT, rng, start)._replace(moves=moves))
    counts = torch.bincount((after.tokens * torch.tensor([4, 2, 1])).sum(-1), minlength=8)
    used = matrix[state] > 0
    assert counts[~used].sum() == 0
    return float(stats.chisquare(counts[used], chains * matrix[state][used]).pvalue)


@pytest.mark.parametrize(
    ("tries", "choices", "move", "begin"), [(2, 1, 0, 0), (2, 1, 3, 1), (3, 1, 2, 2), (2, 3, 3, 1)]
)
@pytest.mark.parametrize("state", [0, 6])
def test_guided_steps_follow_the_transition_matrix(state: int, tries: int, choices: int, move: int, begin: int) -> None:
    """A step is a suffix and ``choices`` choices."""
    assert int(Rng(11, [move], "guided suffixes").uniform()[0] * 3) == begin
    sampler = sv.Guided(RANDOM, tries, choices=choices)
    matrix = suffix_matrix(sampler, begin) @ torch.linalg.matrix_power(choice_matrix(sampler), choices)
    assert guided_p_value(matrix, sampler, state, move) > 1e-4
    for twin in (GuidedWithoutPresent, GuidedWithoutProposal):
        assert guided_p_value(matrix, twin(RANDOM, tries, choices=choices), state, move) < 1e-9


@pytest.mark.parametrize("state", [0, 3])
def test_guided_redraws_follow_the_transition_matrix(state: int) -> None:
    sampler = sv.Refresh(lookahead=RANDOM)
    blocks = [sampler._choose_block(Rng(11, 1), move, 3) for move in range(20)]
    move = blocks.index((1, 3))
    matrix = suffix_matrix(sampler, 1)
    assert guided_p_value(matrix, sampler, state, move) > 1e-4
    assert guided_p_value(matrix, RefreshWithoutProposal(lookahead=RANDOM), state, move) < 1e-9
    assert guided_p_value(matrix, sv.Refresh(), state, move) < 1e-9
