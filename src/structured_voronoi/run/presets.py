"""Samplers of text by the names that the command line uses, their settings, and what a run of them needs.

The words are plain and nothing heavy is imported before it is needed, so that `svs ls` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from structured_voronoi.contracts import Sampler, Start, Target
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
WORKERS_HELP = (
    "Processes that work side by side, each on one core; or a Ray cluster: ray for one on this machine, ray:NUMBER for "
    "so many workers there, ray://HOST:PORT for another. Draws are the same for every number."
)
DEFAULT_WARMUP = 100
"""Steps of chains that do not start at the truth, unless a pilot says otherwise."""

TEXT_SAMPLERS = {
    "auto": "ancestral without controls, adaptive with bounded ones, svs+refresh otherwise; the default",
    "adaptive": "rejection whose proposal learns; error at most --tolerance, best where controls are rare",
    "rejection": "rejection from the model; exact",
    "svs+refresh": "SVS and Refresh in turn; exact, for scores of any kind",
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
INDEPENDENT = ("ancestral", "rejection", "adaptive")
"""Samplers whose texts are drawn by the engine, each by itself."""
DEFAULT_TOLERANCE = 0.003
TOLERANCE_HELP = (
    "Largest distance (total variation) from the exact distribution, at least 0 and below 0.5; 0 is exact and slow."
)

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


def choose_sampler(target: Target | Problem, name: str = "auto") -> tuple[str, str | None]:
    """The name of the sampler that draws texts of a target, and why, where that needs saying.

    The rule depends on the target alone: the engine draws texts of left-to-right models whose controls have a bound.
    """
    from structured_voronoi.errors import NoBoundError, SamplingError
    from structured_voronoi.problem.drawing import log_bound
    from structured_voronoi.problem.problem import bind

    check_sampler_name(name)
    problem = bind(target)
    if problem.has_patterns:
        from structured_voronoi.lookahead.reading import check_patterns

        check_patterns(problem)
    if name == "ancestral" and not problem.normalised:
        raise SamplingError(
            "ancestral sampling ignores a suffix, the end of the text and controls; use another sampler, for example "
            "auto"
        )
    if name != "auto":
        if name in ("rejection", "adaptive"):
            log_bound(problem)
        return name, None
    if not problem.is_autoregressive or problem.temperature != 1.0:
        return "svs", "sampling with SVS: the tokens of this target cannot be redrawn"
    if problem.normalised:
        return "ancestral", None
    own: Any = problem.target
    if len(getattr(own, "after", getattr(getattr(own, "model", None), "after", ()))):
        return "svs+refresh", "sampling with SVS and Refresh: text follows the tokens"
    try:
        log_bound(problem)
    except NoBoundError:
        return "svs+refresh", "sampling with SVS and Refresh: a control has no bound"
    return "adaptive", None


def plan_texts(
    target: Target | Problem,
    name: str = "auto",
    *,
    scale: Scale = TEXT_SCALE,
    warmup: int | None = None,
    thin: int = 1,
    start: Start = None,
    seed: int = 0,
) -> Plan:
    """The sampler of chains, with its settings, and the number of steps to each text.

    Without a given ``warmup`` there is none where chains start from draws of the target; all others have 100 steps.
    """
    from structured_voronoi.contracts import is_independent, tune
    from structured_voronoi.problem.problem import bind

    problem = bind(target)
    name, reason = choose_sampler(problem, name)
    draws_truth = problem.normalised and problem.is_autoregressive and not problem.masks
    starts_at_truth = draws_truth and start in (None, "ancestral") and name not in INEXACT
    if warmup is None and starts_at_truth:
        warmup = 0
    unread: list[str] = getattr(problem, "not_softly_read", []) if name == "cold" else []
    if unread:
        reason = f"{' and '.join(unread)} cannot read mixtures of tokens and will not steer COLD; classifiers do"
    sampler = text_sampler("rejection" if name == "adaptive" else name, scale, problem.embeddings.shape[1])
    steps = 1 if is_independent(sampler) else total_steps(warmup, thin)
    return Plan(name, tune(sampler, problem, seed, start), steps, starts_at_truth, reason)
