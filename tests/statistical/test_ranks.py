"""The rank test of Gandy and Scott (2020).

If a reversible chain passes through a draw from the truth at a random time, the rank of that draw among all states of
the chain is uniform. The test also detects errors that cancel within one step.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import structured_voronoi as sv
from structured_voronoi.core.contracts import Chains, Enumerable, Sampler
from structured_voronoi.core.streams import Rng
from structured_voronoi.verify.checks import MIN_P_VALUE
from structured_voronoi.verify.twins import ColdMomentum, GibbsWithoutReverse, PNCGWithoutReverse

LENGTH = 6


def rank_p_value(target: Enumerable, sampler: Sampler, chains: int, seed: int) -> float:
    """Chi-square p-value of the ranks of the energy, ties broken at random."""
    support, truth = target.support(), target.probabilities()
    rng = Rng(seed, chains)
    place = (rng.uniform() * LENGTH).long()  # time of the draw from the truth
    start = support[rng.categorical(truth.log().expand(chains, -1))]
    forward, backward = (_energies(target, sampler, Rng(seed, chains, way), start) for way in ("forward", "backward"))
    times = torch.arange(LENGTH)
    ahead = times - place[:, None]  # a reversible chain has the same law in both directions of time
    energies = torch.where(ahead >= 0, forward.gather(1, ahead.clamp(min=0)), backward.gather(1, (-ahead).clamp(min=0)))
    mine, noise = energies.gather(1, place[:, None]), rng.uniform(LENGTH)
    tie = (energies == mine) & (noise < noise.gather(1, place[:, None]))
    rank = ((energies < mine) | tie).sum(-1)
    return float(stats.chisquare(np.bincount(rank.numpy(), minlength=LENGTH)).pvalue)


def _energies(target: Enumerable, sampler: Sampler, rng: Rng, start: torch.Tensor) -> torch.Tensor:
    steps = islice(Chains(sampler, target, rng, start), LENGTH - 1)
    return torch.stack([-target.log_prob(start), *(info.energy for _, info in steps)], dim=-1)


@pytest.mark.parametrize(
    ("sampler", "twin", "field_sd", "chains"),
    [
        (sv.SVS(1.0), ColdMomentum(1.0), 0.2, 8000),
        (sv.SVS(0.5), ColdMomentum(0.5), 0.2, 20_000),
        (sv.PNCG(10.0), PNCGWithoutReverse(10.0), 2.0, 40_000),
        (sv.GibbsWithGradients(), GibbsWithoutReverse(), 2.0, 20_000),
    ],
    ids=["svs", "svs narrow", "pncg", "gwg"],
)
def test_ranks_are_uniform(sampler: Any, twin: Any, field_sd: float, chains: int) -> None:
    """Ranks of the twins are not uniform.

    The field is strong, because with a weak one ranks of the energy do not detect a missing reverse probability.
    """
    target = sv.verify.random_target(0, 6, 2, 3, field_sd)
    right, wrong = (rank_p_value(target, one, chains, seed=21) for one in (sampler, twin))
    assert right >= MIN_P_VALUE
    assert wrong < MIN_P_VALUE
