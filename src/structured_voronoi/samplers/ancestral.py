"""Ancestral sampling: each token from the model given those before it. Exact, and every draw is independent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.base import Info, Rng, SamplingError, Start, Target, quiet_info
from structured_voronoi.samplers.autoregressive import ancestral_draw, autoregressive


class State(NamedTuple):
    tokens: Int[Tensor, "chain n"]
    energy: Float[Tensor, " chain"]


@dataclass(frozen=True)
class Ancestral:
    """No settings. Where something stands on the right of the tokens, ancestral draws are not the truth: refused."""

    independent: ClassVar[bool] = True
    """Draws need no warm-up."""

    def init(self, target: Target, rng: Rng, start: Start) -> State:
        model = autoregressive(target, "ancestral sampling")
        if not getattr(model, "normalised", True):
            raise SamplingError(
                "ancestral sampling does not see a suffix, the end of the text or controls; use sv.Rejection(), or "
                "sv.Cycle(sv.SVS(), sv.Refresh()); on the command line --sampler auto"
            )
        blank = torch.zeros(len(rng), target.length, device=target.embeddings.device)
        return self.step(target, rng, State(blank, blank[:, 0]))[0]

    def step(self, target: Target, rng: Rng, state: State) -> tuple[State, Info]:
        tokens, log_probs, right = ancestral_draw(target, rng)
        energy = -(log_probs.double().sum(-1) + right)
        one = torch.ones_like(tokens[:, 0])
        changed = (tokens != state.tokens).sum(-1)
        return State(tokens, energy), quiet_info(energy)._replace(evaluations=one, events=one, swaps=changed)
