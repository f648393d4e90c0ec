"""`auto`: the sampler that will have drawn texts soonest, and the settings of guided sampling.

It goes by the seconds that a text takes, as a pilot on this machine measures them:

* rejection: seconds of a try over the share of tries that are accepted;
* guided: evaluations that a text needs, which follow from the effective share of the lookahead's own draws;
* svs+refresh: steps of a chain times the seconds of a step.

Tries come first. A lookahead is fitted only if rejection would take longer for all texts than the fitting, and is kept
in the user's cache; one that is there already costs nothing. Once it is fitted its seconds are spent, so that only
those of the draws are compared. svs+refresh is nearly always the slowest and is timed only where the others look bad.
The pilot's own texts are not given out as draws: how many there are depends on what they are. What it found is kept
with the lookahead, so that the next run begins to draw at once. Where there are several prompts, the lookahead of the
first serves those after which its draws are worth enough; texts are exact with any.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from structured_voronoi.contracts import Chains, tune
from structured_voronoi.errors import NoBoundError, NoStartError, SamplingError
from structured_voronoi.lookahead.kept import MOST_SECONDS, find_kept, fit_to_keep, kept_folder
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.lookahead.rounds import share_of
from structured_voronoi.problem.drawing import ENDLESS, ancestral_draw, count_ended, log_bound, refuse_endless
from structured_voronoi.problem.problem import Problem
from structured_voronoi.progress import progress_bar, show_note
from structured_voronoi.run.guided_moves import BEST, guided_moves, leftover
from structured_voronoi.run.presets import Scale, text_sampler, total_steps
from structured_voronoi.samplers.guided import Guided
from structured_voronoi.samplers.rejection import LEAST_TRIES, Rejection
from structured_voronoi.streams import Rng

LOOKAHEAD_TEXTS, LOOKAHEAD_SEED = 2048, 0
"""Of the pilot that a lookahead learns from; its seed is not the run's, so that runs with other seeds find it kept."""
FITTED = 2.0
"""Texts that fitting a lookahead draws for each of those that it learns from."""
TRAINING_SECONDS = 12.0
"""Of a lookahead, besides its texts; a rough guess, to see whether rejection would be done sooner."""
CHECKED, WAVE, LEAST_SECONDS = 128, 32, 10.0
"""Of the pilot: tries of rejection, or draws of a lookahead, how many of them are drawn and timed at a time, and the
seconds after which fewer must do."""
ENOUGH, PART = 4.0, 0.25
"""Accepted tries that suffice; fewer are waited for as long as tries take this part of fitting a lookahead."""
PILOT_CHAINS, PILOT_STEPS = 8, 2
"""Of the pilot of svs+refresh."""
UNSURE, MOST_CHECKED = 4.0, 512
"""With fewer effective texts a check of a lookahead says little: more are drawn, and svs+refresh is tried, too."""
SHARED = 0.1
"""The effective share that the lookahead of one prompt must have after another to be used there."""
OFTEN, DOUBT = 0.1, 0.05
"""Controls that so many texts of the model satisfy are met by chance; how sure a bound on the share of others is."""


class Draws(NamedTuple):
    """Texts of a pilot, of the model or of a lookahead."""

    log_weight: Float[ndarray, " text"]
    """log of W or of p W / q: the mean of either is E_p[W], the share of tries that rejection accepts."""
    seconds: float
    """Of one text, in the fastest wave: other programs disturbed that least."""

    def joined(self, other: Draws) -> Draws:
        return Draws(np.concatenate([self.log_weight, other.log_weight]), min(self.seconds, other.seconds))

    @property
    def texts(self) -> int:
        return len(self.log_weight)

    @property
    def mean(self) -> float:
        return float(np.exp(self.log_weight).mean())

    @property
    def share(self) -> float:
        return share_of(torch.from_numpy(self.log_weight))

    @property
    def effective(self) -> float:
        return self.share * self.texts


class Guide(NamedTuple):
    """A lookahead, where it comes from, and draws by which it is judged."""

    lookahead: Lookahead
    origin: str
    """What it is, in words."""
    draws: Draws

    @property
    def is_doubtful(self) -> bool:
        """Were its draws worth little, though there were many, or nothing at all?"""
        few = self.draws.effective < UNSURE and self.draws.texts >= MOST_CHECKED
        return few or not self.draws.share


