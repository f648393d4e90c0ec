"""`probability`: how probable it is that a model satisfies its controls, from weighted draws of a lookahead."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from structured_voronoi.contracts import Target
from structured_voronoi.errors import NoBoundError, check_count
from structured_voronoi.lookahead.kept import kept_lookahead
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.lookahead.reading import check_patterns
from structured_voronoi.lookahead.rounds import share_of
from structured_voronoi.metrics.divergence import Interval
from structured_voronoi.metrics.text import wilson
from structured_voronoi.problem.drawing import (
    ancestral_draw,
    check_autoregressive,
    log_acceptance,
    log_bound,
    refuse_endless,
    which_ended,
)
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.progress import progress_bar
from structured_voronoi.samplers.rejection import Rejection
from structured_voronoi.streams import Rng

if TYPE_CHECKING:
    from structured_voronoi.run.checkpoints import Checkpoint

KIND = "probability"
"""What runs of this are called in checkpoints."""
AT_A_TIME = 256
LEAST_PLAIN = 256
"""Texts of the model itself by which the probability that they end is estimated; more if many texts are asked for."""
LEAST_EFFECTIVE, MOST_LARGEST, MOST_PARETO = 50.0, 0.1, 0.7
"""What an estimate must have to be trusted: effective texts, the largest weight's share, the tail's Pareto k̂."""


@dataclass(frozen=True)
class Probability:
    """E_p[W]: for hard controls, the probability that the model satisfies them all.

    Where texts must end within N tokens it is E_p[W | the text ends]: of the whole texts that are sampled, how many are
    as they should be.
    """

    value: float
    """0 where it is too small for a floating-point number; ``log10_value`` is not."""
    low: float
    high: float
    """The ends of the 95 % interval."""
    log10_value: float
    """-inf where no text had a weight."""
    relative_error: float
    """The standard error of the value over the value."""
    effective_share: float
    """(Σw)² / (n Σw²): what a weighted text is worth beside an independent one."""
    largest_share: float
    """The share of the largest weight in their sum."""
    pareto_k: float
    """The shape of the weights' tail; above 0.7 their mean is not to be relied on."""
    trusted: bool
    evaluations: int
    """Texts drawn, without those that the lookahead learnt from."""
    pilot: int = 0
    """Texts that the lookahead learnt from, if it was fitted for this."""
    monte_carlo: Interval | None = None
    """The share of texts of the model itself, as many as the above together, that fit; if they were asked for."""
    ending: Interval | None = None
    """The share of texts of the model itself that end within N tokens, where they must; the value is divided by it."""
    plain: int = 0
    """Texts from which that share was estimated."""

    def __str__(self) -> str:
        """The value with its interval, as powers of ten where it is too small for a floating-point number."""
        if self.low >= sys.float_info.min or self.log10_value == -math.inf:
            return f"{self.value:.3g} (95 %: {self.low:.3g} – {self.high:.3g})"
        middle, half = self.log10_value, 1.96 * self.relative_error / math.log(10)
        return f"10^{middle:.2f} (95 %: 10^{middle - half:.2f} – 10^{middle + half:.2f})"

    @property
    def verdict(self) -> str:
        """Whether to trust the figure, and what to do if not."""
        if self.log10_value == -math.inf:
            return f"none of {self.evaluations:,} proposals satisfied the controls: fit the lookahead on more texts"
        effective = self.effective_share * self.evaluations
        said = f"{effective:.0f} effective texts, largest weight {self.largest_share:.1%}, Pareto k̂ {self.pareto_k:.2f}"
        if self.ending is not None:
            said += f", {100 * self.ending.mean:.3g} % of the model's texts end in time"
        return f"{said}: {'to be trusted' if self.trusted else 'not to be trusted; draw more texts'}"

    @property
    def comparison(self) -> str:
        """Plain Monte Carlo at the same cost: drawn if that was asked for, else computed from the value."""
        count = self.evaluations + self.pilot + self.plain
        ended = count if self.ending is None else count * self.ending.mean
        said = f"plain Monte Carlo with as many texts ({count:,})"
        if self.monte_carlo is not None:
            share, low, high = self.monte_carlo
            return f"{said}: {share:.3g} (95 %: {low:.3g} – {high:.3g}), from {share * ended:.0f} texts that fit"
        hits = self.value * ended
        error = math.sqrt((1 - min(1.0, self.value)) / hits) if hits > 0 else math.inf
        return (
            f"{said} would see about {hits:.2g} that fit and have a relative standard error of {error:.2g} "
            f"(here {self.relative_error:.2g}); computed, not drawn"
        )


