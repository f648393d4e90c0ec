"""The cases of `svs verify`: a sampler, the target it runs on, and whether it claims to be exact there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from structured_voronoi.baselines.cold import COLD
from structured_voronoi.baselines.hmc import HMC
from structured_voronoi.baselines.langevin import Langevin
from structured_voronoi.baselines.mucola import MuCoLa
from structured_voronoi.core.contracts import Sampler
from structured_voronoi.samplers.ancestral import Ancestral
from structured_voronoi.samplers.cycle import Cycle
from structured_voronoi.samplers.gwg import GibbsWithGradients
from structured_voronoi.samplers.pncg import PNCG
from structured_voronoi.samplers.refresh import Refresh
from structured_voronoi.samplers.rejection import Rejection
from structured_voronoi.samplers.svs import SVS
from structured_voronoi.verify.engine import Adaptive
from structured_voronoi.verify.stationary import Stationarity, stationarity
from structured_voronoi.verify.truths import known_targets

LEVEL = 1e-4
"""The p-value below which a sampler that claims to be exact fails."""
LEAST_MOVED = 0.3
"""The share of chains that must move for a check to count: chains that stay at the truth prove nothing."""


class Case(NamedTuple):
    sampler: str
    target: str
    claims_exact: bool
    settings: Sampler
    steps: int


class Verdict(NamedTuple):
    case: Case
    found: Stationarity

    @property
    def failed(self) -> bool:
        return self.word.startswith("FAILED")

    @property
    def word(self) -> str:
        if not self.case.claims_exact:
            return "biased by design" if self.found.p_value < LEVEL else "no bias seen"
        if self.found.moved < LEAST_MOVED:
            return "FAILED: does not move"
        return "exact" if self.found.p_value >= LEVEL else "FAILED"


def cases() -> list[Case]:
    """The checked cases, with settings in which most chains move and steps enough to spread a point over its cell."""
    everywhere = ("pairs", "triples", "potts")
    listed = [Case("svs open", target, True, SVS(1.0), 12) for target in everywhere]
    listed += [Case("pncg", target, True, PNCG(4.0), 12) for target in everywhere]
    listed += [Case("gwg", target, True, GibbsWithGradients(), 12) for target in everywhere]
    listed += [
        Case("ancestral", "sentences", True, Ancestral(), 1),
        Case("refresh", "controlled", True, Refresh(block=2), 12),
        Case("svs + refresh", "controlled", True, Cycle(SVS(0.8), Refresh(block=2, suffix=False)), 12),
        Case("pncg + refresh", "controlled", True, Cycle(PNCG(4.0), Refresh(block=2, suffix=False)), 12),
        Case("gwg + refresh", "controlled", True, Cycle(GibbsWithGradients(), Refresh(block=2, suffix=False)), 12),
        Case(
            "langevin + pncg", "toy", True, Cycle(Langevin(1.0, None, metropolis=True, base="uniform"), PNCG(4.0)), 12
        ),
        Case("rejection", "controlled", True, Rejection(wave=4096), 1),
        Case("adaptive", "controlled", True, Adaptive(), 1),
        Case("svs uniform", "toy", True, SVS(base="uniform", walls="closed"), 12),
        Case("hmc uniform", "toy", True, HMC(1.0, base="uniform"), 100),
        Case("mucola + metropolis", "toy", True, MuCoLa(1.0, None, metropolis=True), 12),
        Case("svs paper uniform", "toy", False, SVS.paper(0.5, 0.1, base="uniform"), 100),
        Case("svs closed, estimated", "pairs", False, SVS(0.4, walls="closed", masses="estimated"), 12),
        Case("svs closed, equal", "pairs", False, SVS(0.4, walls="closed"), 12),
        Case("svs paper", "pairs", False, SVS.paper(0.5, 0.1), 30),
        Case("hmc", "pairs", False, HMC(0.5), 30),
        Case("langevin", "pairs", False, Langevin(0.5), 30),
        Case("langevin + metropolis", "pairs", False, Langevin(0.5, None, metropolis=True), 30),
        Case("mucola", "pairs", False, MuCoLa(0.5), 12),
        Case("mucola + metropolis", "pairs", False, MuCoLa(0.5, None, metropolis=True), 12),
        Case("cold", "controlled", False, COLD(), 1),
    ]
    return listed


def verdicts(chains: int, seed: int, selected: list[Case] | None = None) -> Iterator[Verdict]:
    """The verdicts on the selected cases (all by default), one after the other."""
    known = known_targets()
    for case in cases() if selected is None else selected:
        yield Verdict(case, stationarity(case.settings, known[case.target], chains, case.steps, seed))
