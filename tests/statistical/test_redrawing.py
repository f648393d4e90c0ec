"""Redraws are exact for an autoregressive target with an unnormalised table, alone and in cycles.

The same moves under controls are cases of `svs verify` (test_stationarity.py); texts are in test_text.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import structured_voronoi as sv
from helpers import check_stationarity
from structured_voronoi.targets.tabular import AutoregressiveTable
from structured_voronoi.verify.twins import GibbsWithoutReverse, PNCGWithoutReverse, RefreshWithoutRatio

SEED = 8
"""All chains redraw the same blocks, which the seed determines. With this seed the last block is not the whole text: a
full redraw would hide earlier errors."""
ONE = sv.Refresh(block=1, suffix=False)


def table() -> AutoregressiveTable:
    """Three positions over five tokens, with strong dependence to the right of any block."""
    random = sv.verify.random_target(1, 5, 3, 3, 0.2)
    return AutoregressiveTable(random.embeddings, 2 * random.table, random.gradient)


def steered_table() -> AutoregressiveTable:
    """Two positions over six tokens, and a field so strong that proposals there and back differ much."""
    random = sv.verify.random_target(0, 6, 2, 3, 1.0)
    return AutoregressiveTable(random.embeddings, random.table, random.gradient)


def test_conditionals_agree_with_the_table() -> None:
    target = table()
    states = target.support()
    steps = target.conditionals(states, 0).gather(-1, states[..., None]).squeeze(-1)
    torch.testing.assert_close(steps.sum(-1).exp(), target.probabilities())
    torch.testing.assert_close(target.conditionals(states, 2)[:, 0], target.conditionals(states, 0)[:, 2])


@pytest.mark.parametrize("settings", [{"block": 2}, {"block": 1, "suffix": False}], ids=str)
def test_refresh_is_exact(settings: dict[str, Any]) -> None:
    """The twin accepts every redraw."""
    right, wrong = sv.Refresh(**settings), RefreshWithoutRatio(**settings)
    check_stationarity(table(), right, wrong, chains=20_000, steps=8, seed=SEED)


@pytest.mark.parametrize(
    ("sampler", "twin"),
    [(sv.PNCG(4.0), PNCGWithoutReverse(4.0)), (sv.GibbsWithGradients(), GibbsWithoutReverse())],
    ids=["pncg", "gwg"],
)
def test_cycles_with_refresh_are_exact(sampler: Any, twin: Any) -> None:
    """Refresh does not hide a sampler that omits the reverse proposal."""
    twins = [sv.Cycle(twin, ONE), sv.Cycle(sampler, RefreshWithoutRatio(block=1, suffix=False))]
    check_stationarity(steered_table(), sv.Cycle(sampler, ONE), *twins, chains=20_000, steps=12, seed=SEED)