def probability(
    target: Target | Problem,
    texts: int = 2048,
    seed: int = 0,
    lookahead: Lookahead | None = None,
    progress: bool = True,
    *,
    keep: bool = False,
    monte_carlo: bool = False,
    checkpoint: str | Path | None = None,
    resume: bool = True,
    workers: int | str = 1,
) -> Probability:
    """P(controls) of a model, unbiased for any lookahead; one is fitted on half as many texts if none is given.

    Where texts must end, P(controls | the text ends): P(controls and end) over P(end), the latter from texts of the
    model itself; the interval holds the errors of both.

    With ``keep`` that one is put into the user's cache, or taken from it. With ``monte_carlo`` as many texts of the
    model itself are drawn, too, to compare. With ``checkpoint``, a folder, all this is kept there as it goes along, and
    the same call goes on with it; without ``resume`` a folder that holds a run is refused. ``workers`` is a number of
    processes that draw the texts, or a Ray cluster, as `sample` has it; the lookahead is fitted in this process.
    """
    with open_kept(checkpoint, resume, workers) as kept:
        return estimate(target, texts, seed, lookahead, progress, keep=keep, monte_carlo=monte_carlo, kept=kept)


@contextlib.contextmanager
def open_kept(checkpoint: str | Path | None, resume: bool, workers: int | str) -> Iterator[Checkpoint | None]:
    """The checkpoint of a probability, refused before there is a target if it is that of another run; or none."""
    if checkpoint is None and workers == 1:
        yield None
        return
    from structured_voronoi.run.checkpoints import open_checkpoint

    with open_checkpoint(checkpoint, resume, workers, KIND) as kept:
        yield kept