class Offer(NamedTuple):
    """The seconds of a text by some sampler, infinite where it cannot draw any, and what they come from."""

    seconds: float
    note: str

    def __str__(self) -> str:
        return f"{f'{self.seconds:.2g} s' if self.seconds < math.inf else 'not possible'} ({self.note})"


class Choice(NamedTuple):
    """A sampler's name, one sentence that says why, and the lookahead that was fitted on the way, if any."""

    name: str
    reason: str
    guide: Guide | None = None
    seconds: float = 0.0
    """Of a text, as the pilot has it."""


def choose_sampler(
    problem: Problem,
    count: int,
    scale: Scale,
    warmup: int | None,
    thin: int,
    seed: int,
    progress: bool,
    other: Lookahead | None = None,
) -> Choice:
    """The sampler that will have drawn ``count`` texts soonest; an error where none can draw any.

    The lookahead of an ``other`` prompt is tried before one is fitted for this one.
    """
    if not problem.is_autoregressive or problem.temperature != 1.0:
        return Choice("svs", "svs, because the tokens of this target cannot be redrawn")
    if problem.normalised:
        return Choice("ancestral", "ancestral, because nothing weighs on the language model's own draws")
    try:
        log_bound(problem)
        home = kept_folder(problem, LOOKAHEAD_TEXTS, LOOKAHEAD_SEED)
        kept = find_kept(problem, home)
        tries = _noted(home, "tries") or _draw_tries(problem, seed, kept is None and other is None, progress)
    except NoBoundError as error:
        return Choice("svs+refresh", f"svs+refresh, because {_cause(error)}")

    fitting = _fitting_seconds(tries)
    saved = tries.seconds * (_over(1, tries.mean) - BEST)  # by the best of lookaheads
    if kept is None and count * saved <= fitting:
        seconds = tries.seconds / tries.mean
        cost = f"{seconds:.2g} s a text, {tries.mean:.2g} of tries accepted"
        why = f"rejection ({cost}), because fitting a lookahead would take about {fitting:.0f} s"
        return Choice("rejection", why, None, seconds)

    guide, offers = None, {}
    try:
        guide = _make_guide(problem, home, kept, count, other, seed, progress)
        _note(home, "tries", tries)
        offers["guided"] = _offer_of_guided(guide, warmup, thin)
    except SamplingError as error:
        offers["guided"] = Offer(math.inf, _cause(error))
    accepted = max([tries, guide.draws] if guide else [tries], key=lambda draws: draws.effective).mean
    said = f"{accepted:.2g} of tries accepted" if accepted else f"none of {tries.texts:,} tries accepted"
    offers["rejection"] = Offer(_over(tries.seconds, accepted), said)
    if guide is None or guide.is_doubtful:
        steps = total_steps(warmup, thin)
        with progress_bar(1, progress, "trying svs+refresh"):
            offers["svs+refresh"] = _offer_of_svs(problem, min(count, PILOT_CHAINS), steps, seed, scale)

    compared = ", ".join(f"{name} {offer}" for name, offer in offers.items())
    name = min(offers, key=lambda name: offers[name].seconds)
    if math.isinf(offers[name].seconds):
        _refuse_endless_texts(problem, seed)
        raise NoStartError(
            f"no sampler found a text that fits: {compared}; loosen the control, lengthen the text, or give a prompt "
            "that leads there"
        )
    return Choice(name, f"{name}, by seconds a text in a pilot: {compared}", guide, offers[name].seconds)


def _refuse_endless_texts(problem: Problem, seed: int) -> None:
    """Say so, if the reason is that texts hardly ever end."""
    if problem.ended is not None:
        texts = ancestral_draw(problem, Rng(seed, ENDLESS, "choice", problem.device)).tokens
        refuse_endless(problem, ENDLESS, count_ended(problem, texts), -math.inf)


