"""p-NCG, the norm-constrained gradient proposal, with Metropolis acceptance.

Rhodes and Gutmann (2022); Du et al. (2023) for text. All positions are proposed at once, independently of each other:
q(m'|m) ∝ Π_n exp(½ g_n·(v' - v) - ‖v' - v‖_p^p / 2α), where g_n is the gradient at position n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import Guidance, Target
from structured_voronoi.core.info import Info
from structured_voronoi.core.streams import Rng, inverse_cdf
from structured_voronoi.core.validation import check_choice, check_positive
from structured_voronoi.geometry.cells import Cells, products
from structured_voronoi.problem.problem import Evaluation, Problem, bind
from structured_voronoi.samplers.token_metropolis import State, TokenMetropolis, in_chain_blocks


@dataclass(frozen=True)
class PNCG(TokenMetropolis):
    """p-NCG.

    Parameters
    ----------
    step_size
        α, in the units of the embeddings.
    norm
        p, the order of the norm.
    guidance
        The steering field: the target's guide, or its gradient if it has none (``"forward"``), its gradient
        (``"full"``), or none (``"none"``).

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> draws = sv.sample(sv.PottsTarget(side=2), sv.PNCG(2.0), chains=4, draws=10, progress=False)
    >>> draws["posterior"]["tokens"].shape
    (4, 10, 4)
    """

    step_size: float
    norm: float = 2.0
    guidance: Guidance = "full"

    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive(step_size=self.step_size, norm=self.norm)
        check_choice(Guidance, guidance=self.guidance)

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        """One proposal for all positions."""
        problem, n = bind(target), state.tokens.shape[1]
        cells = problem.cells()
        here = cells.cell_of[state.tokens]
        levels, accept_level = rng.uniform(n), rng.uniform()

        def forward(rows: slice) -> tuple[Tensor, Tensor]:
            log_q = self.log_proposal(cells, here[rows], state.gradient[rows])
            choice = inverse_cdf(log_q, levels[rows])
            return choice, _log_q_of(log_q, choice)

        proposed, log_forward = in_chain_blocks(cells, n, forward, len(here))

        def log_ratio(proposal: Evaluation) -> Tensor:
            def reverse(rows: slice) -> tuple[Tensor]:
                return (_log_q_of(self.log_proposal(cells, proposed[rows], proposal.field[rows]), here[rows]),)

            (log_reverse,) = in_chain_blocks(cells, n, reverse, len(here))
            return self.log_ratio(state.energy, proposal.energy, log_forward, log_reverse)

        return self.accept(problem, state, proposed, log_ratio, accept_level)

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


def _log_q_of(log_q: Tensor, choice: Tensor) -> Float[Tensor, " chain"]:
    return log_q.gather(-1, choice[..., None]).squeeze(-1).sum(-1)
