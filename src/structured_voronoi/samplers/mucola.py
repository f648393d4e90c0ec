"""MuCoLa (Kumar, Paria, Tsvetkov 2022; the paper's algorithm "MuCoLa"): Langevin steps projected to embeddings.

V' = Proj(V + ε r) with r ~ N(0, I) - (ε/2) ∇U(V). The projection is neither reversible nor volume-preserving, so
the draws are biased by design, also with the Metropolis criterion exp(H - H') that the paper adds on the toy; only
where all proposals are symmetric (the toy, the hypercube) is it exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.base import Info, Rng, Start, Target, quiet_info
from structured_voronoi.geometry.cells import Cells
from structured_voronoi.samplers.evaluation import (
    Evaluation,
    begin,
    cells_of_target,
    evaluate_where,
    positive,
    steers,
    whole,
)
from structured_voronoi.samplers.langevin import decayed
from structured_voronoi.samplers.voronoi_measure import kinetic


class State(NamedTuple):
    tokens: Int[Tensor, "chain n"]
    energy: Float[Tensor, " chain"]
    gradient: Float[Tensor, "chain n d"]
    cells: Cells
    steps: int


@dataclass(frozen=True)
class MuCoLa:
    """Settings of MuCoLa."""

    step_size: float
    """ε at the first step"""
    final_step_size: float | None = 0.05
    decay_steps: int = 500
    metropolis: bool = False

    def __post_init__(self) -> None:
        positive(step_size=self.step_size, final_step_size=self.final_step_size)
        whole(decay_steps=self.decay_steps)

    def init(self, target: Target, rng: Rng, start: Start) -> State:
        cells = cells_of_target(target)
        tokens, first = begin(target, cells, rng, start, "full")
        return State(tokens, first.energy, first.field, cells, 0)

    def step(self, target: Target, rng: Rng, state: State) -> tuple[State, Info]:
        step_size = decayed(self.step_size, self.final_step_size, self.decay_steps, state.steps)
        cells, cell = state.cells, state.cells.cell_of[state.tokens]
        r = rng.normal(*state.gradient.shape[1:]).to(state.gradient)
        level = rng.uniform()
        before = state.energy + kinetic(r)
        r = r + step_size / 2 * state.gradient
        projected = cells.nearest(cells.points(cell) + step_size * r)

        moved = (projected != cell).any(-1)
        tokens = cells.tokens[projected]
        known = Evaluation(state.energy, state.gradient, torch.ones_like(moved))
        energy, gradient, finite = evaluate_where(target, moved, tokens, known, "full")
        accepted = finite
        if self.metropolis:
            after = energy + kinetic(r + step_size / 2 * gradient)
            accepted = finite & (level.log() < before - after)
        new = State(
            torch.where(accepted[:, None], tokens, state.tokens),
            torch.where(accepted, energy, state.energy),
            torch.where(accepted[:, None, None], gradient, state.gradient),
            cells,
            state.steps + 1,
        )
        info = quiet_info(new.energy)._replace(
            evaluations=moved.long(),
            gradients=moved.long() * steers(target, "full"),
            events=moved.long(),
            swaps=(new.tokens != state.tokens).sum(-1),
            nonfinite=(~finite).long(),
        )
        return new, info
