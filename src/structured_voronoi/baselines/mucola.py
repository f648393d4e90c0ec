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

from structured_voronoi.baselines.langevin import decayed
from structured_voronoi.core.contracts import Info, Start, Synchronised, Target, blank_info
from structured_voronoi.core.streams import Rng
from structured_voronoi.core.validation import check_count, check_positive
from structured_voronoi.problem.drawing import find_start
from structured_voronoi.problem.problem import Evaluation, Problem, bind
from structured_voronoi.samplers.voronoi_measure import kinetic


class State(NamedTuple):
    tokens: Int[Tensor, "chain n"]
    energy: Float[Tensor, " chain"]
    gradient: Float[Tensor, "chain n d"]
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
        check_positive(step_size=self.step_size, final_step_size=self.final_step_size)
        check_count(decay_steps=self.decay_steps)

    def init(self, target: Target | Problem, rng: Rng, start: Start) -> State:
        tokens, first = find_start(bind(target), rng, start, "full")
        return State(tokens, first.energy, first.field, 0)

    def synchronise(
        self,
        target: Target | Problem,
        rng: Rng,
        state: State,
        tokens: Int[Tensor, "chain n"],
        energy: Float[Tensor, " chain"],
    ) -> Synchronised:
        """The state after another sampler has moved the tokens."""
        problem, moved = bind(target), (tokens != state.tokens).any(-1)
        gradient = problem.evaluate_where(moved, tokens, Evaluation(state.energy, state.gradient), "full").field
        new = State(tokens, energy.clone(), gradient, state.steps)
        return Synchronised(new, moved.long(), moved.long() * problem.steers("full"))

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        step_size = decayed(self.step_size, self.final_step_size, self.decay_steps, state.steps)
        problem = bind(target)
        cells = problem.cells()
        cell = cells.cell_of[state.tokens]
        r = rng.normal(*state.gradient.shape[1:]).to(state.gradient)
        level = rng.uniform()
        before = state.energy + kinetic(r)
        r = r + step_size / 2 * state.gradient
        projected = cells.nearest(cells.points(cell) + step_size * r, cell)

        moved = (projected != cell).any(-1)
        tokens = cells.tokens[projected]
        proposal = problem.evaluate_where(moved, tokens, Evaluation(state.energy, state.gradient), "full")
        accepted = proposal.possible
        if self.metropolis:
            after = proposal.energy + kinetic(r + step_size / 2 * proposal.field)
            accepted = accepted & (level.log() < before - after)
        new = State(
            torch.where(accepted[:, None], tokens, state.tokens),
            torch.where(accepted, proposal.energy, state.energy),
            torch.where(accepted[:, None, None], proposal.field, state.gradient),
            state.steps + 1,
        )
        info = blank_info(new.energy)._replace(
            evaluations=moved.long(),
            gradients=moved.long() * problem.steers("full"),
            events=moved.long(),
            swaps=(new.tokens != state.tokens).sum(-1),
            nonfinite=(~proposal.possible).long(),
        )
        return new, info
