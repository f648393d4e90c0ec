"""A cycle of samplers: one step of each in turn.

If every sampler keeps a distribution stationary, so does the cycle (Tierney 1994). A sampler takes part if it can
`synchronise` its state with tokens that another sampler has moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import Sampler, Start, Synchronised, Target, tune
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.info import Info, merge_infos
from structured_voronoi.core.streams import Rng
from structured_voronoi.problem.problem import Problem, bind


class State(NamedTuple):
    """The tokens, and the state of each sampler as its last step left it."""

    tokens: Int[Tensor, "chain n"]
    energy: Float[Tensor, " chain"]
    parts: tuple[Any, ...]


@dataclass(frozen=True, init=False)
class Cycle:
    """One step of each of several samplers in turn.

    Parameters
    ----------
    *samplers
        Two or more samplers with a method ``synchronise``.

    Raises
    ------
    SamplingError
        If there are fewer samplers, or one whose steps are independent draws.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> cycle = sv.Cycle(sv.PNCG(2.0), sv.GibbsWithGradients())
    >>> draws = sv.sample(sv.PottsTarget(side=2), cycle, chains=4, draws=10, progress=False)
    >>> draws["posterior"]["tokens"].shape
    (4, 10, 4)
    """

    samplers: tuple[Sampler, ...]

    def __init__(self, *samplers: Sampler) -> None:
        if len(samplers) < 2:
            raise SamplingError(f"a cycle of {len(samplers)} samplers is no cycle", remedy="give two or more samplers")
        for sampler in samplers:
            if not hasattr(sampler, "synchronise"):
                raise SamplingError(
                    f"{type(sampler).__name__} cannot take part in a cycle: it has no `synchronise`",
                    remedy="use it alone, or use another sampler",
                )
        object.__setattr__(self, "samplers", samplers)

    @property
    def exact(self) -> bool:
        """Whether all samplers are exact."""
        return all(getattr(sampler, "exact", False) for sampler in self.samplers)

    def tuned(self, target: Target | Problem, seed: int, start: Start = None) -> Cycle:
        """A copy of tuned samplers."""
        return Cycle(*(tune(sampler, target, seed, start) for sampler in self.samplers))

    def init(self, target: Target | Problem, rng: Rng, start: Start) -> State:
        """The first state: all samplers start from the tokens of the first one."""
        problem, (first, *others) = bind(target), self.samplers
        state = first.init(problem, rng, start)
        parts = [state, *(sampler.init(problem, rng, state.tokens) for sampler in others)]
        return State(state.tokens, state.energy, tuple(parts))

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        """One step of each sampler."""
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
        """The state after another sampler has moved the tokens; the parts are synchronised before their next step."""
        nothing = tokens.new_zeros(len(tokens))
        return Synchronised(State(tokens, energy.clone(), state.parts), nothing, nothing)
