"""Every sampler against targets whose truth is known, started at the truth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from structured_voronoi.base import Enumerable, Sampler
from structured_voronoi.experiments.checks import Stationarity, random_target, stationarity
from structured_voronoi.samplers.ancestral import Ancestral
from structured_voronoi.samplers.cycle import Cycle
from structured_voronoi.samplers.gwg import GibbsWithGradients
from structured_voronoi.samplers.hmc import HMC
from structured_voronoi.samplers.langevin import Langevin
from structured_voronoi.samplers.mucola import MuCoLa
from structured_voronoi.samplers.pncg import PNCG
from structured_voronoi.samplers.refresh import Refresh
from structured_voronoi.samplers.rejection import Rejection
from structured_voronoi.samplers.svs import SVS
from structured_voronoi.targets.categorical import toy
from structured_voronoi.targets.potts import PottsTarget
from structured_voronoi.targets.tabular import AutoregressiveTable

LEVEL = 1e-4
"""A sampler that claims to be exact fails below this p-value …"""
LEAST_MOVED = 0.3
"""… and where fewer chains move than this: who stays at the truth proves nothing."""


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
            return "biased by design" if self.found.fit.p_value < LEVEL else "no bias seen"
        if self.found.moved < LEAST_MOVED:
            return "FAILED: does not move"
        return "exact" if self.found.fit.p_value >= LEVEL else "FAILED"


def targets() -> dict[str, Enumerable]:
    return {
        "pairs": random_target(0, 6, 2, 3, 0.2),
        "triples": random_target(3, 5, 3, 4, 0.2),
        "potts": PottsTarget(side=2, states=3, coupling=0.5),
        "toy": toy(0.5),
        "sentences": sentences(controlled=False),
        "controlled": sentences(controlled=True),
    }


def sentences(controlled: bool) -> AutoregressiveTable:
    """Three positions over five tokens, read from left to right; strong dependence, and scores as by controls."""
    random, other = random_target(1, 5, 3, 3, 0.2), random_target(2, 5, 3, 3, 0.2)
    table = 2 * random.table - (2 * random.table).logsumexp((0, 1, 2))
    return AutoregressiveTable(random.embeddings, table, random.gradient, -other.table.abs() if controlled else None)


def cases() -> list[Case]:
    """Settings in which most chains move. Samplers with a point x need time to spread it over its cell."""
    everywhere = ("pairs", "triples", "potts")
    found = [Case("svs open", target, True, SVS(1.0), 12) for target in everywhere]
    found += [Case("pncg", target, True, PNCG(4.0), 12) for target in everywhere]
    found += [Case("gwg", target, True, GibbsWithGradients(), 12) for target in everywhere]
    found += [
        Case("ancestral", "sentences", True, Ancestral(), 1),
        Case("refresh", "controlled", True, Refresh(block=2), 12),
        Case("svs + refresh", "controlled", True, Cycle(SVS(0.8), Refresh(block=2, suffix=False)), 12),
        Case("rejection", "controlled", True, Rejection(wave=4096), 1),
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
    ]
    return found


def verdicts(chains: int, seed: int) -> Iterator[Verdict]:
    """One after the other, as they are found."""
    known = targets()
    for case in cases():
        yield Verdict(case, stationarity(known[case.target], case.settings, chains, case.steps, seed))
