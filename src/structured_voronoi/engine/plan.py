"""The choice of the sampler of texts, and the plan of its chains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from structured_voronoi.core.contracts import Sampler, Start, Target, is_independent, tune
from structured_voronoi.core.errors import NoBoundError, SamplingError
from structured_voronoi.problem.drawing import log_bound
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.samplers.registry import TEXT_SCALE, Scale, check_sampler_name, find_sampler, text_sampler

DEFAULT_MAX_TOKENS = 60
"""Default maximum number of tokens of a text."""
DEFAULT_TOLERANCE = 0.003
"""Default bound on the error of texts under control."""
DEFAULT_WARMUP = 100
"""Steps of chains that do not start at the truth."""


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
        return find_sampler(self.name).exact


def total_steps(warmup: int | None, thin: int, default: int = DEFAULT_WARMUP) -> int:
    """Steps of a chain up to its text."""
    return (default if warmup is None else warmup) + thin


def choose_sampler(target: Target | Problem, name: str = "auto") -> tuple[str, str | None]:
    """The name of the sampler that draws texts of a target, and why, where that needs saying.

    The rule depends on the target alone: the engine draws texts of left-to-right models whose controls have a bound.
    """
    check_sampler_name(name)
    problem = bind(target)
    if problem.has_patterns:
        from structured_voronoi.problem.patterns import check_patterns

        check_patterns(problem)
    if name == "ancestral" and not problem.normalised:
        raise SamplingError(
            "ancestral sampling ignores a suffix, the end of the text and controls",
            remedy="use another sampler, for example auto",
        )
    if name != "auto":
        if name in ("rejection", "adaptive"):
            log_bound(problem)
        return name, None
    if not problem.is_autoregressive or problem.temperature != 1.0:
        return "svs", "sampling with SVS: the tokens of this target cannot be redrawn"
    if problem.normalised:
        return "ancestral", None
    text: Any = getattr(problem.target, "text", problem.target)
    if len(getattr(text, "after", ())):
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
    problem = bind(target)
    name, reason = choose_sampler(problem, name)
    draws_truth = problem.normalised and problem.is_autoregressive and not problem.masks
    starts_at_truth = draws_truth and start in (None, "ancestral") and find_sampler(name).exact
    if warmup is None and starts_at_truth:
        warmup = 0
    unread: list[str] = getattr(problem, "not_softly_read", []) if name == "cold" else []
    if unread:
        reason = f"{' and '.join(unread)} cannot read mixtures of tokens and will not steer COLD; classifiers do"
    sampler = text_sampler(name, scale, problem.embeddings.shape[1])
    steps = 1 if is_independent(sampler) else total_steps(warmup, thin)
    return Plan(name, tune(sampler, problem, seed, start), steps, starts_at_truth, reason)
