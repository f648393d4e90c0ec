"""Cycle: one step of each of several samplers in turn. A cycle of moves that keep a distribution keeps it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import Info, Sampler, Start, Synchronised, Target, merge_infos, tune
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.streams import Rng
from structured_voronoi.problem.problem import Problem, bind


class State(NamedTuple):
    tokens: Int[Tensor, "chain n"]
    energy: Float[Tensor, " chain"]
    parts: tuple[Any, ...]
    """The state of each sampler, brought up to date when its turn comes."""


@dataclass(frozen=True, init=False)
class Cycle:
    """`Cycle(SVS(), Refresh())` takes one step of each; a sampler needs `synchronise` to take part.

    >>> import structured_voronoi as sv
    >>> sv.Cycle(sv.PNCG(2.0), sv.GibbsWithGradients()).samplers[0].step_size
    2.0
    """

    samplers: tuple[Sampler, ...]

    def __init__(self, *samplers: Sampler) -> None:
        if len(samplers) < 2:
            raise SamplingError(f"a cycle of {len(samplers)} samplers", remedy="give two or more")
        for sampler in samplers:
            if not hasattr(sampler, "synchronise"):
                raise SamplingError(
                    f"{type(sampler).__name__} cannot take part in a cycle: it draws every text anew, or has no "
                    "`synchronise`",
                    remedy="use it alone, or another sampler",
                )
        object.__setattr__(self, "samplers", samplers)

    def tuned(self, target: Target | Problem, seed: int, start: Start = None) -> Cycle:
        return Cycle(*(tune(sampler, target, seed, start) for sampler in self.samplers))

    def init(self, target: Target | Problem, rng: Rng, start: Start) -> State:
        problem, (first, *others) = bind(target), self.samplers
        state = first.init(problem, rng, start)
        parts = [state, *(sampler.init(problem, rng, state.tokens) for sampler in others)]
        return State(state.tokens, state.energy, tuple(parts))

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        problem, tokens, energy, parts, total = bind(target), state.tokens, state.energy, [], None
        for sampler, part in zip(self.samplers, state.parts, strict=True):
            synchronised: Synchronised = sampler.synchronise(problem, rng, part, tokens, energy)  # type: ignore[attr-defined]
            part, info = sampler.step(problem, rng, synchronised.state)
            info = info._replace(
                evaluations=info.evaluations + synchronised.evaluations,
                gradients=info.gradients + synchronised.gradients,
            )
            tokens, energy = part.tokens, part.energy
            parts.append(part)
            total = info if total is None else merge_infos(total, info)
        assert total is not None
        return State(tokens, energy, tuple(parts)), total

    def synchronise(
        self,
        target: Target | Problem,
        rng: Rng,
        state: State,
        tokens: Int[Tensor, "chain n"],
        energy: Float[Tensor, " chain"],
    ) -> Synchronised:
        """The parts are brought up to date when their turn comes, so that nothing is evaluated here."""
        nothing = tokens.new_zeros(len(tokens))
        return Synchronised(State(tokens, energy.clone(), state.parts), nothing, nothing)
