"""Ancestral sampling: each token from the model given those before it. Exact, and every draw is independent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.base import Info, Rng, SamplingError, Start, Target, quiet_info
from structured_voronoi.samplers.autoregressive import ancestral_draw, autoregressive

TRIES = 20
"""Texts without a finite log p that a chain may draw in turn."""


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
        """One text a chain; where the model has no number for it, another is drawn, and that is counted."""
        tokens, log_probs, right = ancestral_draw(target, rng)
        energy = -(log_probs.double().sum(-1) + right)
        lost = torch.zeros_like(tokens[:, 0])
        while not energy.isfinite().all():
            rows = (~energy.isfinite()).nonzero().squeeze(-1)
            lost[rows] += 1
            if int(lost.max()) == TRIES:
                raise SamplingError(
                    f"the model had no finite log p for {TRIES} texts of one chain in turn; its weights may be "
                    "damaged, or its dtype too narrow: try another"
                )
            own = rng.of_rows(rows)
            tokens[rows], log_probs, right = ancestral_draw(target, own)
            energy[rows] = -(log_probs.double().sum(-1) + right)
            rng.counter[rows] = own.counter
        changed, one = (tokens != state.tokens).sum(-1), torch.ones_like(lost)
        info = quiet_info(energy)._replace(evaluations=one + lost, events=one, swaps=changed, nonfinite=lost)
        return State(tokens, energy), info