def _offer_of_guided(guide: Guide, warmup: int | None, thin: int) -> Offer:
    tries, choices = guided_moves(guide.draws.log_weight)
    said = f"effective share {guide.draws.share:.2g}; its lookahead {guide.origin}"
    steps = total_steps(warmup, thin, choices - 2)
    return Offer(guide.draws.seconds * tries * (steps + 1) if guide.draws.share else math.inf, said)


def _offer_of_svs(problem: Problem, chains: int, steps: int, seed: int, scale: Scale) -> Offer:
    """Of svs+refresh, by a few steps; none where no chain can be started."""
    sampler = text_sampler("svs+refresh", scale, problem.embeddings.shape[1])
    try:
        running = Chains(tune(sampler, problem, seed), problem, Rng(seed, chains, "choice", problem.device))
    except NoStartError:
        return Offer(math.inf, "no start found")
    began = perf_counter()
    taken = len(list(islice(running, PILOT_STEPS)))
    return Offer(steps * (perf_counter() - began) / taken / chains, f"{steps} steps")


class GuidedPlan(NamedTuple):
    """Settings, steps of each chain, and how far texts will depend on their start."""

    sampler: Guided
    steps: int
    mixing: str


def plan_guided(
    problem: Problem,
    guide: Guide | None,
    count: int,
    warmup: int | None,
    thin: int,
    seed: int,
    progress: bool,
    other: Lookahead | None = None,
) -> GuidedPlan:
    """Guided sampling with as many tries and steps as its lookahead needs; one is made if none is given."""
    if guide is None:
        home = kept_folder(problem, LOOKAHEAD_TEXTS, LOOKAHEAD_SEED)
        guide = _make_guide(problem, home, find_kept(problem, home), count, other, seed, progress)
    log_weight = guide.draws.log_weight
    tries, choices = guided_moves(log_weight)
    steps = total_steps(warmup, thin, choices - 2)
    left = leftover(log_weight, tries, steps + 1)
    mixing = f"each chosen {steps + 1} times among {tries}: about {left:.1g} of them depend on their start"
    return GuidedPlan(Guided(guide.lookahead, tries), steps, mixing)


def _make_guide(
    problem: Problem,
    home: Path,
    kept: Lookahead | None,
    count: int,
    other: Lookahead | None,
    seed: int,
    progress: bool,
) -> Guide:
    """The lookahead of the cache, or that of another prompt if it will do, or a new one that is put into the cache.

    Draws of the first and the last are noted there, too.
    """
    log_bound(problem)
    if kept is None and other is not None:
        lookahead = other.adopted(problem)
        draws = _draw_guided(problem, lookahead, seed)
        if (
            draws.share >= SHARED
            and count * (math.prod(guided_moves(draws.log_weight)) - BEST) <= FITTED * LOOKAHEAD_TEXTS
        ):
            return Guide(lookahead, "is that of the first prompt", draws)
    began = perf_counter()
    lookahead = kept or fit_to_keep(problem, home, LOOKAHEAD_TEXTS, LOOKAHEAD_SEED, progress)
    origin = "was kept" if kept else f"took {perf_counter() - began:.1f} s and is kept"
    noted = _noted(home, "guided")
    draws = noted or _draw_guided(problem, lookahead, seed)
    if noted is None:
        _note(home, "guided", draws)
    return Guide(lookahead, origin, draws)


def _draw_guided(problem: Problem, lookahead: Lookahead, seed: int) -> Draws:
    """Draws of a lookahead: as many as show its heavy weights, or as there is time for."""
    bound = log_bound(problem)

    def weigh(rng: Rng) -> Tensor:
        return lookahead.draw(problem, rng.uniform(problem.length)).log_weight - bound

    draws = _draw_in_waves(problem, weigh, range(WAVE), seed)
    while draws.texts * draws.seconds < LEAST_SECONDS and draws.texts < MOST_CHECKED:
        draws = draws.joined(_draw_in_waves(problem, weigh, range(draws.texts, 2 * draws.texts), seed))
    return draws


def _note(home: Path, name: str, draws: Draws) -> None:
    """Keep the weights of a pilot with a kept lookahead; a folder that cannot be written is done without."""
    weights = [weight if math.isfinite(weight) else None for weight in draws.log_weight.tolist()]
    unfinished = home / f"{name}.{os.getpid()}"
    with contextlib.suppress(OSError):
        unfinished.write_text(json.dumps({"log_weight": weights, "seconds": draws.seconds}), encoding="utf-8")
        os.replace(unfinished, home / f"{name}.json")


