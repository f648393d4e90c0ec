"""Structured Voronoi sampling by exact motion (Amini, Du, Cotterell 2023, made exact; docs/method.md).

A state is the tokens m and a point x. The point moves on circles (Gaussian base) or straight lines (uniform base)
and meets the bisectors between tokens, where the token changes if the energy suffices. With open walls x is drawn
anew before every trajectory and p(m) is exact for every scale and every steering field. With closed walls, the
paper's Voronoi measure, it is exact up to the masses of the cells. With one position this is the paper's VS.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import Chains, Guidance, Info, Start, Synchronised, Target
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.streams import MEMORY, Rng
from structured_voronoi.core.validation import check_choice, check_count, check_finite, check_positive
from structured_voronoi.geometry.cells import Cells
from structured_voronoi.geometry.memo import Memo, Proposal, empty_memo
from structured_voronoi.geometry.motion import (
    CLOSED,
    OPEN,
    Evaluate,
    Journey,
    Particle,
    Rotation,
    Straight,
    Walls,
    settle,
    travel,
)
from structured_voronoi.problem.drawing import find_start
from structured_voronoi.problem.problem import Problem, bind

if TYPE_CHECKING:
    from structured_voronoi.baselines.svs_paper import PaperSVS
    from structured_voronoi.geometry.masses import Masses

PILOT_SCALES = (0.08, 0.12, 0.16, 0.22, 0.3, 0.45, 0.7, 1.0)
PILOT_CHAINS, PILOT_EVALUATIONS, PILOT_STEPS = 8, 32, 100
CHAINS_IN_MEMORY = 64
"""How many chains' memos together may fill the memory bound."""


@dataclass(frozen=True, eq=False)
class Space:
    """The constants of a run: the cells, how points move in them, and the cells' masses."""

    cells: Cells
    flow: Rotation | Straight
    masses: Masses | None
    """None where they do not matter: with open walls, or if all are equal."""


class State(NamedTuple):
    tokens: Int[Tensor, "chain n"]
    energy: Float[Tensor, " chain"]
    centre: Float[Tensor, "chain n k"]
    x: Float[Tensor, "chain n k"]
    """The point; open walls draw it anew before every trajectory."""
    log_mass: Float[Tensor, " chain"]
    unreliable: Bool[Tensor, " chain"]
    memo: Memo
    space: Space


