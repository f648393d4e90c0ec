"""Guided sampling made ready for an experiment: its lookahead is fitted anew, so that its seconds can be counted."""

from __future__ import annotations

from typing import NamedTuple

from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.run.choice import guided_moves
from structured_voronoi.run.probability import probability
from structured_voronoi.samplers.guided import Guided
from structured_voronoi.targets.controlled import Controlled


class FittedGuided(NamedTuple):
    sampler: Guided
    steps: int
    """After which hardly a text depends on its start."""
    share: float
    """Effective share of the proposals: an effective text takes 1/share of them."""


def fit_guided(target: Controlled, texts: int, seed: int) -> FittedGuided:
    """With a lookahead that learnt from so many texts, and was measured on half as many."""
    return measure_guided(Lookahead.fit(target, texts, seed, progress=False), target, texts, seed)


def measure_guided(lookahead: Lookahead, target: Controlled, texts: int, seed: int) -> FittedGuided:
    """With a lookahead, of this target or of one like it, that is measured on half as many texts."""
    share = probability(target, max(64, texts // 2), seed, lookahead, progress=False).effective_share
    tries, choices = guided_moves(share)
    return FittedGuided(Guided(lookahead, tries), choices - 1, share)
