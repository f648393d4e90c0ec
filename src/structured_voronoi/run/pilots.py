"""Pilots of `auto`: tries of rejection and draws of a lookahead, timed as they are drawn; what they showed is kept.

How many there are depends on what they are, so that they are not given out as draws.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from structured_voronoi.errors import NoStartError
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.lookahead.rounds import share_of
from structured_voronoi.problem.drawing import log_bound
from structured_voronoi.problem.problem import Problem
from structured_voronoi.progress import progress_bar, show_note
from structured_voronoi.samplers.rejection import LEAST_TRIES, Rejection
from structured_voronoi.streams import Rng

CHECKED, WAVE, LEAST_SECONDS = 128, 32, 10.0
"""Tries of rejection; how many of them are drawn and timed at a time, and how many draws of a lookahead at first; and
the seconds after which fewer must do."""
ENOUGH = 4.0
"""Accepted tries that suffice."""
MOST_CHECKED = 512
"""Draws of a lookahead that show its heavy weights, if there is time for them."""
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


def draw_tries(problem: Problem, seed: int, progress: bool, patience: Callable[[Draws], float] | None = None) -> Draws:
    """Tries of rejection; with ``patience`` more and more, for so many seconds, until enough of them are accepted."""
    texts: list[Tensor] = []

    def weigh(rng: Rng) -> Tensor:
        tried = Rejection().tries(problem, rng, torch.zeros_like(rng.chains))
        texts.append(tried.tokens)
        return tried.log_chance

    with progress_bar(1, progress, "trying rejection"):
        tries = draw_in_waves(problem, weigh, range(WAVE), seed)
        while (tries.texts < CHECKED and tries.texts * tries.seconds < LEAST_SECONDS) or (
            patience is not None and tries.mean * tries.texts < ENOUGH and tries.texts * tries.seconds < patience(tries)
        ):
            show_note(f"{tries.mean * tries.texts:.2g} of {tries.texts} tries accepted")
            tries = tries.joined(draw_in_waves(problem, weigh, range(tries.texts, 2 * tries.texts), seed))
    if patience is not None and tries.texts >= LEAST_TRIES and not np.isfinite(tries.log_weight).any():
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


def draw_guided(problem: Problem, lookahead: Lookahead, seed: int) -> Draws:
    """Draws of a lookahead: as many as show its heavy weights, or as there is time for."""
    bound = log_bound(problem)

    def weigh(rng: Rng) -> Tensor:
        return lookahead.draw(problem, rng.uniform(problem.length)).log_weight - bound

    draws = draw_in_waves(problem, weigh, range(WAVE), seed)
    while draws.texts * draws.seconds < LEAST_SECONDS and draws.texts < MOST_CHECKED:
        more = range(draws.texts, 2 * draws.texts)  # in one wave: chains draw as many together
        draws = draws.joined(draw_in_waves(problem, weigh, more, seed, len(more)))
    return draws


def draw_in_waves(
    problem: Problem, weigh: Callable[[Rng], Tensor], numbers: range, seed: int, wave: int = WAVE
) -> Draws:
    parts, seconds = [], math.inf
    for begin in numbers[::wave]:
        rng, began = Rng(seed, range(begin, begin + wave), "choice", problem.device), perf_counter()
        log_weight = weigh(rng).cpu().double()
        seconds = min(seconds, (perf_counter() - began) / wave)
        parts.append(torch.where(log_weight.isfinite(), log_weight, -math.inf).numpy())
    return Draws(np.concatenate(parts), seconds)


def keep_note(home: Path, name: str, draws: Draws) -> None:
    """Keep the weights of a pilot with a kept lookahead; a folder that cannot be written is done without."""
    weights = [weight if math.isfinite(weight) else None for weight in draws.log_weight.tolist()]
    unfinished = home / f"{name}.{os.getpid()}"
    with contextlib.suppress(OSError):
        unfinished.write_text(json.dumps({"log_weight": weights, "seconds": draws.seconds}), encoding="utf-8")
        os.replace(unfinished, home / f"{name}.json")


def find_note(home: Path, name: str) -> Draws | None:
    """A pilot that was kept; none where there is none or it is damaged."""
    try:
        kept = json.loads((home / f"{name}.json").read_text(encoding="utf-8"))
        weights = [-math.inf if weight is None else float(weight) for weight in kept["log_weight"]]
        return Draws(np.array(weights), float(kept["seconds"])) if weights else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
