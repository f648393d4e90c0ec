"""Structured Voronoi sampling by exact motion (Amini, Du, Cotterell 2023, made exact; docs/method.md).

A state is the tokens m and a point x. The point moves on circles (Gaussian base) or straight lines (uniform base)
and meets the bisectors between tokens, where the token changes if the energy suffices. With open walls x is drawn
anew before every trajectory and p(m) is exact for every scale and every steering field. With closed walls, the
paper's Voronoi measure, it is exact up to the masses of the cells. With one position this is the paper's VS.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.base import Info, Rng, SamplingError, Start, Target
from structured_voronoi.geometry.cells import MEMORY, Cells, spacing
from structured_voronoi.geometry.masses import GivenMasses, LogMass, Masses, estimated_masses
from structured_voronoi.geometry.memo import Memo, Proposal, empty_memo
from structured_voronoi.geometry.motion import (
    CLOSED,
    OPEN,
    Evaluate,
    Particle,
    Rotation,
    Straight,
    Walls,
    travel,
)
from structured_voronoi.samplers.evaluation import (
    Guidance,
    begin,
    box_of,
    cells_of_target,
    evaluate,
    number,
    one_of,
    positive,
    steers,
    whole,
)
from structured_voronoi.samplers.svs_paper import PaperSVS

PILOT_SCALES = (0.08, 0.12, 0.16, 0.22, 0.3, 0.45, 0.7, 1.0)
PILOT_CHAINS, PILOT_EVALUATIONS, PILOT_STEPS = 8, 32, 100
SETTLING_TRAJECTORIES = 15
"""Reflecting trajectories that bring x from the embedding to its distribution inside a closed cell."""


class Space(NamedTuple):
    """What stays the same during a run: the cells, how points move in them, and the cells' masses."""

    cells: Cells
    flow: Rotation | Straight
    masses: Masses


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
    """Bytes that one pass over the vocabulary may hold."""

    def __post_init__(self) -> None:
        positive(turn=self.turn, length=self.length)
        whole(mass_draws=self.mass_draws, max_events=self.max_events, remember=self.remember, memory=self.memory)
        positive(scale=None if self.scale == "auto" else self.scale)
        one_of(Literal["open", "closed"], walls=self.walls)
        one_of(Literal["gaussian", "uniform"], base=self.base)
        one_of(Guidance, guidance=self.guidance)
        number(guidance_weight=self.guidance_weight)
        if self.dimensions is not None:
            whole(dimensions=self.dimensions)
        if not isinstance(self.masses, tuple):
            one_of(Literal["equal", "estimated"], masses=self.masses)
        else:
            for mass in self.masses:
                positive(masses=mass)
        if self.base == "uniform" and (self.walls == "open" or self.masses == "estimated"):
            raise SamplingError(
                f"walls={self.walls!r}, masses={self.masses!r} do not go with the uniform base, which has closed cells "
                "of equal or given volume; set walls='closed' and masses='equal' or a tuple of volumes"
            )

    @staticmethod
    def paper(
        step_size: float,
        discontinuity_step: float,
        metropolis: bool = True,
        base: Literal["gaussian", "uniform"] = "gaussian",
    ) -> PaperSVS:
        """The paper's algorithm: leapfrog, the α grid of Find Discontinuity, RefractReflect."""
        return PaperSVS(step_size, discontinuity_step, metropolis, base)

    def tuned(self, target: Target, seed: int, start: Start = None) -> SVS:
        """With the scale that visits the most new states per cost on pilot chains of its own random stream."""
        if self.scale != "auto" or self.base == "uniform":
            return self
        if isinstance(start, Tensor):
            start = start[torch.arange(PILOT_CHAINS) % len(start)]
        device = target.embeddings.device

        def worth(one: SVS) -> float:
            return _new_states_per_cost(one, target, Rng(seed, PILOT_CHAINS, "pilot", device), start)

        return max((replace(self, scale=scale) for scale in PILOT_SCALES), key=worth)

    def init(self, target: Target, rng: Rng, start: Start) -> State:
        if self.scale == "auto" and self.base == "gaussian":
            return self.tuned(target, rng.seed, start).init(target, rng, start)
        space = self._space(target, rng)
        tokens, first = begin(target, space.cells, rng, start, self._guidance)
        cell = space.cells.cell_of[tokens]
        centre = self._centre(space, cell, first.field)
        mass = space.masses(cell, centre)
        known = Proposal(first.energy + mass.value, centre, first.finite)
        memo = empty_memo(self.remember, centre)
        memo.store(torch.arange(len(cell), device=cell.device), cell, known)
        state = State(tokens, first.energy, centre, space.cells.points(cell), *mass, memo, space)
        if self.walls == "closed":
            for _ in range(SETTLING_TRAJECTORIES):
                p, _, _ = travel(
                    space.cells,
                    self._launched(rng, state),
                    self._durations(rng, centre),
                    space.flow,
                    CLOSED,
                    None,
                )
                state = state._replace(x=p.x)
        return state

    def step(self, target: Target, rng: Rng, state: State) -> tuple[State, Info]:
        space = state.space
        start = self._launched(rng, state)
        end, tally, memo = travel(
            space.cells,
            start,
            self._durations(rng, state.centre),
            space.flow,
            self._walls,
            self._evaluator(target, space),
            self.max_events,
            state.memo,
        )
        mass = space.masses(end.cell, end.centre)
        new = State(space.cells.tokens[end.cell], end.potential - mass.value, end.centre, end.x, *mass, memo, space)
        info = Info(
            energy=new.energy,
            evaluations=tally.evaluations,
            gradients=tally.evaluations * steers(target, self._guidance),
            events=tally.events,
            swaps=tally.swaps,
            reflections=tally.reflections,
            diverging=tally.abandoned,
            nonfinite=tally.nonfinite,
        )
        if self.masses == "estimated" and self.walls == "closed":
            info = info._replace(log_mass=new.log_mass, unreliable=new.unreliable)
        return new, info

    def resume(
        self, target: Target, state: State, tokens: Int[Tensor, "chain n"], energy: Float[Tensor, " chain"]
    ) -> tuple[State, Tensor]:
        """The state after another sampler has moved the tokens, and for which chains it had to be evaluated.

        Closed walls are refused: their point would have to settle in the new cell first.
        """
        if self.walls == "closed":
            raise SamplingError("SVS with closed walls cannot take part in a cycle; use walls='open'")
        rows = (tokens != state.tokens).any(-1).nonzero().squeeze(-1)
        energy, centre, asked = energy.clone(), state.centre.clone(), torch.zeros_like(state.unreliable)
        memo = state.memo
        if len(rows):
            cell = state.space.cells.cell_of[tokens[rows]]
            new, known = memo.recall(rows, cell)
            asked[rows] = ~known
            if not known.all():
                answer = self._evaluator(target, state.space)(cell[~known])
                memo.store(rows[~known], cell[~known], answer)
                for part, value in zip(new, answer, strict=True):
                    part[~known] = value
            centre[rows] = new.centre  # the energy is known, and finite, even where the field is not
        return state._replace(tokens=tokens, energy=energy, centre=centre, memo=memo), asked

    @property
    def _walls(self) -> Walls:
        return OPEN if self.walls == "open" else CLOSED

    @property
    def _guidance(self) -> Guidance:
        return "none" if self.base == "uniform" or self.guidance_weight == 0 else self.guidance

    def _space(self, target: Target, rng: Rng) -> Space:
        cells = cells_of_target(target, self.dimensions, self.memory)
        if self.base == "uniform":
            if cells.axes is not None:
                raise SamplingError(
                    "dimensions does not go with the uniform base, whose box has them all; leave it out"
                )
            return Space(cells, Straight(*box_of(target, cells)), self._given_masses(cells))
        assert self.scale != "auto"
        sigma = self.scale * spacing(cells)
        if self.masses != "estimated" or self.walls == "open":
            return Space(cells, Rotation(sigma), self._given_masses(cells))
        noise = rng.fork("masses", chains=1).normal(self.mass_draws, cells.table.shape[1])[0]
        return Space(cells, Rotation(sigma), estimated_masses(cells, sigma, noise))

    def _given_masses(self, cells: Cells) -> GivenMasses:
        if isinstance(self.masses, str) or self.walls == "open":
            return GivenMasses(torch.zeros_like(cells.half_norm))
        if len(self.masses) != len(cells.cell_of):
            raise SamplingError(
                f"masses holds {len(self.masses)} numbers for {len(cells.cell_of)} tokens; give one for each"
            )
        return GivenMasses(cells.half_norm.new_tensor(self.masses)[cells.tokens].log())

    def _centre(self, space: Space, cell: Tensor, field: Tensor) -> Tensor:
        """c_m = v_m + σ² g_m, so that the force at the embedding is exactly g_m."""
        points = space.cells.points(cell)
        if isinstance(space.flow, Straight) or self._guidance == "none":
            return points
        return points + space.flow.sigma**2 * self.guidance_weight * space.cells.field(field)

    def _launched(self, rng: Rng, state: State) -> Particle:
        """Every chain with a new momentum and, with open walls, a new point."""
        space, centre = state.space, state.centre
        x = state.x
        if self.walls == "open":
            assert isinstance(space.flow, Rotation)
            x = centre + space.flow.sigma * rng.normal(*centre.shape[1:]).to(centre)
        r = self._momentum(rng, centre)
        return Particle(space.cells.cell_of[state.tokens], x, r, state.energy + state.log_mass, centre)

    def _momentum(self, rng: Rng, like: Tensor) -> Tensor:
        """r ~ N(0, I), as the kinetic energy ½‖r‖² requires."""
        return rng.normal(*like.shape[1:]).to(like)

    def _durations(self, rng: Rng, like: Tensor) -> Tensor:
        """Trajectories of varied length: those of one length may resonate with the walls."""
        mean = self.length if self.base == "uniform" else self.turn * math.pi / 2
        return (mean * (0.5 + rng.uniform())).to(like)

    def _evaluator(self, target: Target, space: Space) -> Evaluate:
        def of(cell: Tensor) -> Proposal:
            result = evaluate(target, space.cells.tokens[cell], self._guidance)
            centre = self._centre(space, cell, result.field)
            mass: LogMass = space.masses(cell, centre)
            return Proposal(result.energy + mass.value, centre, result.finite)

        return of


def _new_states_per_cost(sampler: SVS, target: Target, rng: Rng, start: Start) -> float:
    state = sampler.init(target, rng, start)
    seen = [{tuple(row)} for row in state.tokens.tolist()]
    budget, cost = PILOT_CHAINS * PILOT_EVALUATIONS, 0
    for _ in range(PILOT_STEPS):
        state, info = sampler.step(target, rng, state)
        cost += int(info.evaluations.sum())
        for states, row in zip(seen, state.tokens.tolist(), strict=True):
            states.add(tuple(row))
        if cost >= budget:
            break
    return sum(len(states) - 1 for states in seen) / max(cost, budget)
