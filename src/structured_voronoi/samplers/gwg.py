"""Gibbs with gradients: a position and its new token are proposed together.

Grathwohl et al. (2021). q((n, j) | m) ∝ exp(½ g_n·(v_j - v_{m_n})) over all positions n and all other tokens j, where
g_n is the gradient at position n, with Metropolis acceptance.
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
class GibbsWithGradients(TokenMetropolis):
    """Gibbs with gradients.

    Parameters
    ----------
    temperature
        Divisor of the first-order change of log p in the proposal; 2 makes the proposal locally balanced.
    guidance
        The steering field: the target's guide, or its gradient if it has none (``"forward"``), its gradient
        (``"full"``), or none (``"none"``).

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> draws = sv.sample(sv.PottsTarget(side=2), sv.GibbsWithGradients(), chains=4, draws=10, progress=False)
    >>> draws["posterior"]["tokens"].shape
    (4, 10, 4)
    """

    temperature: float = 2.0
    guidance: Guidance = "full"

    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive(temperature=self.temperature)
        check_choice(Guidance, guidance=self.guidance)

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        """One proposal for one position."""
        problem, (chains, n) = bind(target), state.tokens.shape
        cells = problem.cells()
        here, m = cells.cell_of[state.tokens], len(cells.table)
        level, accept_level = rng.uniform(), rng.uniform()

        def forward(rows: slice) -> tuple[Tensor, Tensor]:
            log_q = self.log_proposal(cells, here[rows], state.gradient[rows])
            choice = inverse_cdf(log_q, level[rows])
            return choice, log_q.gather(-1, choice[:, None]).squeeze(-1)

        choice, log_forward = in_chain_blocks(cells, n, forward, chains)
        chain, position = torch.arange(chains, device=here.device), choice // m
        proposed = here.clone()
        proposed[chain, position] = choice % m
        back = position * m + here[chain, position]

        def log_ratio(proposal: Evaluation) -> Tensor:
            def reverse(rows: slice) -> tuple[Tensor]:
                log_q = self.log_proposal(cells, proposed[rows], proposal.field[rows])
                return (log_q.gather(-1, back[rows, None]).squeeze(-1),)

            (log_reverse,) = in_chain_blocks(cells, n, reverse, chains)
            return self.log_ratio(state.energy, proposal.energy, log_forward, log_reverse)

        return self.accept(problem, state, proposed, log_ratio, accept_level)

    def log_proposal(
        self, cells: Cells, here: Int[Tensor, "chain n"], gradient: Float[Tensor, "chain n d"]
    ) -> Float[Tensor, "chain choice"]:
        """log q(· | m) over all (position, token), flattened; current tokens have probability 0."""
        slope = products(gradient.flatten(0, 1), cells.table).view(*here.shape, -1)
        slope = (slope - (gradient * cells.points(here)).sum(-1, keepdim=True)) / self.temperature
        slope = cells.without_pinned(slope, here).scatter(-1, here[..., None], -torch.inf)
        return slope.flatten(1).log_softmax(-1)
