"""Samplers of text by the names that the command line uses, their settings, and what a run of them needs.

The words are plain and nothing heavy is imported before it is needed, so that `svs ls` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from structured_voronoi.contracts import Sampler, Start, Target
    from structured_voronoi.lookahead.lookahead import Lookahead
    from structured_voronoi.problem.problem import Problem

TEXT_SCALE = 0.22
"""The default scale of SVS on text (docs/results/efficiency.md)."""
TEXT_DIMENSIONS = 32
"""The dimensions of SVS on text: fewer cost more evaluations, more cost more time."""
DEFAULT_LENGTH = 60
"""The most tokens of a text that ends by itself; the number of tokens of any other."""
LENGTH_HELP = "Tokens of each text; where texts end anywhere, the most of them."
ENDS_HELP = (
    "Where texts end: `anywhere` within --length, which is the default; `at-length`, which weighs texts of --length "
    "tokens by the probability that they end there; `never`, the default with a suffix, for beginnings of texts."
)
STOP_HELP = "Text with which texts end, too; repeatable. \\n is a new line, \\t a tab."
CHECKPOINT_HELP = "Folder in which the run is kept as it goes along; whatever stops it, little is lost."
RESUME_HELP = "Go on with the run in --checkpoint; if there is none yet, begin it."
CONTROL_TIMEOUT_HELP = "Seconds that a control may take for the texts it is asked about at a time, before it is ended."
DEFAULT_PATIENCE, PATIENT = 30.0, 10.0
"""Seconds of computing after which rejection gives up if it has accepted nothing, those of `Rejection` itself; after so
many times the seconds of a text, where a pilot knows them and these are more."""
WORKERS_HELP = (
    "Processes that work side by side, each on one core; or a Ray cluster: ray for one on this machine, ray:NUMBER for "
    "so many workers there, ray://HOST:PORT for another. Draws are the same for every number."
)
DEFAULT_WARMUP = 100
"""Steps of chains that do not start at the truth, unless a pilot says otherwise."""

TEXT_SAMPLERS = {
    "auto": "the exact one that costs least, found on a pilot; the default",
    "svs+refresh": "SVS and Refresh in turn; exact, for scores of any kind",
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
    "cold": "COLD; not exact",
}
"""The values of `svs sample --sampler`, with a description of each."""
INEXACT = ("svs-paper", "langevin", "mucola", "cold")

Scale = float | Literal["auto"]


def text_sampler(
    name: str, scale: Scale = TEXT_SCALE, width: int = TEXT_DIMENSIONS, patience: float | None = DEFAULT_PATIENCE
) -> Sampler:
    """A sampler for text whose embeddings have ``width`` dimensions; the paper's methods have the paper's settings."""
    import structured_voronoi as sv

    def make_svs() -> sv.SVS:
        return sv.SVS(scale, dimensions=min(width, TEXT_DIMENSIONS), remember=64)

    makers: dict[str, Any] = {
        "svs+refresh": lambda: sv.Cycle(make_svs(), sv.Refresh(moves=5)),  # redraws mix globally
        "svs": make_svs,
        "refresh": lambda: sv.Refresh(),
        "ancestral": lambda: sv.Ancestral(),
        "rejection": lambda: sv.Rejection(patience=patience),
        "guided": lambda: sv.Guided(),
        "svs-paper": lambda: sv.SVS.paper(1.0, 0.4, metropolis=False),
        "langevin": lambda: sv.Langevin(1.0),
        "mucola": lambda: sv.MuCoLa(1.0),
        "cold": lambda: sv.COLD(),
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
    """Why `auto` chose this sampler, in one sentence with the numbers; or what this sampler will not do."""
    mixing: str | None = None
    """How far texts depend on their start, where a pilot says that."""

    @property
    def is_exact(self) -> bool:
        return self.name not in INEXACT


def written_ending(ends: str | None, stop: list[str] | None, suffix: str = "") -> dict[str, Any]:
    """Where texts end, as the command line says it and as `LanguageModel.load` takes it."""
    stops = [text.replace("\\n", "\n").replace("\\t", "\t") for text in stop or ()]
    return {"ends": ends or ("never" if suffix else "anywhere"), "stop": tuple(stops)}


def check_resume(resume: bool, checkpoint: object) -> None:
    """Refuse to go on with a run that is nowhere."""
    from structured_voronoi.errors import SamplingError

    if resume and checkpoint is None:
        raise SamplingError("--resume needs the folder of the run; add --checkpoint DIR")


def written_workers(workers: str) -> int | str:
    """Workers as the command line says them and as `sample` takes them."""
    return int(workers) if workers.isdecimal() else workers


def check_sampler_name(name: str) -> None:
    """Refuse a name that is not among the samplers of text."""
    from structured_voronoi.errors import SamplingError, did_you_mean

    if not isinstance(name, str) or name not in TEXT_SAMPLERS:
        raise SamplingError(f"unknown sampler {name!r}; {did_you_mean(name, TEXT_SAMPLERS)}")


def total_steps(warmup: int | None, thin: int, default: int = DEFAULT_WARMUP) -> int:
    """Steps of a chain up to its text."""
    return (default if warmup is None else warmup) + thin


def plan_texts(
    target: Target | Problem,
    name: str = "auto",
    *,
    count: int = 8,
    scale: Scale = TEXT_SCALE,
    warmup: int | None = None,
    thin: int = 1,
    start: Start = None,
    seed: int = 0,
    progress: bool = False,
    patience: float | None = DEFAULT_PATIENCE,
    other: Lookahead | None = None,
) -> Plan:
    """Which sampler, with which settings, and how many steps for each of ``count`` texts.

    The lookahead of an ``other`` prompt serves this one, too, if it does so well enough; texts are exact with any.

    Without a given ``warmup`` there is none where draws are independent or chains start at the truth, nor for guided
    chains, a step of which makes as many choices as follow from a pilot (`guided_choices`); all others have 100 steps.
    """
    from structured_voronoi.contracts import is_independent, tune
    from structured_voronoi.problem.problem import bind

    check_sampler_name(name)
    problem, reason, guide = bind(target), None, None
    if problem.has_patterns:
        from structured_voronoi.lookahead.reading import check_patterns

        check_patterns(problem)
    if name == "auto":
        from structured_voronoi.run.choice import choose_sampler

        name, reason, guide, seconds = choose_sampler(problem, count, scale, warmup, thin, seed, progress, other)
        patience = patience and max(patience, PATIENT * seconds)  # what was chosen because it is slow may be slow
    draws_truth = problem.normalised and problem.is_autoregressive and not problem.masks
    starts_at_truth = draws_truth and start in (None, "ancestral") and name not in INEXACT
    if warmup is None and starts_at_truth:
        warmup = 0
    if name == "guided":
        from structured_voronoi.run.choice import plan_guided

        guided, steps, mixing = plan_guided(problem, guide, count, warmup, thin, seed, progress, other)
        return Plan(name, guided, steps, starts_at_truth, reason, mixing)
    unread: list[str] = getattr(problem, "not_softly_read", []) if name == "cold" else []
    if unread:
        reason = f"{' and '.join(unread)} cannot read soft texts and will not steer COLD; classifiers do"
    sampler = text_sampler(name, scale, problem.embeddings.shape[1], patience)
    steps = 1 if is_independent(sampler) else total_steps(warmup, thin)
    return Plan(name, tune(sampler, problem, seed, start), steps, starts_at_truth, reason)
