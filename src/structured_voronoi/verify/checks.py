"""The checks of `svs verify`: every sampler on targets whose exact probabilities are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

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

MIN_P_VALUE = 1e-4
"""The p-value below which an exact sampler fails."""
MIN_MOVED = 0.3
"""Share of chains that must move: without moves the check has no power."""

Status = Literal["exact", "failed", "failed: does not move", "biased by design", "no bias detected"]


class Case(NamedTuple):
    """A sampler with its settings, and the target on which it is checked."""

    sampler: str
    """Name in the table of `svs verify`."""
    target: str
    """Name in `known_targets`."""
    settings: Sampler
    steps: int
    exact_on_target: bool = False
    """Whether the sampler is exact on this target although it is not exact in general."""

    @property
    def exact(self) -> bool:
        """Whether the sampler must be exact here: its own attribute ``exact``, or ``exact_on_target``."""
        return self.exact_on_target or bool(getattr(self.settings, "exact", False))


class Verdict(NamedTuple):
    """Result of a case."""

    case: Case
    found: Stationarity

    @property
    def status(self) -> Status:
        """Whether the sampler is exact, biased, or without moves."""
        if not self.case.exact:
            return "biased by design" if self.found.p_value < MIN_P_VALUE else "no bias detected"
        if self.found.moved < MIN_MOVED:
            return "failed: does not move"
        return "exact" if self.found.p_value >= MIN_P_VALUE else "failed"

    @property
    def failed(self) -> bool:
        """Whether a sampler that must be exact is not, or does not move."""
        return self.case.exact and self.status != "exact"


def cases() -> list[Case]:
    """Return the cases of `svs verify`, with settings in which most chains move.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> case = sv.verify.cases()[0]
    >>> case.sampler, case.target, case.exact
    ('svs open', 'pairs', True)
    """
    tables = ("pairs", "triples", "potts")
    refresh = Refresh(block=2, suffix=False)
    listed = [Case("svs open", target, SVS(1.0), 12) for target in tables]
    listed += [Case("pncg", target, PNCG(4.0), 12) for target in tables]
    listed += [Case("gwg", target, GibbsWithGradients(), 12) for target in tables]
    listed += [
        Case("ancestral", "sentences", Ancestral(), 1),
        Case("refresh", "controlled", Refresh(block=2), 12),
        Case("svs + refresh", "controlled", Cycle(SVS(0.8), refresh), 12),
        Case("pncg + refresh", "controlled", Cycle(PNCG(4.0), refresh), 12),
        Case("gwg + refresh", "controlled", Cycle(GibbsWithGradients(), refresh), 12),
        Case("langevin + pncg", "toy", Cycle(Langevin(1.0, None, metropolis=True, base="uniform"), PNCG(4.0)), 12),
        Case("rejection", "controlled", Rejection(batch_size=4096), 1),
        Case("adaptive", "controlled", Adaptive(), 1),
        Case("svs uniform", "toy", SVS(base="uniform", walls="closed"), 12),
        Case("hmc uniform", "toy", HMC(1.0, base="uniform"), 100),
        Case("mucola + metropolis", "toy", MuCoLa(1.0, None, metropolis=True), 12, exact_on_target=True),
        Case("svs paper uniform", "toy", SVS.paper(0.5, 0.1, base="uniform"), 100),
        Case("svs closed, estimated", "pairs", SVS(0.4, walls="closed", masses="estimated"), 12),
        Case("svs closed, equal", "pairs", SVS(0.4, walls="closed"), 12),
        Case("svs paper", "pairs", SVS.paper(0.5, 0.1), 30),
        Case("hmc", "pairs", HMC(0.5), 30),
        Case("langevin", "pairs", Langevin(0.5), 30),
        Case("langevin + metropolis", "pairs", Langevin(0.5, None, metropolis=True), 30),
        Case("mucola", "pairs", MuCoLa(0.5), 12),
        Case("mucola + metropolis", "pairs", MuCoLa(0.5, None, metropolis=True), 12),
        Case("cold", "controlled", COLD(), 1),
    ]
    return listed


def verdicts(chains: int, seed: int, selected: Sequence[Case] | None = None) -> Iterator[Verdict]:
    """Run cases one after the other.

    Parameters
    ----------
    chains
        Number of chains of each case, which start from the exact distribution.
    seed
        Seed of all random streams.
    selected
        Cases to run; all by default.

    Yields
    ------
    Verdict
        The result of each case.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> (verdict,) = sv.verify.verdicts(2000, 0, sv.verify.cases()[:1])
    >>> verdict.status
    'exact'
    """
    known = known_targets()
    for case in cases() if selected is None else selected:
        yield Verdict(case, stationarity(case.settings, known[case.target], chains, case.steps, seed))
