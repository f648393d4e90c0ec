"""Tries: texts that a proposal draws, each with its weight and its own random stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from structured_voronoi.core.streams import Rng, widest_dtype
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.lookahead.observing import Observed
from structured_voronoi.problem.drawing import log_acceptance, log_bound
from structured_voronoi.problem.problem import Problem
from structured_voronoi.problem.starts import which_ended


class Tries(NamedTuple):
    """Texts of one proposal for one prompt, in the order of their numbers."""

    number: Int[Tensor, " try"]
    tokens: Int[Tensor, "try n"]
    log_prob: Float[Tensor, " try"]
    """log p of the language model."""
    log_target: Float[Tensor, " try"]
    """log p of the target, not normalised."""
    log_weight: Float[Tensor, " try"]
    """log of p W / q; -inf where the text does not satisfy the controls."""
    level: Float[Tensor, " try"]
    """The uniform number that decides about acceptance."""
    ended: Bool[Tensor, " try"]
    observed: Observed | None = None

    def as_data(self) -> dict[str, Any]:
        """Tensors that a checkpoint can hold."""
        data = self._asdict()
        data["observed"] = None if self.observed is None else list(self.observed.parts())
        return data

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Self:
        parts = data["observed"]
        return cls(**{**data, "observed": None if parts is None else Observed.of(data["tokens"], tuple(parts))})

    @classmethod
    def joined(cls, several: Sequence[Self]) -> Self:
        """All tries of several batches, without what was observed."""
        return cls(*cls._joined_columns(several))

    @staticmethod
    def _joined_columns(several: Sequence[Tries]) -> list[Any]:
        return [torch.cat(column) for column in zip(*(one[:7] for one in several), strict=True)]

    def at(self, rows: list[int]) -> Tries:
        """Some of the tries, without what was observed."""
        columns: list[Any] = [part[rows] for part in self[:7]]
        return Tries(*columns)

    @property
    def weight(self) -> Float[ndarray, " try"]:
        """The weights as an array."""
        weight: ndarray = self.log_weight.exp().numpy()
        return weight


def draw_tries(
    problem: Problem,
    lookahead: Lookahead,
    seed: int,
    rows: Sequence[tuple[int, int]],
    plain_share: float,
    is_observed: bool,
    stream: str = "tries",
) -> Tries:
    """One try for each (prompt, number).

    A learnt proposal takes the share ``plain_share`` of its tries from the model, so that no weight exceeds the inverse
    of that share.
    """
    levels = _levels(seed, rows, problem, stream)
    share = plain_share if lookahead.learned else 1.0
    from_model = levels[:, -1] < share
    drawn, observed = lookahead.draw_observed(problem, levels[:, :-2], from_model, is_observed)
    log_prob, log_q, log_base = (part.sum(-1) for part in (drawn.log_p, drawn.log_q, drawn.log_base))
    if lookahead.learned:
        log_q = torch.logaddexp(log_base + math.log(share), log_q + math.log1p(-share)) if share else log_q
    if not problem.normalised:
        log_acceptance(problem, drawn.tokens, drawn.log_rest)  # raises an error where a score exceeds its bound
    log_weight = log_prob + drawn.log_rest - log_bound(problem) - log_q
    tries = Tries(
        torch.tensor([number for _, number in rows]),
        drawn.tokens,
        log_prob,
        log_prob + drawn.log_rest,
        torch.where(log_weight.isfinite(), log_weight, -torch.inf).double(),
        levels[:, -2].double(),
        which_ended(problem, drawn.tokens),
    )
    columns: list[Any] = [part.cpu() for part in tries[:7]]
    here = Tries(*columns)
    if observed is None:
        return here
    return here._replace(observed=Observed.of(here.tokens, tuple(part.cpu() for part in observed.parts())))


def _levels(seed: int, rows: Sequence[tuple[int, int]], problem: Problem, stream: str) -> Float[Tensor, "try level"]:
    """The uniform numbers of each try: one for every token, one for acceptance, one for the part of the proposal."""
    levels = torch.empty(len(rows), problem.length + 2, dtype=torch.float64)
    for prompt in sorted({prompt for prompt, _ in rows}):
        places = [place for place, row in enumerate(rows) if row[0] == prompt]
        rng = Rng(seed, [rows[place][1] for place in places], f"{stream}/{prompt}")
        levels[places] = rng.uniform(problem.length + 2)
    return levels.to(problem.device, widest_dtype(problem.device))