@dataclass(frozen=True)
class SVS:
    """Settings of structured Voronoi sampling.

    >>> import structured_voronoi as sv
    >>> target = sv.PottsTarget(side=3, states=2, coupling=0.3)
    >>> draws = sv.sample(target, sv.SVS(scale=0.5), chains=4, draws=100, seed=0, progress=False)
    >>> draws["posterior"]["tokens"].shape
    (4, 100, 9)
    """

    scale: float | Literal["auto"] = "auto"
    """σ in units of the median nearest-neighbour distance of the table used; "auto" tunes it on pilot chains."""
    walls: Literal["open", "closed"] = "open"
    masses: Literal["equal", "estimated"] | tuple[float, ...] = "equal"
    """Closed walls: the masses of the cells, or one number (mass, volume) for each token of the vocabulary."""
    guidance: Guidance = "forward"
    """Which field steers: the target's cheap `guide` (else its gradient), its full gradient, or none."""
    guidance_weight: float = 1.0
    base: Literal["gaussian", "uniform"] = "gaussian"
    turn: float = 1.0
    """Gaussian base: mean length of a trajectory in quarter turns; each is drawn from [½, 3/2] of it."""
    length: float = 4.0
    """Uniform base: mean length (time) of a trajectory, drawn likewise."""
    mass_draws: int = 4096
    dimensions: int | None = None
    """Take the cells in so many principal components of the embeddings."""
    max_events: int = 1000
    remember: int = 8
    """How many evaluated states a chain remembers, so as not to evaluate them again."""
    memory: int = MEMORY
    """Bytes that one pass over the vocabulary may hold, and that the memos of 64 chains may fill."""

    def __post_init__(self) -> None:
        check_positive(turn=self.turn, length=self.length)
        check_count(mass_draws=self.mass_draws, max_events=self.max_events, remember=self.remember)
        check_count(most=2**63, memory=self.memory)
        check_positive(scale=None if self.scale == "auto" else self.scale)
        check_choice(Literal["open", "closed"], walls=self.walls)
        check_choice(Literal["gaussian", "uniform"], base=self.base)
        check_choice(Guidance, guidance=self.guidance)
        check_finite(guidance_weight=self.guidance_weight)
        if self.dimensions is not None:
            check_count(dimensions=self.dimensions)
        if not isinstance(self.masses, tuple):
            check_choice(Literal["equal", "estimated"], masses=self.masses)
        else:
            for mass in self.masses:
                check_positive(masses=mass)
        if self.base == "uniform" and (self.walls == "open" or self.masses == "estimated"):
            raise SamplingError(
                f"walls={self.walls!r}, masses={self.masses!r} do not go with the uniform base, which has closed "
                "cells of equal or given volume",
                remedy="set walls='closed' and masses='equal' or a tuple of volumes",
            )

    @staticmethod
    def paper(
        step_size: float,
        discontinuity_step: float,
        metropolis: bool = True,
        base: Literal["gaussian", "uniform"] = "gaussian",
    ) -> PaperSVS:
        """The paper's algorithm: leapfrog, the α grid of Find Discontinuity, RefractReflect."""
        from structured_voronoi.baselines.svs_paper import PaperSVS

        return PaperSVS(step_size, discontinuity_step, metropolis, base)

    def tuned(self, target: Target | Problem, seed: int, start: Start = None) -> SVS:
        """A copy with the scale that visits the most new states per evaluation on pilot chains (a separate stream)."""
        if self.scale != "auto" or self.base == "uniform":
            return self
        problem = bind(target)
        if isinstance(start, Tensor):
            start = start[torch.arange(PILOT_CHAINS) % len(start)]
        candidates = [replace(self, scale=scale) for scale in PILOT_SCALES]
        return max(candidates, key=lambda candidate: _new_states_per_cost(candidate, problem, seed, start))

    def init(self, target: Target | Problem, rng: Rng, start: Start) -> State:
        problem = bind(target)
        if self.scale == "auto" and self.base == "gaussian":
            return self.tuned(problem, rng.seed, start).init(problem, rng, start)
        space = self._space(problem, rng)
        tokens, first = find_start(problem, rng, start, self._guidance)
        cell = space.cells.cell_of[tokens]
        centre = self._centre(space, cell, first.field)
        log_mass, unreliable = _log_mass(space, cell, centre)
        memo = empty_memo(self.remember, centre, self.memory // CHAINS_IN_MEMORY)
        memo.store(
            torch.arange(len(cell), device=cell.device),
            cell,
            Proposal(first.energy + log_mass, centre, first.possible),
        )
        x = space.cells.points(cell)
        if self.walls == "closed":
            x = settle(space.cells, cell, centre, space.flow, self._mean_duration, rng)
        return State(tokens, first.energy, centre, x, log_mass, unreliable, memo, space)

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        problem, space = bind(target), state.space
        end, tally, memo = travel(self.journey(problem, rng, state), state.memo)
        log_mass, unreliable = _log_mass(space, end.cell, end.centre)
        tokens = space.cells.tokens[end.cell]
        new = State(tokens, end.potential - log_mass, end.centre, end.x, log_mass, unreliable, memo, space)
        info = Info(
            energy=new.energy,
            evaluations=tally.evaluations,
            gradients=tally.evaluations * problem.steers(self._guidance),
            events=tally.events,
            swaps=(tokens != state.tokens).sum(-1),
            reflections=tally.reflections,
            diverging=tally.abandoned,
            nonfinite=tally.nonfinite,
            crossings=tally.crossings,
        )
        if self.masses == "estimated" and self.walls == "closed":
            info = info._replace(log_mass=new.log_mass, unreliable=new.unreliable)
        return new, info

    def journey(self, target: Target | Problem, rng: Rng, state: State) -> Journey:
        """The trajectory of a step, about to set out: a new momentum and, with open walls, a new point."""
        problem, space, centre = bind(target), state.space, state.centre
        x = state.x
        if self.walls == "open":
            assert isinstance(space.flow, Rotation)
            x = centre + space.flow.sigma * rng.normal(*centre.shape[1:]).to(centre)
        r = self.momentum(rng, centre)
        start = Particle(space.cells.cell_of[state.tokens], x, r, state.energy + state.log_mass, centre)
        # trajectories of one length may resonate with the walls: their lengths vary
        duration = (self._mean_duration * (0.5 + rng.uniform())).to(centre)
        evaluate = self._evaluator(problem, space)
        return Journey(space.cells, start, duration, space.flow, self.crossing_rule, evaluate, self.max_events)

    def momentum(self, rng: Rng, like: Float[Tensor, "chain n k"]) -> Float[Tensor, "chain n k"]:
        """r ~ N(0, I), as the kinetic energy ½‖r‖² requires."""
        return rng.normal(*like.shape[1:]).to(like)

    @property
    def crossing_rule(self) -> Walls:
        """The rule where the point meets a wall."""
        return OPEN if self.walls == "open" else CLOSED

    def synchronise(
        self,
        target: Target | Problem,
        rng: Rng,
        state: State,
        tokens: Int[Tensor, "chain n"],
        energy: Float[Tensor, " chain"],
    ) -> Synchronised:
        """The state after another sampler has moved the tokens; closed walls let the point settle in its new cell."""
        problem, space, memo = bind(target), state.space, state.memo.copy()
        rows = (tokens != state.tokens).any(-1).nonzero().squeeze(-1)
        centre, x, log_mass, unreliable = (part.clone() for part in state[2:6])
        evaluations = torch.zeros_like(tokens[:, 0])
        if len(rows):
            cell = space.cells.cell_of[tokens[rows]]
            proposal, known = memo.recall(rows, cell)
            evaluations[rows] = (~known).long()
            if not known.all():
                answer = self._evaluator(problem, space)(cell[~known])
                memo.store(rows[~known], cell[~known], answer)
                proposal.centre[~known] = answer.centre
            centre[rows] = proposal.centre
            log_mass[rows], unreliable[rows] = _log_mass(space, cell, proposal.centre)
            if self.walls == "closed":
                row_rng = rng.select(rows)
                x[rows] = settle(space.cells, cell, proposal.centre, space.flow, self._mean_duration, row_rng)
                rng.catch_up(rows, row_rng)
        new = State(tokens, energy.clone(), centre, x, log_mass, unreliable, memo, space)
        return Synchronised(new, evaluations, evaluations * problem.steers(self._guidance))

    @property
    def _guidance(self) -> Guidance:
        return "none" if self.base == "uniform" or self.guidance_weight == 0 else self.guidance

    @property
    def _mean_duration(self) -> float:
        return self.length if self.base == "uniform" else self.turn * math.pi / 2

    def _space(self, problem: Problem, rng: Rng) -> Space:
        geometry = problem.geometry(self.dimensions, self.memory)
        cells = geometry.cells
        if self.base == "uniform":
            if cells.axes is not None:
                raise SamplingError(
                    "dimensions does not go with the uniform base, whose box has them all",
                    remedy="leave it out",
                )
            return Space(cells, Straight(*problem.box_bounds(cells)), self._masses(cells, rng, 0.0))
        assert self.scale != "auto"
        sigma = self.scale * geometry.spacing
        return Space(cells, Rotation(sigma), self._masses(cells, rng, sigma))

    def _masses(self, cells: Cells, rng: Rng, sigma: float) -> Masses | None:
        if self.walls == "open" or self.masses == "equal":
            return None
        from structured_voronoi.geometry.masses import GivenMasses, estimated_masses

        if isinstance(self.masses, str):
            noise = rng.fork("masses", chains=1).normal(self.mass_draws, cells.table.shape[1])[0]
            return estimated_masses(cells, sigma, noise)
        if len(self.masses) != len(cells.cell_of):
            raise SamplingError(
                f"masses holds {len(self.masses)} numbers for {len(cells.cell_of)} tokens",
                remedy="give one for each",
            )
        return GivenMasses(cells.half_norm.new_tensor(self.masses)[cells.tokens].log())

    def _centre(self, space: Space, cell: Tensor, field: Tensor) -> Tensor:
        """c_m = v_m + σ² g_m, so that the force at the embedding is exactly g_m."""
        points = space.cells.points(cell)
        if isinstance(space.flow, Straight) or self._guidance == "none":
            return points
        return points + space.flow.sigma**2 * self.guidance_weight * space.cells.field(field)

    def _evaluator(self, problem: Problem, space: Space) -> Evaluate:
        def evaluate(cell: Tensor) -> Proposal:
            evaluation = problem.evaluate(space.cells.tokens[cell], self._guidance)
            centre = self._centre(space, cell, evaluation.field)
            return Proposal(evaluation.energy + _log_mass(space, cell, centre)[0], centre, evaluation.possible)

        return evaluate


def _log_mass(space: Space, cell: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """log μ(C_m) of each chain, and whether it is unreliable; zero where masses do not matter."""
    if space.masses is None:
        return centre.new_zeros(len(cell)), torch.zeros_like(cell[:, 0], dtype=torch.bool)
    return space.masses(cell, centre)


def _new_states_per_cost(sampler: SVS, problem: Problem, seed: int, start: Start) -> float:
    chains = Chains(sampler, problem, Rng(seed, PILOT_CHAINS, "pilot", problem.device), start)
    visited = [{tuple(row)} for row in chains.state.tokens.tolist()]
    budget, cost = PILOT_CHAINS * PILOT_EVALUATIONS, 0
    for state, info in islice(chains, PILOT_STEPS):
        cost += int(info.evaluations.sum())
        for states, row in zip(visited, state.tokens.tolist(), strict=True):
            states.add(tuple(row))
        if cost >= budget:
            break
    return sum(len(states) - 1 for states in visited) / max(cost, budget)
