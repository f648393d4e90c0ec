"""Samplers of text by the names that the command line uses: their settings, what a run of them needs, and `auto`.

The words are plain and nothing heavy is imported before it is needed, so that `svs ls` answers at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from structured_voronoi.contracts import Sampler, Start, Target
    from structured_voronoi.problem.problem import Problem

TEXT_SCALE = 0.22
"""The default scale of SVS on text (docs/results.md, efficiency)."""
TEXT_DIMENSIONS = 32
"""The dimensions of SVS on text: fewer cost more evaluations, more cost more time."""
DEFAULT_WARMUP = 100
"""Steps of chains that do not start at the truth."""
LOOKAHEAD_TEXTS = 1024
"""Of the pilot that a lookahead learns from; it is kept in the user's cache."""
GUIDED_WARMUP = 4
"""Of chains that start from their own proposals, chosen by weight, and choose again in every step."""
PILOT_TRIES, PILOT_CHAINS, PILOT_STEPS = 128, 8, 2
"""The pilot of `auto`: tries of rejection; chains and steps of svs+refresh."""

TEXT_SAMPLERS = {
    "svs+refresh": "SVS and Refresh in turn; exact, the default",
    "guided": "Guided by a lookahead that is fitted first; exact, best where controls are rare",
    "rejection": "Rejection; exact, best where controls are not rare",
    "svs": "SVS alone; exact, finds what fits between neighbours",
    "refresh": "Refresh alone; exact",
    "ancestral": "Ancestral; exact where nothing stands on the right and nothing controls",
    "pncg": "PNCG; exact",
    "gwg": "GibbsWithGradients; exact",
    "svs-paper": "SVS.paper; not exact",
    "langevin": "Langevin; not exact",
    "mucola": "MuCoLa; not exact",
    "auto": "the exact one that costs least, found on a pilot",
}
"""The values of `svs sample --sampler`, with a description of each."""
INEXACT = ("svs-paper", "langevin", "mucola")

Scale = float | Literal["auto"]


def text_sampler(name: str, scale: Scale = TEXT_SCALE, width: int = TEXT_DIMENSIONS) -> Sampler:
    """A sampler for text whose embeddings have ``width`` dimensions; the paper's methods have the paper's settings."""
    import structured_voronoi as sv

    def make_svs() -> sv.SVS:
        return sv.SVS(scale, dimensions=min(width, TEXT_DIMENSIONS), remember=64)

    makers: dict[str, Any] = {
        "svs+refresh": lambda: sv.Cycle(make_svs(), sv.Refresh(moves=5)),  # redraws mix globally
        "svs": make_svs,
        "refresh": lambda: sv.Refresh(),
        "ancestral": lambda: sv.Ancestral(),
        "rejection": lambda: sv.Rejection(),
        "guided": lambda: sv.Guided(),
        "svs-paper": lambda: sv.SVS.paper(1.0, 0.4, metropolis=False),
        "langevin": lambda: sv.Langevin(1.0),
        "mucola": lambda: sv.MuCoLa(1.0),
        "pncg": lambda: sv.PNCG(0.04, guidance="forward"),
        "gwg": lambda: sv.GibbsWithGradients(guidance="forward"),
    }
    sampler: Sampler = makers[name]()
    return sampler


@dataclass(frozen=True)
class Plan:
    """How texts are going to be drawn."""

    name: str
    """The name that `text_sampler` takes, with `auto` resolved."""
    sampler: Sampler
    steps: int
    """Steps of each chain, up to its text."""
    starts_at_truth: bool
    """Chains start from draws of the target and keep its distribution, so that they need not mix."""
    reason: str | None = None
    """Why `auto` chose this sampler, in one sentence with the numbers."""

    @property
    def is_exact(self) -> bool:
        return self.name not in INEXACT


def check_sampler_name(name: str) -> None:
    """Refuse a name that `text_sampler` and `plan_texts` do not know."""
    from structured_voronoi.errors import SamplingError, did_you_mean

    if name not in TEXT_SAMPLERS:
        raise SamplingError(f"unknown sampler {name!r}; {did_you_mean(name, TEXT_SAMPLERS)}")