def _noted(home: Path, name: str) -> Draws | None:
    """A pilot that was kept; none where there is none or it is damaged."""
    try:
        kept = json.loads((home / f"{name}.json").read_text(encoding="utf-8"))
        weights = [-math.inf if weight is None else float(weight) for weight in kept["log_weight"]]
        return Draws(np.array(weights), float(kept["seconds"])) if weights else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _draw_tries(problem: Problem, seed: int, may_fit: bool, progress: bool) -> Draws:
    """Tries of rejection: more and more, if a lookahead may have to be fitted, until enough of them are accepted."""
    texts: list[Tensor] = []

    def weigh(rng: Rng) -> Tensor:
        tried = Rejection().tries(problem, rng, torch.zeros_like(rng.chains))
        texts.append(tried.tokens)
        return tried.log_chance

    with progress_bar(1, progress, "trying rejection"):
        tries = _draw_in_waves(problem, weigh, range(WAVE), seed)
        while (tries.texts < CHECKED and tries.texts * tries.seconds < LEAST_SECONDS) or (
            may_fit
            and tries.mean * tries.texts < ENOUGH
            and tries.texts * tries.seconds < PART * _fitting_seconds(tries)
        ):
            show_note(f"{tries.mean * tries.texts:.2g} of {tries.texts} tries accepted")
            tries = tries.joined(_draw_in_waves(problem, weigh, range(tries.texts, 2 * tries.texts), seed))
    if may_fit and tries.texts >= LEAST_TRIES and not np.isfinite(tries.log_weight).any():
        _refuse_hopeless(problem, texts)
    return tries


def _refuse_hopeless(problem: Problem, waves: list[Int[Tensor, "text n"]]) -> None:
    """Give up on what none of these texts of the model satisfies, if nothing leads there.

    A lookahead learns from texts that satisfy a factor, or from its pattern. Chains look for a start by meeting one
    factor after the other, which does not help where the others are met anyway.
    """
    if problem.log_factors is None:
        return
    answers = [problem.log_factors(texts) for texts in waves]
    possible = {name: torch.cat([answer[name].isfinite() for answer in answers]) for name in answers[0]}
    unmet = [name for name in possible if name not in problem.patterns and not possible[name].any()]
    others = [possible[name].float() for name in possible if name not in unmet]
    texts = sum(map(len, waves))
    if unmet and (not others or float(torch.stack(others).prod(0).mean()) >= OFTEN):
        raise NoStartError(
            f"none of {texts:,} texts of the model satisfied {' or '.join(unmet)}, so that at most 1 in "
            f"{texts / -math.log(DOUBT):,.0f} does (95 %), and it is no pattern that would lead there; loosen it, give "
            "a prompt after which it is likelier, write it as a keyword or regex, or wait longer with --sampler "
            "rejection --patience SECONDS"
        )


def _fitting_seconds(tries: Draws) -> float:
    """Of a lookahead, guessed from the speed of tries: to choose among candidates takes as many texts again."""
    return min(FITTED * tries.seconds * LOOKAHEAD_TEXTS + TRAINING_SECONDS, MOST_SECONDS)


def _draw_in_waves(problem: Problem, weigh: Callable[[Rng], Tensor], numbers: range, seed: int) -> Draws:
    parts, seconds = [], math.inf
    for begin in numbers[::WAVE]:
        rng, began = Rng(seed, range(begin, begin + WAVE), "choice", problem.device), perf_counter()
        log_weight = weigh(rng).cpu().double()
        seconds = min(seconds, (perf_counter() - began) / WAVE)
        parts.append(torch.where(log_weight.isfinite(), log_weight, -math.inf).numpy())
    return Draws(np.concatenate(parts), seconds)


def _over(cost: float, share: float) -> float:
    return cost / share if share > 0 else math.inf


def _cause(error: SamplingError) -> str:
    """What an error says before its remedy."""
    return str(error).split(";")[0]
