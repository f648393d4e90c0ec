"""MuCoLa: Langevin steps that are projected to embeddings.

Kumar, Paria and Tsvetkov (2022); the algorithm "MuCoLa" of Amini et al. (2023): V' = Proj(V + ε r) with r ~ N(0, I) -
(ε/2) ∇U(V). The projection is neither reversible nor volume-preserving, so the draws are biased, even with the
Metropolis criterion exp(H - H') of the paper's toy experiment. That is exact only where all proposals are symmetric
(the toy, the hypercube).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.baselines.langevin import decayed
from structured_voronoi.baselines.voronoi_measure import kinetic
from structured_voronoi.core.contracts import Guidance, Start, Synchronised, Target
from structured_voronoi.core.info import Info
from structured_voronoi.core.streams import Rng
from structured_voronoi.core.validation import check_count, check_positive
from structured_voronoi.problem.problem import Evaluation, Problem, bind
from structured_voronoi.samplers.token_metropolis import TokenMetropolis


class State(NamedTuple):
    """The tokens with their energy and gradient, and the number of steps, on which the step size depends."""

    tokens: Int[Tensor, "chain n"]
    energy: Float[Tensor, " chain"]
    gradient: Float[Tensor, "chain n d"]
    steps: int


@dataclass(frozen=True)
class MuCoLa(TokenMetropolis):
    """MuCoLa. Not exact.

    Parameters
    ----------
    step_size
        ε at the first step.
    final_step_size
        ε after ``decay_steps`` steps of exponential decay; None: no decay.
    decay_steps
        Steps until the final step size.
    metropolis
        Accept with probability min(1, exp(H - H')).

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> draws = sv.sample(sv.PottsTarget(side=2), sv.baselines.MuCoLa(1.0), chains=4, draws=10, progress=False)
    >>> draws["posterior"]["tokens"].shape
    (4, 10, 4)
    """

    step_size: float
    final_step_size: float | None = 0.05
    decay_steps: int = 500
    metropolis: bool = False

    exact: ClassVar[bool] = False
    guidance: ClassVar[Guidance] = "full"  # type: ignore[misc]

    def __post_init__(self) -> None:
        check_positive(step_size=self.step_size, final_step_size=self.final_step_size)
        check_count(decay_steps=self.decay_steps)

    def init(self, target: Target | Problem, rng: Rng, start: Start) -> State:
        """The first state."""
        first = super().init(target, rng, start)
        return State(first.tokens, first.energy, first.gradient, 0)

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        """One projected Langevin step."""
        step_size = decayed(self.step_size, self.final_step_size, self.decay_steps, state.steps)
        problem = bind(target)
        cells = problem.cells()
        cell = cells.cell_of[state.tokens]
        r = rng.normal(*state.gradient.shape[1:]).to(state.gradient)
        level = rng.uniform()
        before = state.energy + kinetic(r)
        r = r + step_size / 2 * state.gradient
        projected = cells.nearest(cells.points(cell) + step_size * r, cell)

        def log_ratio(proposal: Evaluation) -> Tensor:
            if not self.metropolis:
                return torch.full_like(before, torch.inf)
            return before - (proposal.energy + kinetic(r + step_size / 2 * proposal.field))

        new, info = self.accept(problem, state, projected, log_ratio, level)
        return State(*new, state.steps + 1), info

    def synchronise(
        self, target: Target | Problem, rng: Rng, state: Any, tokens: Tensor, energy: Tensor
    ) -> Synchronised:
        """The state after another sampler has moved the tokens."""
        found = super().synchronise(target, rng, state, tokens, energy)
        return found._replace(state=State(tokens, found.state.energy, found.state.gradient, state.steps))
