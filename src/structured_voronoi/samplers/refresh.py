"""Refresh: blocks of tokens are redrawn from the language model, a Gibbs-like move with Metropolis acceptance.

A block [i, j) is chosen independently of the tokens and drawn from the model given the tokens before it. The
probability of the block cancels, so the move is accepted with probability min(1, p(rest | new) / p(rest | old)), where
the rest is the text after the block and all controls. A suffix (j = N) of a model without controls is always accepted.
With a lookahead, suffixes are drawn from its proposal and accepted by their importance weights; other blocks are still
drawn from the model, as a lookahead does not read the text after a block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

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

if TYPE_CHECKING:
    from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.lookahead.weighing import Proposal


class State(NamedTuple):
    """The tokens with the terms of their log-probability."""

    tokens: Int[Tensor, "chain n"]
    log_probs: Float[Tensor, "chain n"]
    """log p of each token given those before it."""
    log_rest: Float[Tensor, " chain"]
    """The rest of log p(m): suffix, end, controls; infinite if the model gives the tokens probability 0."""
    energy: Float[Tensor, " chain"]
    moves: int
    """The number of moves so far, which selects the next block."""
    log_q: Float[Tensor, "chain n"] | None = None
    """With a lookahead: log q of each token, NaN where a text has not been scored yet."""


@dataclass(frozen=True)
class Refresh:
    """Redraw blocks of tokens from the language model.

    Parameters
    ----------
    block
        Length of the longest block; lengths are uniform from 1.
    suffix
        Redraw everything from a random position to the end in half of the moves.
    moves
        Moves of one step.
    lookahead
        Proposal of the suffixes; None: the model.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> target = sv.verify.sentences(controlled=True)
    >>> draws = sv.sample(target, sv.Refresh(block=2), chains=4, draws=10, progress=False)
    >>> draws["posterior"]["tokens"].shape
    (4, 10, 3)
    """

    block: int = 5
    suffix: bool = True
    moves: int = 1
    lookahead: Lookahead | None = field(default=None, repr=False)

    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count(block=self.block, moves=self.moves)

    def init(self, target: Target | Problem, rng: Rng, start: Start) -> State:
        """The first state."""
        problem = bind(target)
        check_autoregressive(problem, "sv.Refresh")
        tokens, first = find_start(problem, rng, start, "none")
        log_probs, log_q = widened(token_log_probs(problem, tokens)), None
        if self.lookahead is not None:
            self.lookahead.check_fits(problem)
            log_q = torch.full_like(log_probs, torch.nan)
        return State(tokens, log_probs, -first.energy - log_probs.sum(-1), first.energy, 0, log_q)

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        """``moves`` redraws of every chain."""
        problem = bind(target)
        check_autoregressive(problem, "sv.Refresh")
        state, info = self._move(problem, rng, state)
        for _ in range(self.moves - 1):
            state, next_info = self._move(problem, rng, state)
            info = merge_infos(info, next_info)
        return state, info

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
        new = State(tokens, log_probs, log_rest, energy.clone(), state.moves, _unscored(state.log_q, changed))
        return Synchronised(new, changed.long(), torch.zeros_like(tokens[:, 0]))

    def log_ratio(self, here: State, there: State, stop: int) -> Float[Tensor, " chain"]:
        """log p(rest | new) - log p(rest | old) of a block that ends before ``stop``."""
        return (there.log_probs - here.log_probs)[:, stop:].sum(-1) + there.log_rest - here.log_rest

    def log_weight(self, text: Proposal) -> Float[Tensor, " chain"]:
        """log of the importance weight p W / q, by which suffixes from a lookahead are accepted."""
        return text.log_weight

    def _move(self, problem: Problem, rng: Rng, state: State) -> tuple[State, Info]:
        i, j = self._choose_block(rng, state.moves, problem.length)
        if self.lookahead is not None and j == problem.length:
            return self._move_guided(problem, rng, state, self.lookahead, i)
        levels, accept_level = rng.uniform(j - i), rng.uniform()
        tokens, from_i, log_rest = redraw(problem, state.tokens, i, j, levels)
        log_probs, log_rest = torch.cat([state.log_probs[:, :i], widened(from_i)], dim=-1), widened(log_rest)
        there = State(tokens, log_probs, log_rest, -(log_probs.sum(-1) + log_rest), state.moves)
        ratio = self.log_ratio(state, there, j)
        finite = ratio.isfinite() & from_i.isfinite().all(-1)
        accepted = finite & (accept_level.log() < ratio)
        new = State(
            torch.where(accepted[:, None], tokens, state.tokens),
            torch.where(accepted[:, None], log_probs, state.log_probs),
            torch.where(accepted, log_rest, state.log_rest),
            torch.where(accepted, there.energy, state.energy),
            state.moves + 1,
            _unscored(state.log_q, accepted),
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

    def _move_guided(
        self, problem: Problem, rng: Rng, state: State, lookahead: Lookahead, start: int
    ) -> tuple[State, Info]:
        """Redraw all positions from ``start`` on from the lookahead."""
        from structured_voronoi.lookahead.weighing import Proposal
        from structured_voronoi.samplers.guided import redraw_suffix

        assert state.log_q is not None
        log_q, unscored = state.log_q.clone(), state.log_q.isnan().any(-1)
        if unscored.any():
            log_q[unscored] = lookahead.score(problem, state.tokens[unscored]).log_q
        here = Proposal(state.tokens, state.log_probs, log_q, torch.zeros_like(log_q), state.log_rest)
        redrawn = redraw_suffix(problem, rng, lookahead, here, start, self.log_weight)
        tokens, log_p, log_q, _, log_rest = redrawn.text
        energy = torch.where(redrawn.accepted, -(log_p.sum(-1) + log_rest), state.energy)
        ones = torch.ones_like(tokens[:, 0])
        info = blank_info(energy)._replace(
            evaluations=ones + unscored.long(),
            events=(redrawn.proposed != state.tokens).any(-1).long(),
            swaps=(tokens != state.tokens).sum(-1),
            nonfinite=ones - redrawn.finite.long(),
            **count_redraws(redrawn.accepted, problem.length - start),
        )
        return State(tokens, log_p, log_rest, energy, state.moves + 1, log_q), info

    def _choose_block(self, rng: Rng, move: int, length: int) -> tuple[int, int]:
        """The block of a move, from a stream that all chains share."""
        shared = Rng(rng.seed, [move], "refresh places")
        kind, where, size = shared.uniform(3)[0].tolist()
        if self.suffix and kind < 0.5:
            return int(where * length), length
        width = min(length, 1 + int(size * self.block))
        start = int(where * (length - width + 1))
        return start, start + width


def _unscored(log_q: Tensor | None, changed: Tensor) -> Tensor | None:
    """Mark the texts that have changed; they are scored when a guided move needs it."""
    return None if log_q is None else log_q.masked_fill(changed[:, None], torch.nan)
