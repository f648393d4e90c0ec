"""Guided rejection with a lookahead that is fitted beforehand, so that fitting and sampling are timed separately."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from structured_voronoi.core.streams import Rng
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.metrics.weights import effective_share, find_caps
from structured_voronoi.problem.drawing import log_bound
from structured_voronoi.problem.problem import bind
from structured_voronoi.samplers.rejection import Rejection
from structured_voronoi.targets.controlled import ControlledTarget


class FittedGuided(NamedTuple):
    sampler: Rejection
    """Rejection from the lookahead's proposal, with the cap for the tolerance."""
    share: float
    """Effective share of the proposals."""


def fit_guided(target: ControlledTarget, texts: int, seed: int) -> FittedGuided:
    """Fit a lookahead on ``texts`` texts and find its cap on half as many."""
    return measure_guided(Lookahead.fit(target, texts, seed), target, texts, seed)


def measure_guided(
    lookahead: Lookahead, target: ControlledTarget, texts: int, seed: int, tolerance: float = 0.003
) -> FittedGuided:
    """Find the cap of a lookahead from max(256, ``texts`` / 2) proposals; it may be fitted to a similar target."""
    problem = bind(target)
    rng = Rng(seed, max(256, texts // 2), "guiding", problem.device)
    log_weight = lookahead.draw(problem, rng.uniform(problem.length)).log_weight - log_bound(problem)
    weight = log_weight.exp().cpu().numpy()
    cap = float(find_caps(weight, tolerance, math.inf).cap.min())
    return FittedGuided(Rejection(lookahead=lookahead, log_cap=math.log(cap)), effective_share(weight))


def satisfies_all(target: ControlledTarget, tokens: Int[Tensor, "text n"]) -> Bool[Tensor, " text"]:
    """Whether every control gives a text a probability above ½."""
    scores = target.control_log_probs(tokens).values()
    return torch.stack([score.double().exp() > 0.5 for score in scores]).all(0)