def estimate(
    target: Target | Problem,
    texts: int,
    seed: int,
    lookahead: Lookahead | None,
    progress: bool,
    *,
    keep: bool,
    monte_carlo: bool,
    kept: Checkpoint | None,
) -> Probability:
    """What `probability` returns, by means of a checkpoint that is open."""
    check_count(texts=texts)
    problem, pilot = bind(target), 0 if lookahead is not None else max(256, texts // 2)
    check_autoregressive(problem, "a probability")
    try:
        log_bound(problem)
        if kept is not None:
            from structured_voronoi.run.stored import describe

            asked = {"texts": texts, "seed": seed, "monte_carlo": monte_carlo, "lookahead": describe(lookahead)}
            kept.begin(KIND, problem, asked)
        if lookahead is None:
            if problem.has_patterns:
                check_patterns(problem)
            fit = partial(_fit, problem, pilot, seed, keep, progress)
            lookahead = fit() if kept is None else kept.lookahead("lookahead", problem, fit)
        ending = 0 if problem.ended is None else max(LEAST_PLAIN, texts // 2)
        plain = texts + pilot + ending if monte_carlo else 0
        blocks = Blocks(problem, lookahead, seed, progress, kept, texts + ending + plain)
        if kept is not None and kept.is_spread:
            from structured_voronoi.run.spread import SpreadCheckpoint
            from structured_voronoi.run.spread_blocks import spread_blocks

            assert isinstance(kept, SpreadCheckpoint)
            spread_blocks(kept, blocks, {"probability": texts, "ending": ending, "monte carlo": plain})
        found = summarise_weights(blocks.look("probability", texts).numpy())
        if ending:
            found = _given_the_end(blocks, found, ending)
        return replace(found, pilot=pilot, monte_carlo=_monte_carlo(blocks, plain) if plain else None)
    except NoBoundError as error:
        cause = str(error).split(";")[0]
        remedy = "a probability needs a `bound`, too: declare one that scores never exceed"
        raise NoBoundError(f"{cause}; {remedy}") from error


def _fit(problem: Problem, pilot: int, seed: int, keep: bool, progress: bool) -> Lookahead:
    """A lookahead for the target; one that is kept has a seed of its own, so that runs with any seed find it."""
    if keep:
        return kept_lookahead(problem, pilot, 0, progress)
    return Lookahead.fit(problem, texts=pilot, seed=seed, progress=progress)


@dataclass
class Blocks:
    """Texts in blocks, and what is found of each text; what was found may be kept as it goes along."""

    problem: Problem
    lookahead: Lookahead
    seed: int
    progress: bool
    kept: Checkpoint | None
    all_texts: int
    """Of all streams together."""
    done: int = 0

    def look(self, stream: str, texts: int) -> Tensor:
        """What is found with each text's own stream: a row a text."""
        kept, name, (label, _) = self.kept, prefix_of(stream), STREAMS[stream]
        parts = [] if kept is None else [kept.get(part) for part in kept.names(name)]
        stored, begun = len(parts), sum(map(len, parts))
        self.done += begun
        holding = contextlib.nullcontext() if kept is None else kept.stopping
        with progress_bar(texts, self.progress, label) as tick, holding:
            tick("", begun)
            for begin in range(begun, texts, AT_A_TIME):
                numbers = range(begin, min(begin + AT_A_TIME, texts))
                parts.append(self.find(stream, numbers))
                self.done += len(numbers)
                if kept is not None and (kept.is_due or numbers.stop == texts):
                    kept.put(f"{name}{len(kept.names(name)):06}", torch.cat(parts[stored:]))
                    kept.reach(self.done, self.all_texts, "texts")
                    kept.save()
                    stored = len(parts)
                tick("", len(numbers))
        return torch.cat(parts)

    def find(self, stream: str, numbers: range) -> Tensor:
        """What is found of the texts with these numbers."""
        _, find = STREAMS[stream]
        return find(self.problem, self.lookahead, Rng(self.seed, numbers, stream, self.problem.device)).cpu()


def _find_weights(problem: Problem, lookahead: Lookahead, rng: Rng) -> Tensor:
    """log of p W / q of draws of the lookahead; an error where a score exceeds its bound."""
    drawn = lookahead.draw(problem, rng.uniform(problem.length))
    if not problem.normalised:
        log_acceptance(problem, drawn.tokens, drawn.log_rest)
    log_weight: Tensor = drawn.log_weight.cpu().double() - log_bound(problem)
    return log_weight


def _find_ended(problem: Problem, lookahead: Lookahead, rng: Rng) -> Tensor:
    """Which of the model's own texts have ended."""
    return which_ended(problem, ancestral_draw(problem, rng).tokens)


def _find_hits(problem: Problem, lookahead: Lookahead, rng: Rng) -> Tensor:
    """Which of the model's own texts rejection would accept, and which have ended."""
    tries = Rejection().tries(problem, rng, torch.zeros_like(rng.chains))
    return torch.stack([tries.accepted, which_ended(problem, tries.tokens)], dim=-1)


STREAMS: dict[str, tuple[str, Callable[[Problem, Lookahead, Rng], Tensor]]] = {
    "probability": ("weighted texts", _find_weights),
    "ending": ("texts that end", _find_ended),
    "monte carlo": ("plain texts", _find_hits),
}
"""The random streams of texts, what these are called, and what is found of them."""


def prefix_of(stream: str) -> str:
    """With what the names of parts begin that hold what was found."""
    return f"{stream.replace(' ', '-')}-"


def _monte_carlo(blocks: Blocks, texts: int) -> Interval:
    """The share of the model's own texts, of those that end if they must, that rejection would accept."""
    hits, ended = blocks.look("monte carlo", texts).sum(0).tolist()
    return wilson(hits, max(1, ended))


def _given_the_end(blocks: Blocks, found: Probability, texts: int) -> Probability:
    """The probability divided by that of ending, with the errors of both."""
    ended = int(blocks.look("ending", texts).sum())
    if not ended:
        refuse_endless(blocks.problem, texts, ended, -math.inf)
    share = wilson(ended, texts)
    if found.log10_value == -math.inf:
        return replace(found, ending=share, plain=texts)
    relative = math.hypot(found.relative_error, math.sqrt((1 - share.mean) / ended))
    log_value = found.log10_value * math.log(10) - math.log(share.mean)
    low, value, high = (math.exp(log_value + z * relative) for z in (-1.96, 0.0, 1.96))
    return replace(
        found,
        value=min(1.0, value),
        low=min(1.0, low),
        high=min(1.0, high),
        log10_value=min(0.0, log_value / math.log(10)),
        relative_error=relative,
        trusted=found.trusted and ended >= LEAST_EFFECTIVE,
        ending=share,
        plain=texts,
    )


def summarise_weights(log_weight: Float[ndarray, " text"]) -> Probability:
    """The mean of the weights, with an interval on the log scale, on which their mean is closer to normal."""
    count, largest = len(log_weight), log_weight.max()
    if not math.isfinite(largest):
        return Probability(0.0, 0.0, 1.0, -math.inf, math.inf, 0.0, 1.0, math.inf, False, count)
    weight = np.exp(log_weight - largest)
    mean, error = weight.mean(), weight.std(ddof=1) / math.sqrt(count) if count > 1 else weight.mean()
    log_value, relative = float(math.log(mean) + largest), float(error / mean)
    low, value, high = (math.exp(log_value + z * relative) for z in (-1.96, 0.0, 1.96))
    share, top = share_of(torch.from_numpy(log_weight)), float(weight.max() / weight.sum())
    pareto = _pareto_k(log_weight)
    trusted = share * count >= LEAST_EFFECTIVE and top <= MOST_LARGEST and pareto <= MOST_PARETO
    log10 = log_value / math.log(10)
    return Probability(value, low, min(1.0, high), log10, relative, share, top, pareto, trusted, count)


def _pareto_k(log_weight: Float[ndarray, " text"]) -> float:
    """Of the weights that are not 0; equal weights have no tail."""
    from arviz_stats.base import array_stats

    positive = log_weight[np.isfinite(log_weight)]
    if len(positive) < 25:
        return math.inf
    if len(np.unique(np.round(positive, 9))) < 25:  # hardly a tail to be fitted
        return 0.0
    try:
        with np.errstate(all="ignore"):  # equal weights at the beginning of the tail
            k = float(array_stats.psislw(-positive)[1])  # made for log-likelihoods: their negatives are log-weights
    except ValueError:  # a tail of equal weights
        return 0.0
    return k if math.isfinite(k) else 0.0
