"""Ancestral sampling, refresh moves and cycles keep the distribution of an autoregressive target."""

from __future__ import annotations

import pytest
import torch

from structured_voronoi.base import Sampler
from structured_voronoi.experiments.checks import random_target, stationarity
from structured_voronoi.experiments.verify import LEVEL
from structured_voronoi.samplers import refresh
from structured_voronoi.samplers.ancestral import Ancestral
from structured_voronoi.samplers.cycle import Cycle
from structured_voronoi.samplers.refresh import Refresh
from structured_voronoi.samplers.svs import SVS
from structured_voronoi.targets.tabular import AutoregressiveTable

CHAINS, STEPS, SEED = 20_000, 8, 5


def table() -> AutoregressiveTable:
    """Three positions over five tokens, with strong dependence to the right of any block."""
    random = random_target(1, 5, 3, 3, 0.2)
    return AutoregressiveTable(random.embeddings, 2 * random.table, random.gradient)


def test_conditionals_multiply_to_the_table() -> None:
    target = table()
    states = target.support()
    steps = target.conditionals(states, 0).gather(-1, states[..., None]).squeeze(-1)
    torch.testing.assert_close(steps.sum(-1).exp(), target.probabilities())
    torch.testing.assert_close(target.conditionals(states, 2)[:, 0], target.conditionals(states, 0)[:, 2])


@pytest.mark.parametrize(
    "sampler",
    [Ancestral(), Refresh(block=2), Refresh(block=1, suffix=False), Cycle(SVS(0.8), Refresh(block=2, suffix=False))],
    ids=str,
)
def test_redrawing_is_exact(sampler: Sampler) -> None:
    found = stationarity(table(), sampler, CHAINS, STEPS, SEED)
    assert found.moved >= 0.3
    assert found.fit.p_value >= LEVEL


def test_refresh_that_forgets_what_stands_on_the_right_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the ratio of the text after the block every redraw is accepted."""
    right = refresh.redraw

    def forgetful(target, tokens, start, stop, levels):  # type: ignore[no-untyped-def]
        found, before = right(target, tokens, start, stop, levels), refresh.token_log_probs(target, tokens)[:, start:]
        return found._replace(log_probs=torch.cat([found.log_probs[:, :1], before[:, 1:]], dim=-1))

    monkeypatch.setattr(refresh, "redraw", forgetful)
    assert stationarity(table(), Refresh(block=1, suffix=False), CHAINS, STEPS, SEED).fit.p_value < 1e-10
