"""Texts of the model that satisfy the target, by which lookaheads are judged: they show what one hardly ever draws."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.problem.drawing import draw_all
from structured_voronoi.problem.problem import Problem
from structured_voronoi.streams import widened

ENOUGH, WANTED = 10, 30
"""Effective texts without which there is no judging, and with which no more are looked for if there is time."""
MOST = 128
"""Texts that are scored for every lookahead; of more, some are taken by their shares."""


class Examples(NamedTuple):
    """Texts that follow the target."""

    tokens: Int[Tensor, "text n"]
    log_factor: Float[Tensor, " text"]
    """log W of each."""
    share: Float[Tensor, " text"]
    """Of the target."""
    log_mean: float
    """log E_p[W]."""

    def cost(self, problem: Problem, lookahead: Lookahead) -> float:
        """(E_π[√w])² / E_p[W]: 1 for a perfect lookahead, infinite for one that cannot draw these texts.

        An effective text takes E_π[w] / E_p[W] evaluations, which is more; but that can be swayed by a single example.
        """
        scored = lookahead.score(problem, self.tokens)
        log_ratio = (scored.log_p - scored.log_q).sum(-1).nan_to_num(nan=torch.inf, posinf=torch.inf)
        halves = self.share.log() + (log_ratio + self.log_factor) / 2
        return float((2 * halves.logsumexp(0) - self.log_mean).exp())


def find_examples(
    problem: Problem, levels: Float[Tensor, "text n"], first: int, wanted: float = WANTED
) -> Examples | None:
    """Those among the first texts of the model or, if fewer than wanted are there and all can hold enough, among all;
    None where there are too few."""
    tokens, log_factor = _allowed_texts(problem, levels[:first])
    found = _effective(log_factor)
    if found < wanted and found * len(levels) / first >= ENOUGH:
        more, log_factor_of_more = _allowed_texts(problem, levels[first:])
        tokens, log_factor, first = torch.cat([tokens, more]), torch.cat([log_factor, log_factor_of_more]), len(levels)
    if _effective(log_factor) < ENOUGH:
        return None
    share, log_mean = log_factor.softmax(0), float(log_factor.logsumexp(0)) - math.log(first)
    if len(share) > MOST:
        kept = _every_so_often(share)
        tokens, log_factor, share = tokens[kept], log_factor[kept], torch.full_like(log_factor[kept], 1 / MOST)
    return Examples(tokens, log_factor, share, log_mean)


def _allowed_texts(
    problem: Problem, levels: Float[Tensor, "text n"]
) -> tuple[Int[Tensor, "some n"], Float[Tensor, " some"]]:
    """Texts of the model that the target allows, and log W of each."""
    plain = draw_all(problem, levels, "a lookahead")
    log_factor = widened(plain.log_rest)
    return plain.tokens[log_factor.isfinite()], log_factor[log_factor.isfinite()]


def _effective(log_factor: Float[Tensor, " text"]) -> float:
    return float(1 / (log_factor.softmax(0) ** 2).sum()) if len(log_factor) else 0.0


def _every_so_often(share: Float[Tensor, " text"]) -> Int[Tensor, " chosen"]:
    """Texts in proportion to their shares, MOST in all, by even steps along the sum of shares."""
    places = (torch.arange(MOST, device=share.device).to(share) + 0.5) / MOST
    return torch.searchsorted(share.cumsum(0), places).clamp(max=len(share) - 1)
