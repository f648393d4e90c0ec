"""How a lookahead is fitted: heads of every size trained on one pilot, a choice among them, rounds of its draws."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch
from jaxtyping import Float
from torch import Tensor

from structured_voronoi.errors import SamplingError, check_count, check_positive
from structured_voronoi.lookahead.examples import ENOUGH, WANTED, Examples, find_examples
from structured_voronoi.lookahead.heads import SIZES, Head, LearntHead, PatternHead, Size
from structured_voronoi.lookahead.lookahead import Lookahead, untrained
from structured_voronoi.lookahead.pilot import Pilot, draw_pilot
from structured_voronoi.lookahead.reading import factor_names, live_positions
from structured_voronoi.lookahead.rounds import ROUNDS, refine_in_rounds
from structured_voronoi.lookahead.training import LEAST_LABEL, train_head
from structured_voronoi.problem.drawing import draw_all, log_bound
from structured_voronoi.problem.problem import Problem
from structured_voronoi.progress import Tick, progress_bar
from structured_voronoi.streams import Rng

CHECKED, LEAST_CHECKED = 128, 16
"""Texts that a size draws to be judged by, where there are no examples; fewer after a small pilot."""
SEARCHED = (4, 16)
"""Times as many plain texts are searched for examples of the target at first, and in all."""
DELTAS = (0.1, 0.3)
"""Shares of the plain model that are tried. What a lookahead hardly ever draws, its own draws do not show: with 0.001
intervals of probabilities held the truth too seldom, and with 0.03 rare words took up to five times as many
evaluations as its draws said."""
MANY = 512
"""With fewer texts to learn from, only one δ is tried; with as many, heads that remember what was said are better than
those that ask the control about every prefix."""
PREFIX_SECONDS = 1.5
"""Of a draw for which a control is asked about every prefix, in units of one for which none is."""
TIMED, LEAST_TEXTS, PILOT_PART = 16, 128, 0.3
"""Under a limit in seconds: texts by which the model's speed is measured, the fewest of a pilot, and its part of the
time. To choose a size takes nearly as many texts, and each round half as many, every one of them by heads, too."""


def fit_lookahead(problem: Problem, texts: int, seed: int, progress: bool, seconds: float | None = None) -> Lookahead:
    """The best of several sizes and δ, all trained on one pilot; refined in rounds of its own draws, if it is dear."""
    check_count(texts=texts)
    log_bound(problem)  # without one nothing says what is good
    deadline = math.inf
    if seconds is not None:
        check_positive(seconds=seconds)
        deadline = perf_counter() + seconds
        texts = min(texts, max(LEAST_TEXTS, int(PILOT_PART * seconds / _seconds_of_a_text(problem, seed))))
    with progress_bar(2 * texts, progress, "lookahead") as tick:
        by_size = _train_sizes(problem, texts, seed, tick)
        tick("choosing one", 0)
        checked = max(LEAST_CHECKED, min(CHECKED, texts // 8))
        levels = Rng(seed, SEARCHED[1] * checked, "lookahead check", problem.device).uniform(problem.length)
        examples = find_examples(problem, levels, SEARCHED[0] * checked, WANTED if seconds is None else ENOUGH)
        best = _choose(problem, by_size, _deltas(by_size[0], texts), levels[: 2 * checked], examples)
    has_patterns, has_learnt = (
        any(isinstance(head, kind) for head in best.heads.values()) for kind in (PatternHead, LearntHead)
    )
    if has_learnt and (has_patterns or examples is None):
        return best  # rounds do not help where both kinds are mixed, and cannot be judged without examples
    judge = partial(examples.cost, problem) if examples else None
    with progress_bar(ROUNDS, progress, "refining the lookahead") as tick:
        return refine_in_rounds(problem, best, max(1, texts // 2), seed, tick, judge, deadline)


def _train_sizes(problem: Problem, texts: int, seed: int, tick: Tick) -> list[Lookahead]:
    """A lookahead with heads of every size that is tried, all trained on one pilot."""
    blank = untrained(problem, dict.fromkeys(factor_names(problem), SIZES[0]), DELTAS[0])
    tried = SIZES if texts < MANY else SIZES[: SIZES.index("said") + 1]
    sizes = [size for size in tried if any(size in _possible_sizes(head) for head in blank.heads.values())] or SIZES[:1]
    pilot = draw_pilot(problem, blank, texts, seed, tick)
    _refuse_hopeless(blank, pilot)
    by_size: list[Lookahead] = []
    known: dict[tuple[str, Size], Head] = {}
    for size in sizes:
        by_size.append(_train(problem, _sizes_of(blank, size), pilot, seed, known))
        tick(f"heads on {size}", texts / len(sizes))
    return by_size


def _deltas(lookahead: Lookahead, texts: int) -> tuple[float, ...]:
    """Those to be tried: only the largest where something is learnt from scores. With less, some hundred proposals do
    not show the heavy weights that decide how long chains have to be (docs/results/lookahead.md)."""
    if any(isinstance(head, LearntHead) for head in lookahead.heads.values()):
        return DELTAS[-1:]
    return DELTAS if texts >= MANY else DELTAS[:1]


def _seconds_of_a_text(problem: Problem, seed: int) -> float:
    """Of the model itself, drawn a few at a time; the second time, as the first one is slow."""
    levels = Rng(seed, TIMED, "lookahead check", problem.device).uniform(problem.length)
    draw_all(problem, levels, "a lookahead")
    began = perf_counter()
    draw_all(problem, levels, "a lookahead")
    return (perf_counter() - began) / TIMED


def _choose(
    problem: Problem,
    by_size: list[Lookahead],
    deltas: tuple[float, ...],
    levels: Float[Tensor, "text n"],
    examples: Examples | None,
) -> Lookahead:
    """The size and then the δ whose texts take the least time, by examples of the target or, where there are none, by
    the weights of draws, of which a δ has twice as many."""

    def cost(lookahead: Lookahead, texts: int) -> float:
        if examples is not None:
            return _seconds(lookahead) * examples.cost(problem, lookahead)
        share = perplexity_share(lookahead.draw(problem, levels[:texts]).log_weight)
        return _seconds(lookahead) / share if share else math.inf

    sizes = [replace(one, delta=deltas[0]) for one in by_size]  # the least δ tells them apart best
    best = sizes[0] if len(sizes) == 1 else min(sizes, key=lambda one: cost(one, len(levels) // 2))
    candidates = [replace(best, delta=delta) for delta in deltas]
    return best if len(candidates) == 1 else min(candidates, key=lambda one: cost(one, len(levels)))


def _seconds(lookahead: Lookahead) -> float:
    """Of a draw, in units of one for which no control is asked about prefixes."""
    return PREFIX_SECONDS if any(head.reader.size == "prefix" for head in lookahead.heads.values()) else 1.0


def perplexity_share(log_weight: Float[Tensor, " text"]) -> float:
    """exp(entropy of the weights) / n: much as the effective share, but less swayed by a single weight.

    Lookaheads are compared by it where there are no examples.
    """
    if not log_weight.isfinite().any():
        return 0.0
    log_share = log_weight.log_softmax(-1)
    entropy = -torch.where(log_share.isfinite(), log_share.exp() * log_share, 0.0).sum()
    return float(entropy.exp() / len(log_weight))


def _sizes_of(blank: Lookahead, size: Size) -> dict[str, Size]:
    """The size for every head that can have it, and for others the largest below it."""
    upto = SIZES[: SIZES.index(size) + 1]
    return {name: [one for one in upto if one in _possible_sizes(head)][-1] for name, head in blank.heads.items()}


def _possible_sizes(head: Head) -> tuple[Size, ...]:
    """Patterns know all that matters of what was said; not every control may be asked about prefixes."""
    if isinstance(head, PatternHead):
        return SIZES[: SIZES.index("token") + 1]
    return SIZES if head.is_readable else SIZES[: SIZES.index("said") + 1]


def _refuse_hopeless(lookahead: Lookahead, pilot: Pilot) -> None:
    """Nothing can be learnt of a factor that is 0 on the whole pilot and cannot be compiled."""
    for name, head in lookahead.heads.items():
        if not isinstance(head, PatternHead) and float(pilot.labels[name].max()) <= LEAST_LABEL:
            raise SamplingError(
                f"{name} was satisfied by none of {len(pilot.tokens):,} texts of the model, and it is no pattern that "
                "could be compiled; draw more texts, give a prompt that leads there, or write it as a keyword or regex"
            )


def _train(
    problem: Problem, sizes: dict[str, Size], pilot: Pilot, seed: int, known: dict[tuple[str, Size], Head]
) -> Lookahead:
    """Every head by itself, to the labels of the pilot, unless it is known in this size from before."""
    blank, live = untrained(problem, sizes, DELTAS[0]), live_positions(problem, pilot.tokens).float()
    for name, head in blank.heads.items():
        if (name, sizes[name]) not in known:
            # what was said and what the control says are other features: neither goes on from the other
            smaller = [known[name, size] for size in SIZES[: SIZES.index("token") + 1] if (name, size) in known]
            if head.reader.outputs:
                train_head(head, pilot, pilot.labels[name], live, seed, smaller[-1] if smaller else None)
            known[name, sizes[name]] = head
    return Lookahead({name: known[name, size] for name, size in sizes.items()}, blank.delta, blank.identity)
