"""`auto`: the sampler that will have drawn texts soonest, and the settings of guided sampling.

It goes by the seconds that a text takes, as a pilot on this machine measures them:

* rejection: seconds of a try over the share of tries that are accepted;
* guided: evaluations that a text needs, which follow from the weights of the lookahead's own draws;
* svs+refresh: steps of a chain times the seconds of a step.

Tries come first. A lookahead is fitted only if rejection would take longer for all texts than the fitting, and is kept
in the user's cache; one that is there already costs nothing. Once it is fitted its seconds are spent, so that only
those of the draws are compared. svs+refresh is nearly always the slowest and is timed only where the others look bad.
The pilot's own texts are not given out as draws: how many there are depends on what they are. What it found is kept
with the lookahead, so that the next run begins to draw at once. Where there are several prompts, the lookahead of the
first serves those after which its draws are worth enough; texts are exact with any.
"""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from structured_voronoi.contracts import Chains, tune
from structured_voronoi.errors import NoBoundError, NoStartError, SamplingError
from structured_voronoi.lookahead.kept import MOST_SECONDS, find_kept, fit_to_keep, kept_folder
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.problem.drawing import ENDLESS, ancestral_draw, count_ended, log_bound, refuse_endless
from structured_voronoi.problem.problem import Problem
from structured_voronoi.progress import progress_bar
from structured_voronoi.run.guided_moves import BEST, TRIES, guided_choices, leftover, texts_drawn
from structured_voronoi.run.pilots import (
    MOST_CHECKED,
    Draws,
    draw_guided,
    draw_tries,
    find_note,
    keep_note,
)
from structured_voronoi.run.presets import Scale, text_sampler, total_steps
from structured_voronoi.samplers.guided import START_TRIES, Guided
from structured_voronoi.streams import Rng

LOOKAHEAD_TEXTS, LOOKAHEAD_SEED = 2048, 0
"""Of the pilot that a lookahead learns from; its seed is not the run's, so that runs with other seeds find it kept."""
FITTED = 2.0
"""Texts that fitting a lookahead draws for each of those that it learns from."""
TRAINING_SECONDS = 12.0
"""Of a lookahead, besides its texts; a rough guess, to see whether rejection would be done sooner."""
TYPICAL = 60
"""Texts that are drawn for a guided one, before anything is known of its lookahead: 25 for one word, 40 under a
classifier, 90 to 170 for two or three words together were measured."""
PART = 0.25
"""Accepted tries are waited for as long as tries take this part of fitting a lookahead."""
UNSURE = 4.0
"""With fewer effective texts a check of a lookahead says little, though there were as many as possible: svs+refresh is
tried, too."""
PILOT_CHAINS, PILOT_STEPS = 8, 2
"""Of the pilot of svs+refresh."""
SHARED = 0.1
"""The effective share that the lookahead of one prompt must have after another to be used there."""


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
        patience = _patience if kept is None and other is None else None
        tries = find_note(home, "tries") or draw_tries(problem, seed, progress, patience)
    except NoBoundError as error:
        return Choice("svs+refresh", f"svs+refresh, because {_cause(error)}")

    fitting = _fitting_seconds(tries)
    saved = tries.seconds * (_over(1, tries.mean) - TYPICAL)  # a text, by a lookahead
    if kept is None and count * saved <= fitting:
        seconds = tries.seconds / tries.mean
        cost = f"{seconds:.2g} s a text, {tries.mean:.2g} of tries accepted"
        why = f"rejection ({cost}), because fitting a lookahead would take about {fitting:.0f} s"
        return Choice("rejection", why, None, seconds)

    guide, offers = None, {}
    try:
        guide = _make_guide(problem, home, kept, count, other, seed, progress)
        keep_note(home, "tries", tries)
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
    sampler, steps = _planned(guide, warmup, thin)
    said = f"effective share {guide.draws.share:.2g}; its lookahead {guide.origin}"
    drawn = START_TRIES + steps * sampler.drawn
    return Offer(guide.draws.seconds * drawn if guide.draws.share else math.inf, said)


def _planned(guide: Guide, warmup: int | None, thin: int) -> tuple[Guided, int]:
    """Settings and steps: as many choices as the weights ask for, in one step or in those that are asked for."""
    steps = total_steps(warmup, thin, 0)
    choices = -(-(guided_choices(guide.draws.log_weight) - 1) // steps)
    return Guided(guide.lookahead, TRIES, choices=choices), steps


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
    """Guided sampling with as many choices as its lookahead needs; one is made if none is given."""
    if guide is None:
        home = kept_folder(problem, LOOKAHEAD_TEXTS, LOOKAHEAD_SEED)
        guide = _make_guide(problem, home, find_kept(problem, home), count, other, seed, progress)
    sampler, steps = _planned(guide, warmup, thin)
    choices = 1 + steps * sampler.choices
    left = leftover(guide.draws.log_weight, sampler.tries, choices)
    mixing = f"each chosen {choices} times among {sampler.tries}: about {left:.1g} of them depend on their start"
    return GuidedPlan(sampler, steps, mixing)


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
        draws = draw_guided(problem, lookahead, seed)
        if (
            draws.share >= SHARED
            and count * (texts_drawn(guided_choices(draws.log_weight)) - BEST) <= FITTED * LOOKAHEAD_TEXTS
        ):
            return Guide(lookahead, "is that of the first prompt", draws)
    began = perf_counter()
    lookahead = kept or fit_to_keep(problem, home, LOOKAHEAD_TEXTS, LOOKAHEAD_SEED, progress)
    origin = "was kept" if kept else f"took {perf_counter() - began:.1f} s and is kept"
    noted = find_note(home, "guided")
    draws = noted or draw_guided(problem, lookahead, seed)
    if noted is None:
        keep_note(home, "guided", draws)
    return Guide(lookahead, origin, draws)


def _patience(tries: Draws) -> float:
    """Seconds that are spent on tries before a lookahead is fitted."""
    return PART * _fitting_seconds(tries)


def _fitting_seconds(tries: Draws) -> float:
    """Of a lookahead, guessed from the speed of tries: to choose among candidates takes as many texts again."""
    return min(FITTED * tries.seconds * LOOKAHEAD_TEXTS + TRAINING_SECONDS, MOST_SECONDS)


def _over(cost: float, share: float) -> float:
    return cost / share if share > 0 else math.inf


def _cause(error: SamplingError) -> str:
    """What an error says before its remedy."""
    return str(error).split(";")[0]
