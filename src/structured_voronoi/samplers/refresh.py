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

from structured_voronoi.base import Info, Rng, Start, Target, added, quiet_info
from structured_voronoi.samplers.autoregressive import autoregressive, redraw, token_log_probs
from structured_voronoi.samplers.evaluation import begin, cells_of_target, whole


class State(NamedTuple):
    tokens: Int[Tensor, "chain n"]
    log_probs: Float[Tensor, "chain n"]
    """log p of each token given those before it."""
    right: Float[Tensor, " chain"]
    """The rest of log p(m): suffix, end, controls."""
    moves: int
    """How many there were: each has a place of its own."""

    @property
    def energy(self) -> Float[Tensor, " chain"]:
        return -(self.log_probs.sum(-1) + self.right)


@dataclass(frozen=True)
class Refresh:
    """Settings of the refresh move."""

    block: int = 5
    """Longest block; each length from 1 to this is equally likely."""
    suffix: bool = True
    """Every other move redraws everything from a random position to the end, which mixes globally."""
    moves: int = 1
    """Redraws of one step."""

    def __post_init__(self) -> None:
        whole(block=self.block, moves=self.moves)

    def init(self, target: Target, rng: Rng, start: Start) -> State:
        model = autoregressive(target, "a refresh move")
        tokens, first = begin(target, cells_of_target(target), rng, start, "none")
        log_probs = token_log_probs(model, tokens).double()
        return State(tokens, log_probs, -first.energy - log_probs.sum(-1), 0)

    def resume(
        self, target: Target, state: State, tokens: Int[Tensor, "chain n"], energy: Float[Tensor, " chain"]
    ) -> tuple[State, Tensor]:
        """The state after another sampler has moved the tokens, and for which chains it had to be evaluated."""
        changed = (tokens != state.tokens).any(-1)
        rows = changed.nonzero().squeeze(-1)
        log_probs, right = state.log_probs.clone(), state.right.clone()
        if len(rows):
            log_probs[rows] = token_log_probs(autoregressive(target, "a refresh move"), tokens[rows]).double()
            right[rows] = -energy[rows] - log_probs[rows].sum(-1)
        return State(tokens, log_probs, right, state.moves), changed

    def step(self, target: Target, rng: Rng, state: State) -> tuple[State, Info]:
        state, info = self._move(target, rng, state)
        for _ in range(self.moves - 1):
            state, more = self._move(target, rng, state)
            info = added(info, more)
        return state, info

    def _move(self, target: Target, rng: Rng, state: State) -> tuple[State, Info]:
        i, j = self.place(rng, state.moves, target.length)
        levels, accept_level = rng.uniform(j - i), rng.uniform()
        tokens, from_i, right = redraw(autoregressive(target, "a refresh move"), state.tokens, i, j, levels)
        there = State(tokens, torch.cat([state.log_probs[:, :i], from_i.double()], dim=-1), right.double(), state.moves)
        ratio = log_ratio(state, there, j)
        finite = ratio.isfinite() & from_i.isfinite().all(-1)
        accepted = finite & (accept_level.log() < ratio)
        new = State(
            torch.where(accepted[:, None], tokens, state.tokens),
            torch.where(accepted[:, None], there.log_probs, state.log_probs),
            torch.where(accepted, there.right, state.right),
            state.moves + 1,
        )
        one = torch.ones_like(tokens[:, 0])
        info = quiet_info(new.energy)._replace(
            evaluations=one,
            events=(tokens != state.tokens).any(-1).long(),
            swaps=(new.tokens != state.tokens).sum(-1),
            nonfinite=one - finite.long(),
            redraws=one,
            refreshed=accepted.long(),
        )
        return new, info

    def place(self, rng: Rng, move: int, length: int) -> tuple[int, int]:
        """The block of a move: the same for all chains, from a stream that they share."""
        shared = Rng(rng.seed, [move], "refresh places")
        kind, where, size = shared.uniform(3)[0].tolist()
        if self.suffix and kind < 0.5:
            return int(where * length), length
        width = min(length, 1 + int(size * self.block))
        start = int(where * (length - width + 1))
        return start, start + width


def log_ratio(here: State, there: State, stop: int) -> Float[Tensor, " chain"]:
    """log p(rest | new) - log p(rest | old) of a block that ends before ``stop``; its own probability cancels."""
    return (there.log_probs - here.log_probs)[:, stop:].sum(-1) + there.right - here.right
