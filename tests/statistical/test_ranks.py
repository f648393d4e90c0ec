"""The rank test of Gandy and Scott (2020): in a reversible chain that passes through a draw from the truth at a random
time, the rank of that draw among all states of the chain is uniform. It also sees errors that cancel in one step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from helpers import forget_the_reverse
from structured_voronoi.base import Enumerable, Rng, Sampler
from structured_voronoi.experiments.checks import random_target
from structured_voronoi.experiments.twins import ColdMomentum
from structured_voronoi.samplers.gwg import GibbsWithGradients
from structured_voronoi.samplers.pncg import PNCG
from structured_voronoi.samplers.svs import SVS

LENGTH, CHAINS = 6, 20_000


def rank_p_value(target: Enumerable, sampler: Sampler, seed: int) -> float:
    """Chi-square p-value of the ranks of the energy, ties broken at random."""
    support, truth = target.support(), target.probabilities()
    rng = Rng(seed, CHAINS)
    place = (rng.uniform() * LENGTH).long()  # where in the chain the draw from the truth stands
    start = support[rng.categorical(truth.log().expand(CHAINS, -1))]
    forward, backward = (_energies(target, sampler, Rng(seed, CHAINS, way), start) for way in ("forward", "backward"))
    times = torch.arange(LENGTH)
    ahead = times - place[:, None]  # a reversible chain looks the same in both directions of time
    energies = torch.where(ahead >= 0, forward.gather(1, ahead.clamp(min=0)), backward.gather(1, (-ahead).clamp(min=0)))
    mine, noise = energies.gather(1, place[:, None]), rng.uniform(LENGTH)
    tie = (energies == mine) & (noise < noise.gather(1, place[:, None]))
    rank = ((energies < mine) | tie).sum(-1)
    return float(stats.chisquare(np.bincount(rank.numpy(), minlength=LENGTH)).pvalue)


def _energies(target: Enumerable, sampler: Sampler, rng: Rng, start: torch.Tensor) -> torch.Tensor:
    state = sampler.init(target, rng, start)
    energies = [-target.log_prob(start)]
    for _ in range(LENGTH - 1):
        state, info = sampler.step(target, rng, state)
        energies.append(info.energy)
    return torch.stack(energies, dim=-1)


@pytest.mark.parametrize(
    ("sampler", "field_sd"),
    [
        (SVS(1.0), 0.2),
        (SVS(0.5), 0.2),
        (PNCG(4.0), 0.2),
        (PNCG(10.0), 2.0),
        (GibbsWithGradients(), 0.2),
        (GibbsWithGradients(), 2.0),
    ],
    ids=str,
)
def test_ranks_are_uniform(sampler: Sampler, field_sd: float) -> None:
    assert rank_p_value(random_target(0, 6, 2, 3, field_sd), sampler, seed=21) >= 1e-4


def test_momentum_as_printed_is_seen() -> None:
    assert rank_p_value(random_target(0, 6, 2, 3, 0.2), ColdMomentum(1.0), seed=21) < 1e-10


@pytest.mark.parametrize("sampler", [PNCG(10.0), GibbsWithGradients()], ids=str)
def test_proposals_without_their_reverse_are_seen(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_the_reverse(monkeypatch)
    assert rank_p_value(random_target(0, 6, 2, 3, 2.0), sampler, seed=21) < 1e-4
