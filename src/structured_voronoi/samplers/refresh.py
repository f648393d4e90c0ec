"""Refresh: redraw a block of tokens from the language model, accept by the text on its right.

A block [i, j), chosen without looking at the tokens, is drawn from the model given the tokens before it. The model's
own probability of the block cancels, so the move is accepted with min(1, p(rest | new)/p(rest | old)), where the rest
is the text after the block and all controls. A suffix (j = N) of a plain model is always accepted. With a lookahead,
suffixes are drawn from its proposals instead, which know what the controls ask for, and accepted by their weights;
blocks in the middle stay with the model, as a lookahead expects an open future.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import Start, Synchronised, Target
from structured_voronoi.core.info import Info, blank_info, count_redraws, merge_infos
from structured_voronoi.core.streams import Rng, widened
from structured_voronoi.core.validation import check_count
from structured_voronoi.problem.drawing import check_autoregressive, redraw, token_log_probs
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.problem.starts import find_start

if TYPE_CHECKING:  # redraws of the plain model need nothing of lookaheads
    from structured_voronoi.lookahead.lookahead import Lookahead, Proposal

WHO = "a refresh move"


class State(NamedTuple):
    tokens: Int[Tensor, "chain n"]
    log_probs: Float[Tensor, "chain n"]
    """log p of each token given those before it."""
    log_rest: Float[Tensor, " chain"]
    """The rest of log p(m): suffix, end, controls; infinite where the model holds a token to be impossible."""
    energy: Float[Tensor, " chain"]
    moves: int
    """The number of moves so far, which selects the block of the next one."""
    log_q: Float[Tensor, "chain n"] | None = None
    """With a lookahead: log of its proposal of each token; no numbers for a text that it has not seen yet."""


@dataclass(frozen=True)
class Refresh:
    """Settings of the refresh move."""

    block: int = 5
    """Longest block; each length from 1 to this is equally likely."""
    suffix: bool = True
    """Every other move redraws everything from a random position to the end, which mixes globally."""
    moves: int = 1
    """Redraws of one step."""
    lookahead: Lookahead | None = field(default=None, repr=False)
    """Draws the suffixes, if there is one."""

    def __post_init__(self) -> None:
        check_count(block=self.block, moves=self.moves)

    def init(self, target: Target | Problem, rng: Rng, start: Start) -> State:
        problem = bind(target)
        check_autoregressive(problem, WHO)
        tokens, first = find_start(problem, rng, start, "none")
        log_probs, log_q = widened(token_log_probs(problem, tokens)), None
        if self.lookahead is not None:
            self.lookahead.check_fits(problem)
            log_q = torch.full_like(log_probs, torch.nan)
        return State(tokens, log_probs, -first.energy - log_probs.sum(-1), first.energy, 0, log_q)

    def synchronise(
        self,
        target: Target | Problem,
        rng: Rng,
        state: State,
        tokens: Int[Tensor, "chain n"],
        energy: Float[Tensor, " chain"],
    ) -> Synchronised:
        """The state after another sampler has moved the tokens."""
        changed = (tokens != state.tokens).any(-1)
        rows = changed.nonzero().squeeze(-1)
        log_probs, log_rest = state.log_probs.clone(), state.log_rest.clone()
        if len(rows):
            log_probs[rows] = widened(token_log_probs(bind(target), tokens[rows]))
            log_rest[rows] = -energy[rows] - log_probs[rows].sum(-1)
        log_q = _forget(state.log_q, changed)
        new = State(tokens, log_probs, log_rest, energy.clone(), state.moves, log_q)
        return Synchronised(new, changed.long(), torch.zeros_like(tokens[:, 0]))

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        problem = bind(target)
        check_autoregressive(problem, WHO)
        state, info = self._move(problem, rng, state)
        for _ in range(self.moves - 1):
            state, next_info = self._move(problem, rng, state)
            info = merge_infos(info, next_info)
        return state, info

    def log_ratio(self, here: State, there: State, stop: int) -> Float[Tensor, " chain"]:
        """log p(rest | new) - log p(rest | old) of a block that ends before ``stop``; its own probability cancels."""
        return (there.log_probs - here.log_probs)[:, stop:].sum(-1) + there.log_rest - here.log_rest

    def _move(self, problem: Problem, rng: Rng, state: State) -> tuple[State, Info]:
        i, j = self._choose_block(rng, state.moves, problem.length)
        if self.lookahead is not None and j == problem.length:
            return self._move_guided(problem, rng, state, self.lookahead, i)
        levels, accept_level = rng.uniform(j - i), rng.uniform()
        tokens, from_i, log_rest = redraw(problem, state.tokens, i, j, levels)
        log_probs = torch.cat([state.log_probs[:, :i], widened(from_i)], dim=-1)
        energy = -(log_probs.sum(-1) + widened(log_rest))
        there = State(tokens, log_probs, widened(log_rest), energy, state.moves)
        ratio = self.log_ratio(state, there, j)
        finite = ratio.isfinite() & from_i.isfinite().all(-1)
        accepted = finite & (accept_level.log() < ratio)
        new = State(
            torch.where(accepted[:, None], tokens, state.tokens),
            torch.where(accepted[:, None], there.log_probs, state.log_probs),
            torch.where(accepted, there.log_rest, state.log_rest),
            torch.where(accepted, energy, state.energy),
            state.moves + 1,
            _forget(state.log_q, accepted),
        )
        ones = torch.ones_like(tokens[:, 0])
        info = blank_info(new.energy)._replace(
            evaluations=ones,
            events=(tokens != state.tokens).any(-1).long(),
            swaps=(new.tokens != state.tokens).sum(-1),
            nonfinite=ones - finite.long(),
            **count_redraws(accepted, j - i),
        )
        return new, info

    def log_weight(self, text: Proposal) -> Float[Tensor, " chain"]:
        """log of p W / q, by which guided suffixes are accepted."""
        return text.log_weight

    def _move_guided(
        self, problem: Problem, rng: Rng, state: State, lookahead: Lookahead, start: int
    ) -> tuple[State, Info]:
        """All positions from ``start`` on drawn anew from the lookahead's proposals."""
        from structured_voronoi.lookahead.lookahead import Proposal
        from structured_voronoi.samplers.guided import redraw_suffix

        assert state.log_q is not None
        log_q, unseen = state.log_q.clone(), state.log_q.isnan().any(-1)
        if unseen.any():
            log_q[unseen] = lookahead.score(problem, state.tokens[unseen]).log_q
        here = Proposal(state.tokens, state.log_probs, log_q, torch.zeros_like(log_q), state.log_rest)
        redrawn = redraw_suffix(problem, rng, lookahead, here, start, self.log_weight)
        tokens, log_p, log_q, _, log_rest = redrawn.text
        energy = torch.where(redrawn.accepted, -(log_p.sum(-1) + log_rest), state.energy)
        ones = torch.ones_like(tokens[:, 0])
        info = blank_info(energy)._replace(
            evaluations=ones + unseen.long(),
            events=(redrawn.proposed != state.tokens).any(-1).long(),
            swaps=(tokens != state.tokens).sum(-1),
            nonfinite=ones - redrawn.finite.long(),
            **count_redraws(redrawn.accepted, problem.length - start),
        )
        return State(tokens, log_p, log_rest, energy, state.moves + 1, log_q), info

    def _choose_block(self, rng: Rng, move: int, length: int) -> tuple[int, int]:
        """The block of a move: the same for all chains, from a stream that they share."""
        shared = Rng(rng.seed, [move], "refresh places")
        kind, where, size = shared.uniform(3)[0].tolist()
        if self.suffix and kind < 0.5:
            return int(where * length), length
        width = min(length, 1 + int(size * self.block))
        start = int(where * (length - width + 1))
        return start, start + width


def _forget(log_q: Tensor | None, changed: Tensor) -> Tensor | None:
    """No numbers for texts that have changed: they are scored when a guided redraw needs it."""
    return None if log_q is None else log_q.masked_fill(changed[:, None], torch.nan)
