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
)
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.streams import Rng, widened

WHO = "ancestral sampling"
TRIES = 20
"""Texts without a finite log p that a chain may draw in turn."""


class State(NamedTuple):
    tokens: Int[Tensor, "chain n"]


@dataclass(frozen=True)
class Ancestral:
    """No settings. Where something stands on the right of the tokens, ancestral draws are not the truth: refused."""

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
        """One text a chain; where the model has no number for it, another is drawn, and that is counted."""
        problem = bind(target)
        tokens, energy, drawn = _draw(problem, rng)
        lost, refused = torch.zeros_like(tokens[:, 0]), torch.zeros_like(tokens[:, 0])
        while not drawn.all():
            rows = (~drawn).nonzero().squeeze(-1)
            lost[rows] += (~energy[rows].isfinite()).long()
            refused[rows] += energy[rows].isfinite().long()
            if int(lost.max()) == TRIES:
                raise SamplingError(
                    f"the model had no finite log p for {TRIES} texts of one chain in turn; its weights may be "
                    "damaged, or its dtype too narrow: try another"
                )
            some = rng.select(rows)
            tokens[rows], energy[rows], drawn[rows] = _draw(problem, some)
            rng.catch_up(rows, some)
        changed, one = (tokens != state.tokens).sum(-1), torch.ones_like(lost)
        info = blank_info(energy)._replace(evaluations=one + lost + refused, events=one, swaps=changed, nonfinite=lost)
        return State(tokens), info


def _draw(problem: Problem, rng: Rng) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their energies, and which of them are draws: those with a number, of allowed tokens in due proportion."""
    tokens, log_probs, log_rest = ancestral_draw(problem, rng, WHO)
    energy = -(widened(log_probs).sum(-1) + log_rest)
    drawn = energy.isfinite()
    if problem.masks:
        drawn &= rng.uniform().log() < log_acceptance(problem, tokens, log_rest)
    return tokens, energy, drawn
