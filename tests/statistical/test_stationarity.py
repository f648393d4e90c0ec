"""Chains that start at the truth stay there; broken twins show that each check has power.

A twin runs at the settings of its sampler: same target, scale or step size, chains, steps and seed. With N chains the
chi-square statistic grows by N · Σ (p' - p)²/p; N is large enough for twins to fail far below p = 1e-4 with other seeds
as well. An exact sampler fails with probability 1e-4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import structured_voronoi as sv
from helpers import check_stationarity
from structured_voronoi.core.streams import Rng
from structured_voronoi.samplers.ancestral import Ancestral, State
from structured_voronoi.targets.categorical import hypercube, toy
from structured_voronoi.verify.checks import MIN_MOVED, MIN_P_VALUE, Case, Verdict, cases
from structured_voronoi.verify.engine import Adaptive
from structured_voronoi.verify.twins import (
    ColdMomentum,
    DividedBySquare,
    GibbsWithoutReverse,
    OutwardOnly,
    PNCGWithoutReverse,
    RefreshBlindToControls,
    RefreshWithoutRatio,
    RejectionOfNothing,
    RoundsWithoutWeights,
)

STEPS, SEED = 12, 11
BLOCKS: dict[str, Any] = {"block": 2, "suffix": False}


@dataclass(frozen=True)
class AncestralWithoutContext(Ancestral):
    """Broken twin: every token is drawn as if all tokens before it were the first of the vocabulary."""

    def step(self, target: Any, rng: Rng, state: State) -> tuple[State, sv.Info]:
        state, info = super().step(target, rng, state)
        return State(rng.categorical(target.conditionals(torch.zeros_like(state.tokens), 0))), info


EXACT: dict[str, tuple[int, list[Any]]] = {
    "svs open": (5000, [OutwardOnly(1.0)]),
    "pncg": (40_000, [PNCGWithoutReverse(4.0)]),
    "gwg": (40_000, [GibbsWithoutReverse()]),
    "ancestral": (20_000, [AncestralWithoutContext()]),
    "refresh": (5000, [RefreshWithoutRatio(block=2), RefreshBlindToControls(block=2)]),
    "svs + refresh": (5000, [sv.Cycle(sv.SVS(0.8), RefreshBlindToControls(**BLOCKS))]),
    "pncg + refresh": (
        50_000,
        [
            sv.Cycle(PNCGWithoutReverse(4.0), sv.Refresh(**BLOCKS)),
            sv.Cycle(sv.PNCG(4.0), RefreshBlindToControls(**BLOCKS)),
        ],
    ),
    "gwg + refresh": (
        100_000,
        [
            sv.Cycle(GibbsWithoutReverse(), sv.Refresh(**BLOCKS)),
            sv.Cycle(sv.GibbsWithGradients(), RefreshBlindToControls(**BLOCKS)),
        ],
    ),
    "langevin + pncg": (5000, [sv.Cycle(sv.baselines.Langevin(1.0, None, base="uniform"), sv.PNCG(4.0))]),
    "adaptive": (5000, [Adaptive(rounds=RoundsWithoutWeights)]),
    "rejection": (5000, [RejectionOfNothing(batch_size=4096)]),
    "svs uniform": (10_000, [DividedBySquare(base="uniform", walls="closed")]),
    "hmc uniform": (5000, [sv.baselines.Langevin(1.0, None, base="uniform")]),  # the same without Metropolis
    "mucola + metropolis": (5000, [sv.baselines.MuCoLa(1.0, None)]),
}
"""Chains and twins of every exact case of `svs verify`."""

BIASED = {
    "svs closed, equal": 20_000,
    "svs paper": 2000,
    "hmc": 5000,
    "langevin": 5000,
    "langevin + metropolis": 5000,
    "mucola": 5000,
    "mucola + metropolis": 100_000,
    "cold": 2000,
}
"""Chains that show the bias of the other cases."""


def param(case: Case) -> Any:
    is_large = case.exact and EXACT[case.sampler][0] >= 50_000
    return pytest.param(case, id=f"{case.sampler}, {case.target}", marks=[pytest.mark.slow] if is_large else [])


@pytest.mark.parametrize("case", [param(case) for case in cases() if case.exact])
def test_exact_samplers_leave_the_target_invariant(case: Case) -> None:
    chains, twins = EXACT[case.sampler]
    target = sv.verify.known_targets()[case.target]
    check_stationarity(target, case.settings, *twins, chains=chains, steps=case.steps, seed=SEED)


NO_BIAS_SEEN: dict[str, tuple[int, Any]] = {
    "svs closed, estimated": (20_000, sv.SVS(0.4, walls="closed")),
    "svs paper uniform": (
        4000,
        sv.baselines.Langevin(0.5, None, base="uniform"),
    ),
}
"""Approximations whose bias is too small for this number of chains, with a sampler that lacks the correction."""


@pytest.mark.parametrize("case", [param(case) for case in cases() if not case.exact])
def test_inexact_samplers_show_their_bias(case: Case) -> None:
    target = sv.verify.known_targets()[case.target]
    if case.sampler in NO_BIAS_SEEN:
        chains, without = NO_BIAS_SEEN[case.sampler]
        check_stationarity(target, case.settings, without, chains=chains, steps=case.steps, seed=SEED)
    else:
        found = sv.verify.stationarity(case.settings, target, BIASED[case.sampler], case.steps, SEED)
        assert found.moved >= MIN_MOVED
        assert found.p_value < MIN_P_VALUE
        assert found.ratio > 1.5


OPEN: list[Any] = [
    # number of the target, (tokens, positions, dimensions, sd of the field), settings, chains, twin
    (1, (6, 2, 3, 0.2), {"scale": 0.5}, 12_000, OutwardOnly),
    (2, (8, 2, 2, 0.3), {"scale": 1.5}, 4000, OutwardOnly),
    (4, (10, 2, 8, 0.1), {"scale": 1.5}, 4000, OutwardOnly),
    (5, (4, 4, 2, 0.3), {"scale": 0.7}, 12_000, OutwardOnly),
    (6, (10, 3, 3, 0.2), {"scale": 0.8}, 4000, OutwardOnly),
    pytest.param(7, (30, 2, 5, 0.3), {"scale": 1.2}, 2000, OutwardOnly, marks=pytest.mark.slow),
    (8, (12, 1, 6, 0.3), {"scale": 1.0}, 4000, OutwardOnly),
    (0, (6, 2, 3, 0.2), {"scale": 1.0}, 4000, ColdMomentum),
    (0, (6, 2, 3, 0.2), {"scale": 0.3, "turn": 4.0}, 20_000, DividedBySquare),
    # geometry in fewer dimensions
    (5, (6, 2, 4, 0.2), {"scale": 1.0, "dimensions": 1}, 4000, OutwardOnly),
    (5, (6, 2, 4, 0.2), {"scale": 1.0, "dimensions": 2}, 4000, OutwardOnly),
    # a strong random field: reversed, left out, and followed for long
    (6, (5, 2, 3, 0.5), {"scale": 0.8, "guidance_weight": -1.0}, 4000, OutwardOnly),
    (6, (5, 2, 3, 0.5), {"scale": 0.8, "guidance": "none"}, 4000, OutwardOnly),
    (6, (5, 2, 3, 0.5), {"scale": 0.8, "turn": 3.0}, 4000, OutwardOnly),
]


@pytest.mark.parametrize(("number", "shape", "settings", "chains", "twin"), OPEN)
def test_svs_with_open_walls_is_exact(
    number: int, shape: tuple[int, int, int, float], settings: dict[str, Any], chains: int, twin: type[sv.SVS]
) -> None:
    target = sv.verify.random_target(number, *shape)
    right, wrong = sv.SVS(**settings), twin(**settings)
    check_stationarity(target, right, wrong, chains=chains, steps=STEPS, seed=SEED, min_moved=0.4)


@pytest.mark.parametrize(
    ("sampler", "twin", "chains"),
    [
        (sv.SVS(1.0), OutwardOnly(1.0), 4000),
        (sv.PNCG(4.0), PNCGWithoutReverse(4.0), 10_000),
        (sv.GibbsWithGradients(), GibbsWithoutReverse(), 10_000),
    ],
    ids=["svs", "pncg", "gwg"],
)
def test_masked_targets_are_sampled_exactly(sampler: Any, twin: Any, chains: int) -> None:
    """The truth is the table restricted to allowed tokens."""
    target = sv.verify.random_target(7, 8, 2, 3, 0.2)
    target.allowed = torch.arange(8) % 4 != 0
    check_stationarity(target, sampler, twin, chains=chains, steps=STEPS, seed=SEED, min_moved=0.4)


def test_estimated_masses_remove_the_bias_of_equal_ones() -> None:
    target = sv.verify.random_target(103, 8, 2, 2, 0.3)
    estimated, equal = sv.SVS(0.4, walls="closed", masses="estimated"), sv.SVS(0.4, walls="closed")
    check_stationarity(target, estimated, equal, chains=5000, steps=STEPS, seed=SEED)


@pytest.mark.parametrize(
    ("target", "right", "wrong"),
    [
        (toy(1.0), (3.0,) * 4, (1.0, 1.0, 1.0, 2.0)),
        (hypercube(4), (1.0,) * 16, (*(1.0,) * 15, 1.5)),
    ],
    ids=["toy", "hypercube"],
)
def test_given_volumes_are_used(target: Any, right: tuple[float, ...], wrong: tuple[float, ...]) -> None:
    """All cells are equal; other volumes change p by their factor."""
    samplers = [sv.SVS(base="uniform", walls="closed", masses=masses) for masses in (right, wrong)]
    check_stationarity(target, *samplers, chains=5000, steps=STEPS, seed=SEED)


def test_chains_that_do_not_move_are_not_verified() -> None:
    """Without moves a perfect fit is no evidence."""
    case = Case("frozen", "pairs", sv.SVS(1e-3), 1)
    (verdict,) = sv.verify.verdicts(5000, SEED, [case])
    assert isinstance(verdict, Verdict)
    assert verdict.found.p_value >= MIN_P_VALUE
    assert verdict.status == "failed: does not move"
    assert verdict.failed


def test_a_broken_twin_fails_verification() -> None:
    wrong = Case("twin", "pairs", OutwardOnly(1.0), STEPS)
    (verdict,) = sv.verify.verdicts(2000, SEED, [wrong])
    assert verdict.status == "failed"
    assert verdict.failed
