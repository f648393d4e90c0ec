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

ENOUGH = 10
"""Effective texts without which there is no judging."""


class Examples(NamedTuple):
    """Texts, their shares of the target, and the share of the model's texts that is the target's."""

    tokens: Int[Tensor, "text n"]
    share: Float[Tensor, " text"]
    chance: float

    def evaluations(self, problem: Problem, lookahead: Lookahead) -> float:
        """What a text costs, about: (E_π[√w])² / Z. E_π[w] / Z would be swayed by one text, exp E_π[log w] by none."""
        log_weight = lookahead.score(problem, self.tokens).log_weight - log_bound(problem)
        return float((self.share * (log_weight / 2).exp()).sum() ** 2 / self.chance)


def find_examples(problem: Problem, levels: Float[Tensor, "text n"], first: int) -> Examples | None:
    """Those among the first texts of the model or, if that can be enough, among all; None where there are too few."""
    tokens, chance = _accept(problem, levels[:first])
    if _effective(chance) < ENOUGH <= _effective(chance) * len(levels) / first:
        more, more_chance = _accept(problem, levels[first:])
        tokens, chance, first = torch.cat([tokens, more]), torch.cat([chance, more_chance]), len(levels)
    if _effective(chance) < ENOUGH:
        return None
    return Examples(tokens, chance / chance.sum(), float(chance.sum()) / first)


def _accept(problem: Problem, levels: Float[Tensor, "text n"]) -> tuple[Int[Tensor, "some n"], Float[Tensor, " some"]]:
    """Texts of the model that the target allows, and the chance of each to be accepted as one of its own."""
    plain = draw_all(problem, levels, "a lookahead")
    chance = widened(plain.log_rest - log_bound(problem)).exp().nan_to_num(0.0).clamp(max=1.0)
    return plain.tokens[chance > 0], chance[chance > 0]


def _effective(chance: Float[Tensor, " text"]) -> float:
    return float(chance.sum() ** 2 / (chance**2).sum()) if len(chance) else 0.0
