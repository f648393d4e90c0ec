"""The engine as a sampler, for tests of stationarity: one run gives one text per chain."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from structured_voronoi.core.contracts import Start, Target
from structured_voronoi.core.info import Info, blank_info
from structured_voronoi.core.streams import Rng, widened
from structured_voronoi.engine.rounds import Rounds
from structured_voronoi.engine.settings import EngineSettings
from structured_voronoi.engine.source import LocalSource
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.problem.starts import placeholder_start


class State(NamedTuple):
    tokens: Int[Tensor, "chain n"]


@dataclass(frozen=True, eq=False)
class Adaptive:
    """Rejection with a proposal that learns. All chains share one run and depend on the number of chains."""

    tolerance: float = 0.003
    settings: EngineSettings = field(default_factory=EngineSettings)
    lookahead: Lookahead | None = None
    """Initial proposal."""
    rounds: type[Rounds] = Rounds

    exact: ClassVar[bool] = True
    """Up to ``tolerance``."""
    independent: ClassVar[bool] = True

    def init(self, target: Target | Problem, rng: Rng, start: Start) -> State:
        """Return tokens that the first step replaces."""
        return State(placeholder_start(bind(target), rng, start))

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        """Draw one text for each chain."""
        problem, chains = bind(target), len(rng)
        source = LocalSource([problem.target], rng.seed, self.settings)
        run = self.rounds([problem], source, chains, rng.seed, self.tolerance, self.settings, lookahead=self.lookahead)
        found = [one for part in run.run() for one in part]
        tokens = torch.stack([one.tries.tokens[one.row] for one in found]).to(problem.device)
        energy = -widened(torch.stack([one.tries.log_target[one.row] for one in found])).to(problem.device)
        drawn = sum(proposal.count() for proposal in run.proposals)
        evaluations = torch.full_like(tokens[:, 0], -(-drawn // chains))
        return State(tokens), blank_info(energy)._replace(
            evaluations=evaluations, events=evaluations, swaps=(tokens != state.tokens).sum(-1)
        )
