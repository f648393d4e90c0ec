"""Guided sampling made ready for an experiment: its lookahead is fitted anew, so that its seconds can be counted."""

from __future__ import annotations

from typing import NamedTuple

from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.lookahead.rounds import share_of
from structured_voronoi.problem.problem import bind
from structured_voronoi.run.guided_moves import TRIES, guided_choices
from structured_voronoi.run.pilots import MOST_CHECKED
from structured_voronoi.samplers.guided import Guided
from structured_voronoi.streams import Rng
from structured_voronoi.targets.controlled import Controlled


class FittedGuided(NamedTuple):
    sampler: Guided
    """After a step of which hardly a text depends on its start."""
    share: float
    """Effective share of the proposals: an effective text takes 1/share of them."""


def fit_guided(target: Controlled, texts: int, seed: int) -> FittedGuided:
    """With a lookahead that learnt from so many texts, and was measured on half as many."""
    return measure_guided(Lookahead.fit(target, texts, seed, progress=False), target, texts, seed)


def measure_guided(lookahead: Lookahead, target: Controlled, texts: int, seed: int) -> FittedGuided:
    """With a lookahead, of this target or of one like it, that is measured on half as many texts; its moves follow from
    as many of them as `svs sample` draws where it has the time."""
    problem = bind(target)
    rng = Rng(seed, max(64, texts // 2), "guiding", problem.device)
    log_weight = lookahead.draw(problem, rng.uniform(problem.length)).log_weight
    choices = guided_choices(log_weight[:MOST_CHECKED].cpu().numpy())
    return FittedGuided(Guided(lookahead, TRIES, choices=choices - 1), share_of(log_weight))
