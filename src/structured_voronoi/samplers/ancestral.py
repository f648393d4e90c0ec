"""Ancestral sampling: each token from the model given those before it. Exact, and every draw is independent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from structured_voronoi.contracts import Info, Start, Target, blank_info
from structured_voronoi.errors import SamplingError
from structured_voronoi.problem.drawing import (
    ancestral_draw,
    check_autoregressive,
    forgettable_start,
    log_acceptance,
    refuse_endless,
)
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.streams import Rng, widened

WHO = "ancestral sampling"
TRIES, REFUSED_TRIES = 20, 10_000
"""Texts without a finite log p that a chain may draw in turn; texts refused as no draws of the target."""


class State(NamedTuple):
    tokens: Int[Tensor, "chain n"]


@dataclass(frozen=True)
class Ancestral:
    """No settings. Targets with a suffix, an end at length or controls are refused: ancestral draws do not follow them.

    Where texts must end within N tokens, those that have not are drawn again, which is exact.
    """

    independent: ClassVar[bool] = True
    """Draws need no warm-up."""

    def init(self, target: Target | Problem, rng: Rng, start: Start) -> State:
        """Tokens to begin with, which are no draw: they are forgotten."""
        problem = bind(target)
        check_autoregressive(problem, WHO)
        if not problem.normalised:
            raise SamplingError(
                "ancestral sampling does not see a suffix, the end of the text or controls; use sv.Rejection(), or "
                "sv.Cycle(sv.SVS(), sv.Refresh()); on the command line --sampler auto"
            )
        return State(forgettable_start(problem, rng, start))

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        """One text a chain; texts without a finite log p, and refused ones, are counted and drawn again."""
        problem = bind(target)
        tokens, energy, drawn = _draw(problem, rng)
        lost, refused, endless = (torch.zeros_like(tokens[:, 0]) for _ in range(3))
        while not drawn.all():
            rows = (~drawn).nonzero().squeeze(-1)
            ended = torch.ones_like(drawn[rows]) if problem.ended is None else problem.ended(tokens[rows])
            lost[rows] += (ended & ~energy[rows].isfinite()).long()
            refused[rows] += (ended & energy[rows].isfinite()).long()
            endless[rows] += (~ended).long()
            ended_in_all = int(drawn.sum() + (lost + refused).sum())
            refuse_endless(problem, ended_in_all + int(endless.sum()), ended_in_all)
            if int(lost.max()) == TRIES:
                raise SamplingError(
                    f"the model had no finite log p for {TRIES} texts of one chain in turn; its weights may be "
                    "damaged, or its dtype too narrow: try another"
                )
            if int(refused.max()) == REFUSED_TRIES:
                raise SamplingError(
                    f"{REFUSED_TRIES:,} texts of one chain in turn were refused: the model hardly ever draws the "
                    "tokens that are `allowed`; allow more of them, or mask the conditionals of the target itself"
                )
            row_rng = rng.select(rows)
            tokens[rows], energy[rows], drawn[rows] = _draw(problem, row_rng)
            rng.catch_up(rows, row_rng)
        changed, ones = (tokens != state.tokens).sum(-1), torch.ones_like(lost)
        evaluations = ones + lost + refused + endless
        info = blank_info(energy)._replace(evaluations=evaluations, events=ones, swaps=changed, nonfinite=lost)
        return State(tokens), info


def _draw(problem: Problem, rng: Rng) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their energies, and which of them are accepted as draws of the target restricted to allowed tokens."""
    tokens, log_probs, log_rest = ancestral_draw(problem, rng, WHO)
    energy = -(widened(log_probs).sum(-1) + log_rest)
    log_chance, drawn = log_acceptance(problem, tokens, log_rest), energy.isfinite()
    if problem.masks:
        drawn &= rng.uniform().log() < log_chance
    return tokens, energy, drawn
