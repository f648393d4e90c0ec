"""Samplers with a trained, random or adverse lookahead leave the target invariant; broken twins do not.

The bundled model over six tokens and four positions; `svs reproduce truth` has eight tokens and more chains.
"""

from __future__ import annotations

from typing import Any

import pytest

import structured_voronoi as sv
from helpers import check_stationarity
from structured_voronoi.experiments.exactness.guided import GUIDED, GUIDED_TWINS
from structured_voronoi.experiments.exactness.truth import guided_on, tabulated
from structured_voronoi.verify.checks import MIN_MOVED, MIN_P_VALUE
from structured_voronoi.verify.twins import GuidedWithoutPresent, GuidedWithoutProposal, RefreshWithoutProposal

WORDS = (" cheap", " pub", " restaurant", " place", " and", " a")
CHAINS, STEPS, SEED = 4000, 3, 4
SOME = ("guided, trained", "guided, adverse", "refresh, adverse")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("control", "names", "twins"),
    [
        ("keyword", GUIDED, GUIDED_TWINS),
        ("regex", SOME, GUIDED_TWINS[-1:]),
        ("classifier", SOME, GUIDED_TWINS[:2]),
        ("black box", GUIDED, GUIDED_TWINS),
    ],
)
def test_samplers_are_exact_for_every_lookahead(control: str, names: tuple[str, ...], twins: tuple[str, ...]) -> None:
    target, known = tabulated(control, WORDS), guided_on(control, WORDS, SEED)
    for name in names:
        found = sv.verify.stationarity(known[name], target, CHAINS, STEPS, SEED)
        assert found.p_value >= MIN_P_VALUE, name
        assert abs(found.energy_z) <= 4, name
        assert found.moved >= MIN_MOVED, name
    for name in twins:
        assert sv.verify.stationarity(known[name], target, CHAINS, STEPS, SEED).p_value < MIN_P_VALUE, name


def cycles(lookahead: Any) -> dict[str, tuple[Any, Any]]:
    blocks, plain = sv.Refresh(block=1, suffix=False), sv.GibbsWithGradients()
    return {
        "guided": (
            sv.Cycle(sv.Guided(lookahead, tries=2), blocks),
            sv.Cycle(GuidedWithoutProposal(lookahead, tries=2), blocks),
        ),
        "choices": (
            sv.Cycle(sv.Guided(lookahead, tries=2, choices=3), blocks),
            sv.Cycle(GuidedWithoutPresent(lookahead, tries=2, choices=3), blocks),
        ),
        "refresh": (
            sv.Cycle(plain, sv.Refresh(2, lookahead=lookahead)),
            sv.Cycle(plain, RefreshWithoutProposal(2, lookahead=lookahead)),
        ),
    }


@pytest.mark.parametrize("name", ["guided", "choices", "refresh"])
def test_cycles_with_guided_moves_are_exact(name: str) -> None:
    """The other sampler moves the tokens, so the scores of the lookahead have to be updated."""
    target = tabulated("black box", WORDS)
    sampler, twin = cycles(guided_on("black box", WORDS, SEED)["guided, adverse"].lookahead)[name]
    check_stationarity(target, sampler, twin, chains=CHAINS, steps=STEPS, seed=SEED)
