"""Texts of the model that satisfy the target, by which lookaheads are judged: they show what one hardly ever draws."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.problem.drawing import draw_all, log_bound
from structured_voronoi.problem.problem import Problem
from structured_voronoi.streams import widened

ENOUGH = 20
"""Effective texts without which there is no judging."""


class Examples(NamedTuple):
    """Texts and their shares of the target."""

    tokens: Int[Tensor, "text n"]
    share: Float[Tensor, " text"]

    def perplexity_share(self, problem: Problem, lookahead: Lookahead) -> float:
        """exp(-KL(π ‖ q)) but for a constant: how probable the texts are as proposals."""
        return float((-(self.share * lookahead.score(problem, self.tokens).log_weight).sum()).exp())

    def effective_share(self, problem: Problem, lookahead: Lookahead) -> float:
        """1 / E_π[w] but for a constant: the share of draws that count, swayed by the rarest of the texts."""
        return float((-(self.share.log() + lookahead.score(problem, self.tokens).log_weight).logsumexp(0)).exp())


def find_examples(problem: Problem, levels: Float[Tensor, "text n"], first: int) -> Examples | None:
    """Those among the first texts of the model or, if that can be enough, among all; None where there are too few."""
    tokens, chance = _accept(problem, levels[:first])
    if _effective(chance) < ENOUGH <= _effective(chance) * len(levels) / first:
        more, more_chance = _accept(problem, levels[first:])
        tokens, chance = torch.cat([tokens, more]), torch.cat([chance, more_chance])
    return Examples(tokens, chance / chance.sum()) if _effective(chance) >= ENOUGH else None


def _accept(problem: Problem, levels: Float[Tensor, "text n"]) -> tuple[Int[Tensor, "some n"], Float[Tensor, " some"]]:
    """Texts of the model that the target allows, and the chance of each to be accepted as one of its own."""
    plain = draw_all(problem, levels, "a lookahead")
    chance = widened(plain.log_rest - log_bound(problem)).exp().nan_to_num(0.0).clamp(max=1.0)
    return plain.tokens[chance > 0], chance[chance > 0]


def _effective(chance: Float[Tensor, " text"]) -> float:
    return float(chance.sum() ** 2 / (chance**2).sum()) if len(chance) else 0.0
