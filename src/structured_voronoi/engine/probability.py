"""`probability`: how probable it is that a text of a model satisfies controls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from structured_voronoi.core.contracts import Target
from structured_voronoi.core.errors import NoBoundError, NoStartError, SamplingError
from structured_voronoi.core.progress import progress_bar
from structured_voronoi.core.user_code import CONTROL_SECONDS
from structured_voronoi.core.validation import check_count, check_seed
from structured_voronoi.engine.checkpoint import Checkpoint, CheckpointSettings
from structured_voronoi.engine.plan import DEFAULT_MAX_TOKENS
from structured_voronoi.engine.rounds import Rounds
from structured_voronoi.engine.run_checkpoint import open_checkpoint
from structured_voronoi.engine.settings import EngineSettings
from structured_voronoi.engine.source import plain_proposal
from structured_voronoi.engine.tries import Tries
from structured_voronoi.engine.try_source import TrySource
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.metrics.divergence import Interval
from structured_voronoi.metrics.probability import Probability, estimate_probability, given_the_end
from structured_voronoi.metrics.text import wilson
from structured_voronoi.problem.drawing import check_autoregressive, log_bound
from structured_voronoi.problem.patterns import check_patterns
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.targets.ending import Finish
from structured_voronoi.targets.language_model import Controls, LanguageModel, as_model

KIND = "probability"
"""Kind of these runs in checkpoints."""


def probability(
    model: str | LanguageModel | Target | Problem = "bundled",
    prompt: str = "",
    controls: Controls = (),
    *,
    texts: int = 2048,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    finish: Finish = "any",
    stop: str | int | Sequence[str | int] = (),
    chat: bool = False,
    system: str = "",
    seed: int = 0,
    lookahead: Lookahead | None = None,
    monte_carlo: bool = False,
    control_timeout: float | None = CONTROL_SECONDS,
    checkpoint: str | Path | CheckpointSettings | None = None,
    resume: bool = True,
    workers: int | str = 1,
    progress: bool = True,
    settings: EngineSettings | None = None,
) -> Probability:
    """Estimate the probability that a text of a model satisfies controls, even if it is tiny.

    Parameters
    ----------
    model
        A name for `load`, a model, or a target made by `LanguageModel.target`, which has its own prompt, controls and
        length.
    prompt, controls, max_tokens, finish, stop, chat, system
        As for `generate`. With ``finish="stop"`` it is the probability given that a text ends within ``max_tokens``.
    texts
        Maximum number of weighted texts that the estimate is computed from; fewer once it is reliable and its relative
        standard error is below 10 % (``settings.target_relative_error``). Some more are drawn to learn from.
    seed
        Seed of all random streams.
    lookahead
        A proposal to use instead of learning one.
    monte_carlo
        Also draw as many texts of the model itself and count those that satisfy the controls.
    control_timeout
        Maximum number of seconds for one call of a control.
    checkpoint, resume
        Folder of the run; the same call resumes it. Without ``resume`` a folder that holds a run is refused.
    workers
        Number of worker processes, or a Ray cluster.
    progress
        Show a running estimate on a terminal.
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
    >>> controls = [sv.keyword("Italian")]
    >>> found = sv.probability("bundled", controls=controls, texts=256, max_tokens=12, progress=False)
    >>> found.low <= found.value <= found.high
    True
    """
    check_count(texts=texts)
    check_seed(seed)
    if isinstance(model, str | Path | LanguageModel) or not hasattr(model, "log_prob"):
        if not controls:
            raise SamplingError("no control was given", remedy="give one, for example controls=[sv.keyword('river')]")
        model = as_model(model).target(
            prompt,
            controls,
            max_tokens=max_tokens,
            finish=finish,
            stop=stop,
            chat=chat,
            system=system,
            control_timeout=control_timeout,
        )
    elif prompt or controls:
        raise SamplingError(
            "a target has its own prompt and controls", remedy="give them to model.target, or give a model"
        )
    with open_checkpoint(checkpoint, resume, workers, KIND) as opened:
        estimate = _Estimate(bind(model), texts, seed, opened, progress, settings or EngineSettings(), lookahead)
        return estimate.run(monte_carlo)


@dataclass(frozen=True)
class _Estimate:
    """An estimate of the probability of a target's controls."""

    problem: Problem
    texts: int
    seed: int
    checkpoint: Checkpoint
    progress: bool
    settings: EngineSettings
    lookahead: Lookahead | None = field(default=None)

    def run(self, monte_carlo: bool) -> Probability:
        """The estimate; the checkpoint holds all tries."""
        problem, texts = self.problem, self.texts
        self._check()
        self._begin(monte_carlo)
        found = self._weighted_estimate()
        if problem.ended is not None and not problem.normalised:
            count = max(256, texts // 2)
            ended = self._plain_tries(count, "ending").ended
            if not ended.any():
                raise NoStartError(
                    f"none of {count} texts of the model ended within {problem.length} tokens",
                    remedy="raise max_tokens, give a stop string, or use finish='any'",
                )
            found = given_the_end(found, int(ended.sum()), count)
        if monte_carlo:
            found = replace(found, monte_carlo=self._monte_carlo(found.evaluations))
        if not self.checkpoint.is_finished:
            self.checkpoint.record_progress(texts, texts, "texts")
            self.checkpoint.save()
        return found

    def _check(self) -> None:
        check_autoregressive(self.problem, "a probability")
        try:
            log_bound(self.problem)
        except NoBoundError as error:
            raise NoBoundError(
                "a probability needs controls with a bound",
                cause=error.message,
                remedy="declare a bound that no score exceeds: sv.score(function, bound=0.0)",
            ) from error
        if self.problem.has_patterns:
            check_patterns(self.problem)

    def _begin(self, monte_carlo: bool) -> None:
        from structured_voronoi.storage.packing import describe

        settings: dict[str, Any] = {"texts": self.texts, "seed": self.seed, "monte_carlo": monte_carlo}
        self.checkpoint.begin(KIND, self.problem, {**settings, "lookahead": describe(self.lookahead)})

    def _weighted_estimate(self) -> Probability:
        """From weighted tries of a proposal that learns."""
        texts, settings = self.texts, replace(self.settings, learns=self.settings.learns and self.lookahead is None)
        run = self._rounds(texts, settings, "tries", self.lookahead)
        with progress_bar(texts, self.progress, "weighted texts") as tick:
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
        return estimate_probability(last.tries(0).log_weight.numpy(), evaluations, last.is_plain)

    def _rounds(self, texts: int, settings: EngineSettings, stream: str, lookahead: Lookahead | None) -> Rounds:
        target = self.problem.target
        source = TrySource(
            [target], self.seed, settings, stream, checkpoint=self.checkpoint, make_targets=partial(_same, [target])
        )
        return Rounds([self.problem], source, texts, self.seed, 0.003, settings, measures=True, lookahead=lookahead)

    def _plain_tries(self, texts: int, stream: str) -> Tries:
        """Tries of the model itself, with no token masked."""
        settings = replace(self.settings, learns=False, target_relative_error=0.0)
        run = self._rounds(texts, settings, stream, plain_proposal(self.problem, settings, has_heads=False))
        for _ in run.run():
            pass
        return run.proposals[0].tries(0)

    def _monte_carlo(self, texts: int) -> Interval:
        """The share of the model's own texts, of those that end if they must, that rejection would accept."""
        tries = self._plain_tries(texts, "monte-carlo")
        ended = tries.ended[:texts] if self.problem.ended is not None else tries.ended[:texts] | True
        hits = (tries.log_weight.exp() > tries.level)[:texts] & ended
        return wilson(int(hits.sum()), max(1, int(ended.sum())))


def _same(targets: list[Target]) -> list[Target]:
    return targets
