"""Refresh: redraw a block of tokens from the language model, accept by what stands on its right.

A block [i, j), chosen without looking at the tokens, is drawn from the model given the tokens before it. The model's
own probability of the block cancels, so the move is accepted with min(1, p(rest | new)/p(rest | old)), where the rest
is the text after the block and all controls. A suffix (j = N) of a plain model is always accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.base import Info, Rng, SamplingError, Start, Target, quiet_info
from structured_voronoi.samplers.autoregressive import autoregressive, redrawn, token_log_probs
from structured_voronoi.samplers.evaluation import begin, cells_of_target, evaluate, whole


class State(NamedTuple):
    tokens: Int[Tensor, "chain n"]
    energy: Float[Tensor, " chain"]
    log_probs: Float[Tensor, "chain n"]
    """log p of each token given those before it."""
    steps: int


@dataclass(frozen=True)
class Refresh:
    """Settings of the refresh move."""

    block: int = 5
    """Longest block; each length from 1 to this is equally likely."""
    suffix: bool = True
    """Every other move redraws everything from a random position to the end, which mixes globally."""

    def __post_init__(self) -> None:
        whole(block=self.block)

    def init(self, target: Target, rng: Rng, start: Start) -> State:
        autoregressive(target, "a refresh move")
        if getattr(target, "temperature", 1.0) != 1.0:
            raise SamplingError(f"refresh moves do not know temperatures; this target has {target.temperature}")  # type: ignore[attr-defined]
        tokens, first = begin(target, cells_of_target(target), rng, start, "none")
        return State(tokens, first.energy, token_log_probs(autoregressive(target, "refresh"), tokens), 0)

    def resume(self, target: Target, state: State, tokens: Int[Tensor, "chain n"]) -> tuple[State, Tensor]:
        """The state after another sampler has moved the tokens, and for which chains it had to be evaluated."""
        changed = (tokens != state.tokens).any(-1)
        rows = changed.nonzero().squeeze(-1)
        energy, log_probs = state.energy.clone(), state.log_probs.clone()
        if len(rows):
            energy[rows] = evaluate(target, tokens[rows], "none").energy
            log_probs[rows] = token_log_probs(autoregressive(target, "refresh"), tokens[rows])
        return State(tokens, energy, log_probs, state.steps), changed

    def step(self, target: Target, rng: Rng, state: State) -> tuple[State, Info]:
        model = autoregressive(target, "refresh")
        i, j = self.place(rng, state.steps, target.length)
        levels, accept_level = rng.uniform(j - i), rng.uniform()
        tokens = redrawn(model, state.tokens, i, j, levels)
        moved = (tokens != state.tokens).any(-1)
        result = evaluate(target, tokens, "none")
        log_probs = token_log_probs(model, tokens)
        log_ratio = state.energy - result.energy + (state.log_probs - log_probs)[:, i:j].sum(-1)
        accepted = result.finite & (accept_level.log() < log_ratio)
        new = State(
            torch.where(accepted[:, None], tokens, state.tokens),
            torch.where(accepted, result.energy, state.energy),
            torch.where(accepted[:, None], log_probs, state.log_probs),
            state.steps + 1,
        )
        info = quiet_info(new.energy)._replace(
            evaluations=torch.ones_like(tokens[:, 0]),
            events=moved.long(),
            swaps=(new.tokens != state.tokens).sum(-1),
            nonfinite=(~result.finite).long(),
        )
        return new, info

    def place(self, rng: Rng, step: int, length: int) -> tuple[int, int]:
        """The block of a step: the same for all chains, from a stream that they share."""
        shared = Rng(rng.seed, [step], "refresh places")
        kind, where, size = shared.uniform(3)[0].tolist()
        if self.suffix and kind < 0.5:
            return int(where * length), length
        width = min(length, 1 + int(size * self.block))
        start = int(where * (length - width + 1))
        return start, start + width
