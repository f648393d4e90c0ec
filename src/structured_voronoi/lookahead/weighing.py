"""Texts that a lookahead proposes, and the distribution of each of their tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.streams import index_at_level, widened
from structured_voronoi.problem.problem import Problem


class Proposal(NamedTuple):
    """Texts drawn with a lookahead, at least from some position on."""

    tokens: Int[Tensor, "row n"]
    log_p: Float[Tensor, "row n"]
    """log p of each token given those before it; 0 before the first drawn position."""
    log_q: Float[Tensor, "row n"]
    """log of its probability under the lookahead; 0 before the first drawn position."""
    log_base: Float[Tensor, "row n"]
    """log of its probability under the model restricted to possible tokens; 0 before the first drawn position."""
    log_rest: Float[Tensor, " row"]

    @property
    def log_weight(self) -> Float[Tensor, " row"]:
        """log of p W / q up to a constant; -inf where the target is not finite."""
        weight = (self.log_p - self.log_q).sum(-1) + self.log_rest
        return torch.where(weight.isfinite(), weight, -torch.inf)


class Reading(NamedTuple):
    """The input and the output of a head."""

    features: Float[Tensor, "row d"]
    value: Float[Tensor, "row token"]
    """ψ of every token."""


class Weighed(NamedTuple):
    """The distribution of the next token: q = p value / E_p[value]."""

    log_p: Float[Tensor, "row token"]
    value: Float[Tensor, "row token"]
    """ψ of each token with the δ term, in units of exp(log_scale); 0 for impossible tokens."""
    possible: Bool[Tensor, "row token"] | None
    """Tokens after which all patterns can still match; None for all tokens."""
    log_scale: Float[Tensor, " row"]
    """Products of several heads may underflow without it."""

    @classmethod
    def of(cls, log_p: Float[Tensor, "row token"], value: Float[Tensor, "row token"]) -> Weighed:
        """A distribution in which all tokens are possible."""
        return cls(log_p, value, None, torch.zeros_like(log_p[:, 0]))

    def at(self, rows: Int[Tensor, " row"]) -> Weighed:
        """The distributions of other rows."""
        possible = None if self.possible is None else self.possible[rows]
        return Weighed(self.log_p[rows], self.value[rows], possible, self.log_scale[rows])

    def draw(self, level: Float[Tensor, " row"]) -> Int[Tensor, " row"]:
        """A token of each row from q."""
        return index_at_level(self.mass, level)

    @property
    def mass(self) -> Float[Tensor, "row token"]:
        """q up to a factor."""
        return self.log_p.exp() * self.value

    @property
    def base_mass(self) -> Float[Tensor, "row token"]:
        """p of the possible tokens."""
        mass = self.log_p.exp()
        return mass if self.possible is None else mass * self.possible

    @property
    def log_expected(self) -> Float[Tensor, " row"]:
        """log of the mean value under the model."""
        return widened(self.mass.sum(-1)).log() + widened(self.log_scale)

    def log_q(self, token: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
        return self._log_p(token) + self.log_value(token) - self.log_expected

    def log_base(self, token: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
        if self.possible is None:
            return self._log_p(token)
        log_p = torch.where(self.possible.gather(-1, token[:, None])[:, 0], self._log_p(token), -torch.inf)
        return log_p - widened(self.base_mass.sum(-1)).log()

    def log_value(self, token: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
        return widened(self.value.gather(-1, token[:, None])[:, 0]).log() + widened(self.log_scale)

    def _log_p(self, token: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
        return widened(self.log_p.gather(-1, token[:, None])[:, 0])


def drawn_or_kept(
    mass: Float[Tensor, "row token"], level: Float[Tensor, " row"], kept: Int[Tensor, " row"]
) -> Int[Tensor, " row"]:
    """The token at the level, or the given one where the level is NaN."""
    is_kept = level.isnan()
    return torch.where(is_kept, kept, index_at_level(mass, level.masked_fill(is_kept, 0.5)))


def all_where_stuck(
    log_probs: Float[Tensor, "row token"], possible: Bool[Tensor, "row token"] | None
) -> Bool[Tensor, "row token"] | None:
    """All tokens are possible in rows where no probability is left to the others: such texts have no weight anyway,
    or one too small for the numbers at hand."""
    if possible is None:
        return None
    left = (log_probs.exp() * possible).sum(-1, keepdim=True)
    return possible | (left <= torch.finfo(left.dtype).tiny)


def unfinished_rows(problem: Problem, log_probs: Float[Tensor, "row token"]) -> Bool[Tensor, " row"]:
    """The rows whose text has not ended."""
    if problem.padding is None:
        return torch.ones_like(log_probs[:, 0], dtype=torch.bool)
    return log_probs[:, problem.padding] < 0
