"""Texts that end, or may be cut: samplers leave their distribution invariant, and broken twins do not."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import structured_voronoi as sv
from endings import (
    STOPS,
    ControlledTexts,
    CutTextsHalved,
    EndForFree,
    EndlessAccepted,
    ListedTexts,
    PaddingCounted,
    listed,
)
from helpers import check_stationarity
from structured_voronoi.controls.predicate import Predicate
from structured_voronoi.verify.checks import MIN_MOVED, MIN_P_VALUE
from structured_voronoi.verify.engine import Adaptive
from structured_voronoi.verify.twins import GuidedWithoutProposal, OutwardOnly, RefreshWithoutRatio

CHAINS, FEWER, SEED = 20_000, 4000, 8
SVS, BLOCKS = sv.SVS(0.6), sv.Refresh(block=2, suffix=False)
MOVING: dict[str, tuple[Any, int]] = {
    "svs": (SVS, 6),
    "pncg": (sv.PNCG(8.0), 6),
    "gwg": (sv.GibbsWithGradients(), 6),
}
REDRAWING: dict[str, tuple[Any, int]] = {
    "refresh": (sv.Refresh(block=2), 6),
    "blocks alone": (BLOCKS, 8),
    "svs + refresh": (sv.Cycle(SVS, sv.Refresh(block=2)), 2),
    "rejection": (sv.Rejection(batch_size=4096), 1),
    "ancestral": (sv.Ancestral(), 1),
}


@pytest.mark.parametrize("stop", STOPS, ids=str)
@pytest.mark.parametrize("name", [*MOVING, *REDRAWING])
def test_samplers_keep_the_distribution_of_texts_that_end(name: str, stop: tuple[str | int, ...]) -> None:
    sampler, steps = (MOVING | REDRAWING)[name]
    found = sv.verify.stationarity(sampler, listed(stop), FEWER if stop else CHAINS, steps, SEED)
    assert found.p_value >= MIN_P_VALUE
    assert found.moved >= MIN_MOVED


@pytest.mark.parametrize("name", REDRAWING)
def test_texts_that_may_be_cut_keep_their_distribution(name: str) -> None:
    sampler, steps = REDRAWING[name]
    for kind, is_right in ((ListedTexts, True), (CutTextsHalved, False)):
        if is_right or name not in ("ancestral", "rejection"):  # one reads no weights, one finds the error itself
            found = sv.verify.stationarity(sampler, listed((), kind, "any"), FEWER, steps, SEED)
            assert (found.p_value >= MIN_P_VALUE) is is_right


def test_the_engine_draws_texts_that_may_be_cut() -> None:
    control = sv.regex("[ab].*[dc.]")
    for kind, is_right in ((ListedTexts, True), (CutTextsHalved, False)):
        target = ControlledTexts(listed(STOPS[1], kind, "any"), control)
        possible = _Possible(target, target.probabilities() > 0)
        found = sv.verify.stationarity(Adaptive(tolerance=0.0), possible, FEWER, 1, SEED)
        assert (found.p_value >= MIN_P_VALUE) is is_right


@cache
def lookahead(stop: tuple[str | int, ...]) -> sv.Lookahead:
    return sv.Lookahead.fit(listed(stop), texts=256, seed=1)


@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_texts_of_a_lookahead_end(stop: tuple[str | int, ...]) -> None:
    target = listed(stop)
    twin = GuidedWithoutProposal(lookahead(stop), tries=3)
    chains = FEWER if stop else CHAINS
    check_stationarity(target, sv.Guided(lookahead(stop), tries=3), twin, chains=chains, steps=2, seed=SEED)
    found = sv.verify.stationarity(sv.Refresh(2, lookahead=lookahead(stop)), target, chains, 4, SEED)
    assert found.p_value >= MIN_P_VALUE
    levels = sv.Rng(0, 2000).uniform(target.length)
    ended = target.is_complete(lookahead(stop).draw(sv.verify.stationary.bind(target), levels).tokens).double().mean()
    plain = target.listed[1].exp().sum()
    assert ended > (1 + 2 * plain) / 3, "texts of the lookahead end, though the model's often do not"


@pytest.mark.parametrize(
    ("twin", "name"),
    [
        (PaddingCounted, "blocks alone"),
        (PaddingCounted, "refresh"),
        (EndForFree, "svs"),
        (EndForFree, "pncg"),
        (EndForFree, "blocks alone"),
        (EndlessAccepted, "refresh"),
        (EndlessAccepted, "rejection"),
        (EndlessAccepted, "ancestral"),
    ],
)
def test_broken_targets_fail(twin: type[ListedTexts], name: str) -> None:
    sampler, steps = (MOVING | REDRAWING)[name]
    target = listed((), twin)
    assert sv.verify.stationarity(sampler, target, FEWER, steps, SEED).p_value < MIN_P_VALUE


def test_broken_samplers_fail() -> None:
    for twin, steps in ((OutwardOnly(0.6), 6), (RefreshWithoutRatio(block=2, suffix=False), 8)):
        assert sv.verify.stationarity(twin, listed(), FEWER, steps, SEED).p_value < MIN_P_VALUE


@pytest.mark.parametrize("name", [*MOVING, *REDRAWING])
def test_redraws_change_lengths_and_single_tokens_do_not(name: str) -> None:
    sampler, _ = (MOVING | REDRAWING)[name]
    target, rng = listed(STOPS[1]), sv.Rng(3, 2000)
    start = target.support()[rng.fork("truth").categorical(target.probabilities().log().expand(2000, -1))]
    state = sampler.init(target, rng, start)
    for _ in range(6):
        state, _ = sampler.step(target, rng, state)
    changed = (target.content_lengths(state.tokens) != target.content_lengths(start)).double().mean()
    assert changed >= MIN_MOVED if name in REDRAWING else changed == 0


CONTROLS = {
    "keyword": sv.regex("[ab].*[dc.]"),
    "whole": sv.regex("[^d]*[.ab]", full=True),
    "black box": Predicate(lambda text: 0.9 if "b" in text else 0.2, "bees"),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_controls_of_texts_that_end(control: str) -> None:
    """They read the text without padding, and a lookahead reads their pattern up to the end."""
    target = ControlledTexts(listed(STOPS[1]), CONTROLS[control])
    trained = sv.Lookahead.fit(target, texts=256, seed=1)
    assert set(trained.heads) == {CONTROLS[control].name, "the text ends"}
    possible = target.probabilities() > 0
    samplers = [(sv.Guided(trained, tries=3), 2), (sv.Refresh(2, lookahead=trained), 4)]
    samplers += [(sv.Rejection(batch_size=4096), 1)]
    for sampler, steps in [*samplers, (sv.Cycle(SVS, BLOCKS), 3)]:
        found = sv.verify.stationarity(sampler, _Possible(target, possible), 2000, steps, SEED)
        assert found.p_value >= MIN_P_VALUE, sampler
        assert found.moved >= MIN_MOVED, sampler
    broken = _Possible(target, possible)
    assert sv.verify.stationarity(GuidedWithoutProposal(trained, 3), broken, 2000, 2, SEED).p_value < MIN_P_VALUE


class _Possible:
    """A target that lists its possible states only."""

    def __init__(self, target: Any, possible: torch.Tensor) -> None:
        self._target, self._mask = target, possible

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def support(self) -> torch.Tensor:
        return self._target.support()[self._mask]

    def probabilities(self) -> torch.Tensor:
        return self._target.probabilities()[self._mask]