def plan_texts(
    target: Target | Problem,
    name: str = "svs+refresh",
    *,
    scale: Scale = TEXT_SCALE,
    warmup: int | None = None,
    thin: int = 1,
    start: Start = None,
    seed: int = 0,
    progress: bool = False,
) -> Plan:
    """Which sampler, how many steps: no warm-up where draws are independent or chains start at the truth, else 100."""
    from structured_voronoi.contracts import is_independent, tune
    from structured_voronoi.problem.problem import bind

    check_sampler_name(name)
    problem, reason = bind(target), None
    if problem.patterns:
        from structured_voronoi.lookahead.lookahead import check_patterns

        check_patterns(problem)
    draws_truth = problem.normalised and problem.is_autoregressive and not problem.masks
    starts_at_truth = draws_truth and start in (None, "ancestral") and name not in INEXACT
    if warmup is None:
        warmup = 0 if starts_at_truth else GUIDED_WARMUP if name == "guided" else DEFAULT_WARMUP
    if name == "auto":
        name, reason = cheapest_sampler(problem, seed, warmup + thin, scale)
    sampler = text_sampler(name, scale, problem.embeddings.shape[1])
    if name == "guided":
        from structured_voronoi.lookahead.kept import kept_lookahead

        sampler = replace(sampler, lookahead=kept_lookahead(problem, LOOKAHEAD_TEXTS, seed, progress))  # type: ignore[type-var]
    steps = 1 if is_independent(sampler) else warmup + thin
    return Plan(name, tune(sampler, problem, seed, start), steps, starts_at_truth, reason)


def cheapest_sampler(target: Target | Problem, seed: int, steps: int, scale: Scale = TEXT_SCALE) -> tuple[str, str]:
    """Ancestral where it is the truth; else rejection or ``steps`` steps of svs+refresh, by their evaluations a text.

    Returns the name and one sentence that says why.
    """
    from structured_voronoi.errors import NoBoundError
    from structured_voronoi.problem.problem import bind
    from structured_voronoi.samplers.rejection import Rejection

    problem = bind(target)
    if problem.normalised and problem.is_autoregressive:
        return "ancestral", "ancestral, because nothing weighs on the language model's own draws"
    try:
        share = Rejection().acceptance(problem, seed, PILOT_TRIES)
    except NoBoundError as error:
        return "svs+refresh", f"svs+refresh, because {str(error).split(';')[0]}"
    tries = 1 / share if share > 0 else math.inf
    cost = steps * _evaluations_per_step(problem, seed, scale)
    if math.isinf(cost):
        return "rejection", f"rejection ({_in_words(tries)}), because no start for svs+refresh was found"
    costs = f"rejection needs {_in_words(tries)}, {steps} steps of svs+refresh {_in_words(cost)}"
    name = "rejection" if tries <= cost else "svs+refresh"
    return name, f"{name}, by the evaluations a text costs in a pilot: {costs}"


def _evaluations_per_step(problem: Problem, seed: int, scale: Scale) -> float:
    """Evaluations of a chain in one step of svs+refresh; infinite where no chain can be started."""
    from structured_voronoi.contracts import Chains
    from structured_voronoi.errors import NoStartError
    from structured_voronoi.streams import Rng

    sampler = text_sampler("svs+refresh", scale, problem.embeddings.shape[1])
    try:
        chains = Chains(sampler, problem, Rng(seed, PILOT_CHAINS, "choice", problem.device))
    except NoStartError:
        return math.inf
    total = sum(int(info.evaluations.sum()) for _, info in islice(chains, PILOT_STEPS))
    return total / PILOT_CHAINS / PILOT_STEPS


def _in_words(evaluations: float) -> str:
    if math.isinf(evaluations):
        return f"none of {PILOT_TRIES} tries possible"
    return f"about {evaluations:.3g}"
