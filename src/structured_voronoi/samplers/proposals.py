"""Metropolis–Hastings over tokens, with proposals from a gradient: what p-NCG and Gibbs-with-gradients share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.base import Info, Rng, Start, Target, quiet_info
from structured_voronoi.geometry.cells import Cells, chunk_size
from structured_voronoi.samplers.evaluation import (
    Evaluation,
    Guidance,
    begin,
    cells_of_target,
    evaluate_where,
    steers,
)


class State(NamedTuple):
    tokens: Int[Tensor, "chain n"]
    energy: Float[Tensor, " chain"]
    gradient: Float[Tensor, "chain n d"]
    cells: Cells


def initial_state(target: Target, guidance: Guidance, rng: Rng, start: Start) -> State:
    cells = cells_of_target(target)
    tokens, first = begin(target, cells, rng, start, guidance)
    return State(tokens, first.energy, first.field, cells)


def in_chain_chunks(
    cells: Cells, n: int, function: Callable[[slice], tuple[Tensor, ...]], chains: int
) -> tuple[Tensor, ...]:
    """``function`` of slices of chains, whose tables over all positions and tokens stay within the memory bound."""
    size = chunk_size(n * len(cells.table) * 8 * 6, cells.memory)
    parts = [function(slice(i, i + size)) for i in range(0, chains, size)]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def metropolis_hastings(
    target: Target,
    guidance: Guidance,
    state: State,
    proposed: Int[Tensor, "chain n"],
    log_forward: Float[Tensor, " chain"],
    log_reverse: Callable[[Tensor, Tensor], Tensor],
    level: Float[Tensor, " chain"],
) -> tuple[State, Info]:
    """Accept the proposed cells with min(1, p(m') q(m|m') / p(m) q(m'|m)).

    ``log_reverse(cells, gradients)`` is log q(m | m') from the proposed states. Chains that propose their own state
    cost nothing.
    """
    cells = state.cells
    moved = (proposed != cells.cell_of[state.tokens]).any(-1)
    tokens = cells.tokens[proposed]
    known = Evaluation(state.energy, state.gradient, torch.ones_like(moved))
    energy, gradient, finite = evaluate_where(target, moved, tokens, known, guidance)
    log_ratio = state.energy - energy + log_reverse(proposed, gradient) - log_forward
    accepted = moved & finite & (level.log() < log_ratio)
    new = State(
        torch.where(accepted[:, None], tokens, state.tokens),
        torch.where(accepted, energy, state.energy),
        torch.where(accepted[:, None, None], gradient, state.gradient),
        cells,
    )
    info = quiet_info(new.energy)._replace(
        evaluations=moved.long(),
        gradients=moved.long() * steers(target, guidance),
        events=moved.long(),
        swaps=(new.tokens != state.tokens).sum(-1),
        nonfinite=(~finite).long(),
    )
    return new, info
