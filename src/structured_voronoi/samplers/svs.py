"""Structured Voronoi sampling by exact motion.

The algorithm of Amini, Du and Cotterell (2023), made exact (docs/method.md). A state is the tokens m and a point x,
which moves on circles (Gaussian base) or straight lines (uniform base). At the bisector between two tokens the token
changes if the kinetic energy suffices. With open walls x is redrawn before every trajectory, and p(m) is stationary for
every scale and steering field; with closed walls, the paper's Voronoi measure, up to the masses of the cells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import Chains, Guidance, Start, Synchronised, Target
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.info import Info
from structured_voronoi.core.streams import MEMORY, Rng
from structured_voronoi.core.validation import check_choice, check_count, check_finite, check_positive
from structured_voronoi.geometry.cells import Cells
from structured_voronoi.geometry.flows import CLOSED_WALLS, OPEN_WALLS, Particle, Rotation, Straight, Walls
from structured_voronoi.geometry.memo import Memo, Proposal, empty_memo
from structured_voronoi.geometry.motion import Evaluate, Trajectory, settle, simulate
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.problem.starts import find_start

if TYPE_CHECKING:
    from structured_voronoi.baselines.svs_paper import PaperSVS
    from structured_voronoi.geometry.masses import Masses

PILOT_SCALES = (0.08, 0.12, 0.16, 0.22, 0.3, 0.45, 0.7, 1.0)
"""The scales that ``scale="auto"`` compares."""
PILOT_CHAINS, PILOT_STEPS = 8, 100


@dataclass(frozen=True, eq=False)
class Space:
    """The constants of a run."""

    cells: Cells
    flow: Rotation | Straight
    masses: Masses | None
    """None if they cancel: with open walls, or if all are equal."""


class State(NamedTuple):
    """The tokens and, for closed walls, the point of every chain, with their evaluation."""

    tokens: Int[Tensor, "chain n"]
    energy: Float[Tensor, " chain"]
    centre: Float[Tensor, "chain n k"]
    x: Float[Tensor, "chain n k"]
    log_mass: Float[Tensor, " chain"]
    unreliable: Bool[Tensor, " chain"]
    memo: Memo
    space: Space


@dataclass(frozen=True)
class SVS:
    """Structured Voronoi sampling.

    Parameters
    ----------
    scale
        σ in units of the median distance between nearest neighbours among the embeddings; ``"auto"`` tunes it on pilot
        chains.
    walls
        ``"open"``: exact. ``"closed"``: the paper's Voronoi measure.
    masses
        Closed walls: masses of the cells, ``"equal"``, ``"estimated"``, or a tuple with one number for each token.
    guidance
        The steering field: the target's guide, or its gradient if it has none (``"forward"``), its gradient
        (``"full"``), or none (``"none"``).
    guidance_weight
        Factor of the field.
    base
        ``"gaussian"``, or ``"uniform"`` inside the target's ``box``.
    turn
        Gaussian base: mean length of a trajectory in quarter turns. Lengths are uniform from 0.5 to 1.5 times the mean.
    length
        Uniform base: mean duration of a trajectory.
    mass_draws
        Draws from which masses are estimated.
    dimensions
        Use this many principal components of the embeddings; None: all dimensions.
    max_events
        A trajectory with more events is abandoned, and the chain stays where it was.
    remember
        States whose evaluation each chain remembers.
    memory
        Bytes for temporary tables, and for the remembered states of 64 chains.
    settling_trajectories
        Closed walls: trajectories without change of token that equilibrate the point in a new cell.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> target = sv.PottsTarget(side=3, states=2, coupling=0.3)
    >>> draws = sv.sample(target, sv.SVS(scale=0.5), chains=4, draws=100, seed=0, progress=False)
    >>> draws["posterior"]["tokens"].shape
    (4, 100, 9)
    """

    scale: float | Literal["auto"] = "auto"
    walls: Literal["open", "closed"] = "open"
    masses: Literal["equal", "estimated"] | tuple[float, ...] = "equal"
    guidance: Guidance = "forward"
    guidance_weight: float = 1.0
    base: Literal["gaussian", "uniform"] = "gaussian"
    turn: float = 1.0
    length: float = 4.0
    mass_draws: int = 4096
    dimensions: int | None = None
    max_events: int = 1000
    remember: int = 8
    memory: int = MEMORY
    settling_trajectories: int = 15

    def __post_init__(self) -> None:
        check_positive(turn=self.turn, length=self.length)
        check_count(mass_draws=self.mass_draws, max_events=self.max_events, remember=self.remember)
        check_count(most=2**63, memory=self.memory, settling_trajectories=self.settling_trajectories)
        check_positive(scale=None if self.scale == "auto" else self.scale)
        check_choice(Literal["open", "closed"], walls=self.walls)
        check_choice(Literal["gaussian", "uniform"], base=self.base)
        check_choice(Guidance, guidance=self.guidance)
        check_finite(guidance_weight=self.guidance_weight)
        if self.dimensions is not None:
            check_count(dimensions=self.dimensions)
        if isinstance(self.masses, tuple):
            for mass in self.masses:
                check_positive(masses=mass)
        else:
            check_choice(Literal["equal", "estimated"], masses=self.masses)
        settings = f"walls={self.walls!r}, masses={self.masses!r}, dimensions={self.dimensions}"
        refused = self.walls == "open" or self.masses == "estimated" or self.dimensions is not None
        if self.base == "uniform" and refused:
            remedy = "set walls='closed', masses='equal' or a tuple of volumes, and dimensions=None"
            raise SamplingError(f"base='uniform' does not support {settings}", remedy=remedy)

    @property
    def exact(self) -> bool:
        """Whether p(m) is stationary; for the uniform base if cells have the volumes that ``masses`` says."""
        return self.walls == "open" or self.base == "uniform"

    @staticmethod
    def paper(
        step_size: float,
        discontinuity_step: float,
        metropolis: bool = True,
        base: Literal["gaussian", "uniform"] = "gaussian",
    ) -> PaperSVS:
        """The algorithm that the paper prints: leapfrog steps and a grid of discontinuity steps. Not exact.

        Parameters
        ----------
        step_size
            ε, the size of the leapfrog step.
        discontinuity_step
            α, the fraction of a step at which discontinuities are looked for.
        metropolis
            Accept or reject each step; the paper's runs on text do not.
        base
            The base measure.

        Examples
        --------
        >>> SVS.paper(0.5, 0.2).exact
        False
        """
        from structured_voronoi.baselines.svs_paper import PaperSVS

        return PaperSVS(step_size, discontinuity_step, metropolis, base)

    def tuned(self, target: Target | Problem, seed: int, start: Start = None) -> SVS:
        """A copy with the scale that visits the most new states per evaluation on pilot chains."""
        if self.scale != "auto" or self.base == "uniform":
            return self
        problem = bind(target)
        if isinstance(start, Tensor):
            start = start[torch.arange(PILOT_CHAINS) % len(start)]
        candidates = [replace(self, scale=scale) for scale in PILOT_SCALES]
        return max(candidates, key=lambda candidate: _new_states_per_evaluation(candidate, problem, seed, start))

    def init(self, target: Target | Problem, rng: Rng, start: Start) -> State:
        """The first state; closed walls draw a point in each cell."""
        problem = bind(target)
        if self.scale == "auto" and self.base == "gaussian":
            return self.tuned(problem, rng.seed, start).init(problem, rng, start)
        space = self._space(problem, rng)
        tokens, first = find_start(problem, rng, start, self._guidance)
        cell = space.cells.cell_of[tokens]
        centre = self._centre(space, cell, first.field)
        log_mass, unreliable = _log_mass(space, cell, centre)
        memo = empty_memo(self.remember, centre, self.memory // 64)
        rows = torch.arange(len(cell), device=cell.device)
        memo.store(rows, cell, Proposal(first.energy + log_mass, centre, first.possible))
        x = self._settle(space, cell, centre, rng) if self.walls == "closed" else space.cells.points(cell)
        return State(tokens, first.energy, centre, x, log_mass, unreliable, memo, space)

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        """One trajectory of every chain."""
        problem, space = bind(target), state.space
        end, counts, memo = simulate(self.trajectory(problem, rng, state), state.memo)
        log_mass, unreliable = _log_mass(space, end.cell, end.centre)
        tokens = space.cells.tokens[end.cell]
        new = State(tokens, end.potential - log_mass, end.centre, end.x, log_mass, unreliable, memo, space)
        info = Info(
            energy=new.energy,
            evaluations=counts.evaluations,
            gradients=counts.evaluations * problem.steers(self._guidance),
            events=counts.events,
            swaps=(tokens != state.tokens).sum(-1),
            reflections=counts.reflections,
            diverging=counts.abandoned,
            nonfinite=counts.nonfinite,
            crossings=counts.crossings,
        )
        if self.masses == "estimated" and self.walls == "closed":
            info = info._replace(log_mass=new.log_mass, unreliable=new.unreliable)
        return new, info

    def trajectory(self, target: Target | Problem, rng: Rng, state: State) -> Trajectory:
        """The trajectory that a step follows: a new momentum, a random duration and, for open walls, a new point."""
        problem, space, centre, x = bind(target), state.space, state.centre, state.x
        if self.walls == "open":
            assert isinstance(space.flow, Rotation)
            x = centre + space.flow.sigma * rng.normal(*centre.shape[1:]).to(centre)
        r = self.momentum(rng, centre)
        start = Particle(space.cells.cell_of[state.tokens], x, r, state.energy + state.log_mass, centre)
        duration = (self._mean_duration * (0.5 + rng.uniform())).to(centre)  # a fixed one may resonate with the walls
        evaluate = self._evaluator(problem, space)
        return Trajectory(space.cells, start, duration, space.flow, self.crossing_rule, evaluate, self.max_events)

    def momentum(self, rng: Rng, like: Float[Tensor, "chain n k"]) -> Float[Tensor, "chain n k"]:
        """r ~ N(0, I), as the kinetic energy ½‖r‖² requires."""
        return rng.normal(*like.shape[1:]).to(like)

    @property
    def crossing_rule(self) -> Walls:
        """The rule at a wall."""
        return OPEN_WALLS if self.walls == "open" else CLOSED_WALLS

    def synchronise(
        self,
        target: Target | Problem,
        rng: Rng,
        state: State,
        tokens: Int[Tensor, "chain n"],
        energy: Float[Tensor, " chain"],
    ) -> Synchronised:
        """The state after another sampler has moved the tokens, with a random point in the new cell."""
        problem, space, memo = bind(target), state.space, state.memo.copy()
        rows = (tokens != state.tokens).any(-1).nonzero().squeeze(-1)
        centre, x, log_mass, unreliable = (part.clone() for part in state[2:6])
        evaluations = torch.zeros_like(tokens[:, 0])
        if len(rows):
            cell = space.cells.cell_of[tokens[rows]]
            proposal, known = memo.recall(rows, cell)
            evaluations[rows] = (~known).long()
            if not known.all():
                found = self._evaluator(problem, space)(cell[~known])
                memo.store(rows[~known], cell[~known], found)
                proposal.centre[~known] = found.centre
            centre[rows] = proposal.centre
            log_mass[rows], unreliable[rows] = _log_mass(space, cell, proposal.centre)
            if self.walls == "closed":
                row_rng = rng.select(rows)
                x[rows] = self._settle(space, cell, proposal.centre, row_rng)
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
            count = len(cells.cell_of)
            raise SamplingError(
                f"masses holds {len(self.masses)} numbers for {count} tokens", remedy="give one for each"
            )
        return GivenMasses(cells.half_norm.new_tensor(self.masses)[cells.tokens].log())

    def _settle(self, space: Space, cell: Tensor, centre: Tensor, rng: Rng) -> Tensor:
        """A random point of each cell."""
        return settle(space.cells, cell, centre, space.flow, self._mean_duration, rng, self.settling_trajectories)

    def _centre(self, space: Space, cell: Tensor, field: Tensor) -> Tensor:
        """c_m = v_m + σ² g_m, so that the force at the embedding is g_m."""
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
    """log μ(C_m) of each chain and whether it is unreliable; zero if masses cancel."""
    if space.masses is None:
        return centre.new_zeros(len(cell)), torch.zeros_like(cell[:, 0], dtype=torch.bool)
    return space.masses(cell, centre)


def _new_states_per_evaluation(sampler: SVS, problem: Problem, seed: int, start: Start) -> float:
    """New states that pilot chains visit, per evaluation; at most 32 evaluations a chain."""
    chains = Chains(sampler, problem, Rng(seed, PILOT_CHAINS, "pilot", problem.device), start)
    visited = [{tuple(row)} for row in chains.state.tokens.tolist()]
    budget, cost = PILOT_CHAINS * 32, 0
    for state, info in islice(chains, PILOT_STEPS):
        cost += int(info.evaluations.sum())
        for states, row in zip(visited, state.tokens.tolist(), strict=True):
            states.add(tuple(row))
        if cost >= budget:
            break
    return sum(len(states) - 1 for states in visited) / max(cost, budget)
