"""Deliberately broken samplers (twins): a test must detect them at the settings at which it passes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from structured_voronoi.core.contracts import Target
from structured_voronoi.core.info import Info
from structured_voronoi.core.streams import Rng
from structured_voronoi.engine.rounds import Rounds, Work
from structured_voronoi.engine.tries import Tries
from structured_voronoi.geometry.flows import Walls, refracted
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.lookahead.weighing import Proposal, Weighed
from structured_voronoi.problem.problem import Problem
from structured_voronoi.samplers import guided
from structured_voronoi.samplers.guided import Guided
from structured_voronoi.samplers.gwg import GibbsWithGradients
from structured_voronoi.samplers.pncg import PNCG
from structured_voronoi.samplers.refresh import Refresh, State
from structured_voronoi.samplers.rejection import Rejection
from structured_voronoi.samplers.svs import SVS


@dataclass(frozen=True)
class OutwardOnly(SVS):
    """Gates that work in one direction only, which is not reversible."""

    @property
    def crossing_rule(self) -> Walls:
        return Walls(inward=False, reflect=False)


@dataclass(frozen=True)
class ColdMomentum(SVS):
    """r ~ N(0, εI) with ε = 0.5, as printed in the paper, although the kinetic energy is ½‖r‖²."""

    def momentum(self, rng: Rng, like: Tensor) -> Tensor:
        return super().momentum(rng, like).mul(0.5**0.5)


@dataclass(frozen=True)
class DividedBySquare(SVS):
    """Refraction as printed in the paper, r⊥ √(‖r⊥‖² - 2ΔU) / ‖r⊥‖², which does not conserve the energy."""

    @property
    def crossing_rule(self) -> Walls:
        return super().crossing_rule._replace(refract=refracted_as_printed)


def refracted_as_printed(speed: Tensor, jump: Tensor) -> Tensor:
    return refracted(speed, jump) / speed.abs().clamp(min=torch.finfo(speed.dtype).tiny)


class _WithoutReverse:
    """Accept as if proposals were symmetric."""

    def log_ratio(self, energy: Tensor, proposed_energy: Tensor, log_forward: Tensor, log_reverse: Tensor) -> Tensor:
        return energy - proposed_energy


@dataclass(frozen=True)
class PNCGWithoutReverse(_WithoutReverse, PNCG):
    """p-NCG without the ratio of proposal probabilities."""


@dataclass(frozen=True)
class GibbsWithoutReverse(_WithoutReverse, GibbsWithGradients):
    """Gibbs with gradients without the ratio of proposal probabilities."""


@dataclass(frozen=True)
class RefreshWithoutRatio(Refresh):
    """Refresh that accepts every redraw, whatever the text after the block and the controls."""

    def log_ratio(self, here: State, there: State, stop: int) -> Tensor:
        return torch.zeros_like(here.log_rest)


@dataclass(frozen=True)
class RefreshBlindToControls(Refresh):
    """Refresh that ignores the controls."""

    def log_ratio(self, here: State, there: State, stop: int) -> Tensor:
        return (there.log_probs - here.log_probs)[:, stop:].sum(-1)


@dataclass(frozen=True)
class RejectionOfNothing(Rejection):
    """Rejection that accepts every try with a finite score."""

    def log_chance(self, problem: Problem, tokens: Tensor, log_rest: Tensor) -> Tensor:
        return torch.where(log_rest.isfinite(), 0.0, -torch.inf)


@dataclass
class RoundsWithoutWeights(Rounds):
    """Engine with weight 1 for every try that satisfies the controls."""

    def _record(self, number: int, work: Work, drawn: Tries) -> None:
        log_weight = torch.where(drawn.log_weight.isfinite(), 0.0, -torch.inf).to(drawn.log_weight)
        super()._record(number, work, drawn._replace(log_weight=log_weight))


class _WithoutProposal:
    """Weights without the proposal density q."""

    def log_weight(self, text: Proposal) -> Tensor:
        return text.log_p.sum(-1) + text.log_rest


@dataclass(frozen=True, eq=False)
class GuidedWithoutProposal(_WithoutProposal, Guided):
    """Guided sampling with weights without q."""


@dataclass(frozen=True)
class RefreshWithoutProposal(_WithoutProposal, Refresh):
    """Guided refresh with weights without q."""


@dataclass(frozen=True, eq=False)
class GuidedWithoutPresent(Guided):
    """Guided sampling whose choice excludes the current text, unless no other is possible."""

    def _pick(self, rng: Rng, log_weights: Tensor) -> Tensor:
        others = log_weights.clone()
        others[:, 0] = -torch.inf
        possible = others.isfinite().any(-1, keepdim=True)
        return super()._pick(rng, torch.where(possible, others, log_weights))


@dataclass(frozen=True, eq=False)
class GuidedStillLearning(Guided):
    """Guided sampling with another lookahead in every step, while the current text keeps its old weight."""

    other: Lookahead | None = None

    def step(self, target: Target | Problem, rng: Rng, state: guided.State) -> tuple[guided.State, Info]:
        learnt = self.lookahead if state.lookahead is self.other else self.other
        assert learnt is not None
        return super().step(target, rng, state._replace(lookahead=learnt))


@dataclass(frozen=True, eq=False)
class BlindLookahead(Lookahead):
    """Lookahead that never proposes one of the possible tokens."""

    never: int = 0

    def weigh(
        self, problem: Problem, states: dict[str, Tensor], n: int, log_probs: Tensor, hidden: Tensor | None
    ) -> Weighed:
        weighed = super().weigh(problem, states, n, log_probs, hidden)
        value = weighed.value.clone()
        value[:, self.never] = 0.0
        return weighed._replace(value=value)
