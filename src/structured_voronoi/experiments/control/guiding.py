"""Rejection from a lookahead, prepared for an experiment: fitting is done here, so that its seconds can be counted."""

from __future__ import annotations

import math
from typing import NamedTuple

from structured_voronoi.core.streams import Rng
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.metrics.weights import effective_share, find_caps
from structured_voronoi.problem.drawing import log_bound
from structured_voronoi.problem.problem import bind
from structured_voronoi.samplers.rejection import Rejection
from structured_voronoi.targets.controlled import ControlledTarget

TOLERANCE = 0.003


class FittedGuided(NamedTuple):
    sampler: Rejection
    """Rejection from the lookahead, with a cap at which the error is 0.3 %."""
    share: float
    """Effective share of the proposals."""


def fit_guided(target: ControlledTarget, texts: int, seed: int) -> FittedGuided:
    """With a lookahead that learnt from so many texts, and was measured on half as many."""
    return measure_guided(Lookahead.fit(target, texts, seed), target, texts, seed)


def measure_guided(lookahead: Lookahead, target: ControlledTarget, texts: int, seed: int) -> FittedGuided:
    """With a lookahead, of this target or of one like it, whose weights are measured on half as many texts."""
    problem = bind(target)
    rng = Rng(seed, max(256, texts // 2), "guiding", problem.device)
    log_weight = lookahead.draw(problem, rng.uniform(problem.length)).log_weight - log_bound(problem)
    weight = log_weight.exp().cpu().numpy()
    cap = float(find_caps(weight, TOLERANCE, math.inf).cap.min())
    return FittedGuided(Rejection(lookahead=lookahead, log_cap=math.log(cap)), effective_share(weight))
