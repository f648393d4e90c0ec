"""p-NCG: the norm-constrained gradient proposal (Rhodes & Gutmann 2022; Du et al. 2023 for text), with Metropolis.

All positions change at once, independently: q(m'|m) ∝ Π_n exp(½ g_n·(v' - v) - ‖v' - v‖_p^p / 2α).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import Guidance, Info, Target
from structured_voronoi.core.streams import Rng, inverse_cdf
from structured_voronoi.core.validation import check_choice, check_positive
from structured_voronoi.geometry.cells import Cells, products
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.samplers.token_metropolis import State, TokenMetropolis, in_chain_blocks


@dataclass(frozen=True)
class PNCG(TokenMetropolis):
    """Settings of p-NCG."""

    step_size: float
    """α, in the embeddings' own units."""
    norm: float = 2.0
    """p of the norm."""
    guidance: Guidance = "full"

    def __post_init__(self) -> None:
        check_positive(step_size=self.step_size, norm=self.norm)
        check_choice(Guidance, guidance=self.guidance)

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        problem, n = bind(target), state.tokens.shape[1]
        cells = problem.cells()
        here = cells.cell_of[state.tokens]
        levels, accept_level = rng.uniform(n), rng.uniform()

        def forward(rows: slice) -> tuple[Tensor, Tensor]:
            log_q = self.log_proposal(cells, here[rows], state.gradient[rows])
            choice = inverse_cdf(log_q, levels[rows])
            return choice, _gather_log_q(log_q, choice)

        def log_reverse(there: Tensor, gradient: Tensor) -> Tensor:
            def reverse(rows: slice) -> tuple[Tensor]:
                return (_gather_log_q(self.log_proposal(cells, there[rows], gradient[rows]), here[rows]),)

            return in_chain_blocks(cells, n, reverse, len(there))[0]

        proposed, log_forward = in_chain_blocks(cells, n, forward, len(here))
        return self.accept(problem, state, proposed, log_forward, log_reverse, accept_level)

    def log_proposal(
        self, cells: Cells, here: Int[Tensor, "chain n"], gradient: Float[Tensor, "chain n d"]
    ) -> Float[Tensor, "chain n cell"]:
        """log q(· | m) at every position."""
        points = cells.points(here)
        slope = products(gradient.flatten(0, 1), cells.table).view(*here.shape, -1)
        slope = slope - (gradient * points).sum(-1, keepdim=True)
        if self.norm == 2:
            inner = products(points.flatten(0, 1), cells.table).view(*here.shape, -1)
            distance = 2 * (cells.half_norm + cells.half_norm[here][..., None] - inner)
        else:
            distance = torch.cdist(points, cells.table, p=self.norm) ** self.norm
        logits = slope / 2 - distance / (2 * self.step_size)
        return cells.without_pinned(logits, here).log_softmax(-1)


def _gather_log_q(log_q: Tensor, choice: Tensor) -> Float[Tensor, " chain"]:
    return log_q.gather(-1, choice[..., None]).squeeze(-1).sum(-1)
