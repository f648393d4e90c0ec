"""Metropolis–Hastings on tokens with proposals from a gradient: the base of p-NCG, Gibbs with gradients and MuCoLa."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import Guidance, Start, Synchronised, Target
from structured_voronoi.core.info import Info, blank_info
from structured_voronoi.core.streams import Rng, block_rows
from structured_voronoi.geometry.cells import Cells
from structured_voronoi.problem.problem import Evaluation, Problem, bind
from structured_voronoi.problem.starts import find_start


class State(NamedTuple):
    """The tokens with their energy and steering field."""

    tokens: Int[Tensor, "chain n"]
    energy: Float[Tensor, " chain"]
    gradient: Float[Tensor, "chain n d"]


class TokenMetropolis:
    """Start, synchronisation and acceptance of samplers that propose cells from the gradient."""

    guidance: Guidance

    def init(self, target: Target | Problem, rng: Rng, start: Start) -> Any:
        """The first state."""
        tokens, first = find_start(bind(target), rng, start, self.guidance)
        return State(tokens, first.energy, first.field)

    def synchronise(
        self,
        target: Target | Problem,
        rng: Rng,
        state: Any,
        tokens: Int[Tensor, "chain n"],
        energy: Float[Tensor, " chain"],
    ) -> Synchronised:
        """The state after another sampler has moved the tokens."""
        problem, moved = bind(target), (tokens != state.tokens).any(-1)
        known = Evaluation(state.energy, state.gradient)
        gradient = problem.evaluate_where(moved, tokens, known, self.guidance).field
        count = moved.long()
        return Synchronised(State(tokens, energy.clone(), gradient), count, count * problem.steers(self.guidance))

    def log_ratio(
        self,
        energy: Float[Tensor, " chain"],
        proposed_energy: Float[Tensor, " chain"],
        log_forward: Float[Tensor, " chain"],
        log_reverse: Float[Tensor, " chain"],
    ) -> Float[Tensor, " chain"]:
        """log of p(m') q(m|m') / p(m) q(m'|m)."""
        return energy - proposed_energy + log_reverse - log_forward

    def accept(
        self,
        problem: Problem,
        state: Any,
        proposed: Int[Tensor, "chain n"],
        log_ratio: Callable[[Evaluation], Float[Tensor, " chain"]],
        level: Float[Tensor, " chain"],
    ) -> tuple[State, Info]:
        """Accept the proposed cells with probability min(1, ratio); unchanged cells are not evaluated."""
        cells = problem.cells()
        moved = (proposed != cells.cell_of[state.tokens]).any(-1)
        tokens = cells.tokens[proposed]
        proposal = problem.evaluate_where(moved, tokens, Evaluation(state.energy, state.gradient), self.guidance)
        accepted = moved & proposal.possible & (level.log() < log_ratio(proposal))
        new = State(
            torch.where(accepted[:, None], tokens, state.tokens),
            torch.where(accepted, proposal.energy, state.energy),
            torch.where(accepted[:, None, None], proposal.field, state.gradient),
        )
        info = blank_info(new.energy)._replace(
            evaluations=moved.long(),
            gradients=moved.long() * problem.steers(self.guidance),
            events=moved.long(),
            swaps=(new.tokens != state.tokens).sum(-1),
            nonfinite=(~proposal.possible).long(),
        )
        return new, info


def in_chain_blocks(
    cells: Cells, n: int, function: Callable[[slice], tuple[Tensor, ...]], chains: int
) -> tuple[Tensor, ...]:
    """``function`` of slices of chains whose tables (positions x cells) fit into the memory bound."""
    size = block_rows(n * len(cells.table) * 8 * 6, cells.memory)
    parts = [function(slice(i, i + size)) for i in range(0, chains, size)]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))
