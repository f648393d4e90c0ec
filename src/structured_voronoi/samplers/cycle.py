"""Cycle: one step of each of several samplers in turn. A cycle of moves that keep a distribution keeps it too."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.base import Info, Rng, Sampler, SamplingError, Start, Target, added


class State(NamedTuple):
    tokens: Int[Tensor, "chain n"]
    energy: Float[Tensor, " chain"]
    parts: tuple[Any, ...]
    """The state of each sampler, brought up to date when its turn comes."""


class Cycle:
    """`Cycle(SVS(), Refresh())` takes one step of each; a sampler needs `resume` to take part."""

    def __init__(self, *samplers: Sampler) -> None:
        if len(samplers) < 2:
            raise SamplingError(f"a cycle of {len(samplers)} samplers; give two or more")
        for sampler in samplers:
            if not hasattr(sampler, "resume"):
                raise SamplingError(f"{type(sampler).__name__} cannot take part in a cycle: it has no `resume`")
        self.samplers = samplers

    def __repr__(self) -> str:
        return f"Cycle({', '.join(map(repr, self.samplers))})"

    def tuned(self, target: Target, seed: int, start: Start = None) -> Cycle:
        return Cycle(*(one.tuned(target, seed, start) if hasattr(one, "tuned") else one for one in self.samplers))

    def init(self, target: Target, rng: Rng, start: Start) -> State:
        first, *others = self.samplers
        state = first.init(target, rng, start)
        parts = [state, *(one.init(target, rng, state.tokens) for one in others)]
        return State(state.tokens, state.energy, tuple(parts))

    def step(self, target: Target, rng: Rng, state: State) -> tuple[State, Info]:
        tokens, energy, parts, total = state.tokens, state.energy, [], None
        for sampler, part in zip(self.samplers, state.parts, strict=True):
            part, asked = sampler.resume(target, part, tokens, energy)  # type: ignore[attr-defined]
            part, info = sampler.step(target, rng, part)
            info = info._replace(evaluations=info.evaluations + asked.long())
            tokens, energy = part.tokens, part.energy
            parts.append(part)
            total = info if total is None else added(total, info)
        assert total is not None
        return State(tokens, energy, tuple(parts)), total
