"""`probability`: how probable it is that a text of a model satisfies its controls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from structured_voronoi.core.contracts import Target
from structured_voronoi.core.errors import NoBoundError, NoStartError
from structured_voronoi.core.progress import progress_bar
from structured_voronoi.core.validation import check_count
from structured_voronoi.engine.rounds import Rounds
from structured_voronoi.engine.settings import EngineSettings
from structured_voronoi.engine.try_source import TrySource, plain_proposal
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.lookahead.reading import check_patterns
from structured_voronoi.metrics.divergence import Interval
from structured_voronoi.metrics.probability import Probability, estimate_probability, given_the_end
from structured_voronoi.metrics.text import wilson
from structured_voronoi.problem.drawing import check_autoregressive, log_bound
from structured_voronoi.problem.problem import Problem, bind

if TYPE_CHECKING:
    from structured_voronoi.engine.checkpoint import Checkpoint

KIND = "probability"
"""The kind of these runs in checkpoints."""
MIN_ENDING_TEXTS = 256
"""Texts of the model from which the probability that they end is estimated; more if many texts are asked for."""


def probability(
    target: Target | Problem,
    texts: int = 2048,
    seed: int = 0,
    lookahead: Lookahead | None = None,
    progress: bool = True,
    *,
    monte_carlo: bool = False,
    checkpoint: str | Path | None = None,
    resume: bool = True,
    workers: int | str = 1,
    settings: EngineSettings | None = None,
) -> Probability:
    """Estimate the probability that a text of the model satisfies the controls, also where it is tiny.

    Where texts must end within N tokens, it is P(controls | the text ends): the probability of both divided by that of
    ending, which is estimated from texts of the model itself; the interval holds the errors of both.

    Parameters
    ----------
    target
        A language model with controls that have a bound.
    texts
        Number of weighted texts that the estimate is computed from. A few hundred more are drawn to learn from.
    seed
        Seed of all random streams.
    lookahead
        A proposal to use instead of learning one.
    progress
        Show progress on a terminal.
    monte_carlo
        Also draw as many texts of the model itself and count those that satisfy the controls.
    checkpoint, resume
        Folder that holds the run; the same call resumes it. Without ``resume`` a folder that holds a run is refused.
    workers
        Number of processes that draw texts, or a Ray cluster.
    settings
        Settings of the engine.

    Returns
    -------
    Probability
        The value with its 95 % interval, and whether it is reliable.

    Raises
    ------
    NoBoundError
        If the score of a control has no bound.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> model = sv.LanguageModel.load("bundled", length=12)
    >>> target = sv.Controlled(model, {sv.controls.Predicate.keyword("Italian"): 1.0})
    >>> found = sv.probability(target, texts=256, progress=False)
    >>> found.low <= found.value <= found.high
    True
    """
    with open_kept(checkpoint, resume, workers) as kept:
        return estimate(target, texts, seed, lookahead, progress, monte_carlo=monte_carlo, kept=kept, settings=settings)


@contextlib.contextmanager
def open_kept(checkpoint: str | Path | None, resume: bool, workers: int | str) -> Iterator[Checkpoint | None]:
    """The checkpoint of an estimate, or none."""
    if checkpoint is None and workers == 1:
        yield None
        return
    from structured_voronoi.engine.checkpoint import open_checkpoint

    with open_checkpoint(checkpoint, resume, workers, KIND) as kept:
        yield kept


def estimate(
    target: Target | Problem,
    texts: int,
    seed: int,
    lookahead: Lookahead | None,
    progress: bool,
    *,
    monte_carlo: bool,
    kept: Checkpoint | None,
    settings: EngineSettings | None = None,
) -> Probability:
    """What `probability` returns, with a checkpoint that is open."""
    check_count(texts=texts)
    problem, settings = bind(target), settings or EngineSettings()
    settings = settings if lookahead is None else replace(settings, learns=False)
    check_autoregressive(problem, "a probability")
    try:
        log_bound(problem)
    except NoBoundError as error:
        raise NoBoundError(
            "a probability needs controls with a bound", remedy="declare one that no score exceeds"
        ) from error
    if kept is not None:
        from structured_voronoi.storage.packing import describe

        asked: dict[str, Any] = {"texts": texts, "seed": seed, "monte_carlo": monte_carlo}
        kept.begin(KIND, problem, {**asked, "lookahead": describe(lookahead)})
    if problem.has_patterns:
        check_patterns(problem)
    make = partial(_same, [problem.target])
    source = TrySource([problem.target], seed, settings, checkpoint=kept, make_targets=make)
    run = Rounds([problem], source, texts, seed, 0.003, settings, measures=True, lookahead=lookahead)
    with progress_bar(texts, progress, stage="weighted_texts") as tick:
        shown = 0

        def show(run: Rounds) -> None:
            nonlocal shown
            proposal = run.proposals[run.current]
            found = estimate_probability(proposal.tries(0).log_weight.numpy(), proposal.count(), proposal.is_plain)
            done = min(texts, proposal.count())
            tick(f"P = {found}", done - shown)
            shown = done

        run.progress = show
        for _ in run.run():
            pass
    evaluations = sum(proposal.count() for proposal in run.proposals)
    last = run.proposals[run.current]
    found = estimate_probability(last.tries(0).log_weight.numpy(), evaluations, last.is_plain)
    if problem.ended is not None and not problem.normalised:
        count = max(MIN_ENDING_TEXTS, texts // 2)
        ended = _plain_run(problem, seed, settings, kept, count, "ending").ended
        if not ended.any():
            raise NoStartError(
                f"none of {count} texts of the model ended within {problem.length} tokens",
                remedy="raise the length, give a stop string, or take texts that need not end",
            )
        found = given_the_end(found, int(ended.sum()), count)
    if monte_carlo:
        found = replace(found, monte_carlo=_monte_carlo(problem, seed, settings, kept, found.evaluations))
    if kept is not None and not kept.is_finished:
        kept.reach(texts, texts, "texts")
        kept.save()
    return found


def _same(targets: list[Target]) -> list[Target]:
    return targets


def _plain_run(
    problem: Problem, seed: int, settings: EngineSettings, kept: Checkpoint | None, texts: int, stream: str
) -> Any:
    """Tries of the model itself, with no token masked."""
    make = partial(_same, [problem.target])
    source = TrySource([problem.target], seed, settings, stream, checkpoint=kept, make_targets=make)
    proposal = plain_proposal(problem, settings, has_heads=False)
    run = Rounds(
        [problem], source, texts, seed, 0.003, replace(settings, learns=False), measures=True, lookahead=proposal
    )
    for _ in run.run():
        pass
    return run.proposals[0].tries(0)


def _monte_carlo(
    problem: Problem, seed: int, settings: EngineSettings, kept: Checkpoint | None, texts: int
) -> Interval:
    """The share of the model's own texts, of those that end if they must, that rejection would accept."""
    tries = _plain_run(problem, seed, settings, kept, texts, "monte-carlo")
    ended = tries.ended[:texts] if problem.ended is not None else tries.ended[:texts] | True
    hits = (tries.log_weight.exp() > tries.level)[:texts] & ended
    return wilson(int(hits.sum()), max(1, int(ended.sum())))
