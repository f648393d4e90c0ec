"""Guided: texts proposed with a lookahead; exact for any lookahead, as weights use the true p and the true controls.

Each step draws a suffix of the text anew from q and accepts it with min(1, w'/w), w = p W / q, where the prefix
cancels. Then it is an iterated sampling importance resampling move (Andrieu, Doucet, Holenstein 2010): given the text
m, draw K - 1 texts from q and choose among all K with probability ∝ w. Both keep p W, and as the K - 1 texts do not
depend on m, they are drawn in one batch with the suffix. The lookahead is frozen before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.contracts import Info, Start, Synchronised, Target, blank_info, count_redraws
from structured_voronoi.errors import NoStartError, check_count
from structured_voronoi.lookahead.lookahead import Lookahead, Proposal
from structured_voronoi.problem.drawing import check_autoregressive, checked_start, refuse_impossible_start
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.streams import Rng, inverse_cdf

START_ROUNDS = 50
"""Rounds of proposals among which a chain looks for its first text."""


class State(NamedTuple):
    text: Proposal
    moves: int
    """How many suffixes were drawn: each begins at a position of its own."""
    lookahead: Lookahead

    @property
    def tokens(self) -> Int[Tensor, "chain n"]:
        return self.text.tokens

    @property
    def energy(self) -> Float[Tensor, " chain"]:
        return -(self.text.log_p.sum(-1) + self.text.log_rest)


@dataclass(frozen=True, eq=False)
class Guided:
    """Settings of guided sampling; without a lookahead it fits its own."""

    lookahead: Lookahead | None = None
    tries: int = 16
    """K: texts among which a step chooses, the present one included."""
    texts: int = 2048
    """Of the pilot that a lookahead of its own learns from."""

    def __post_init__(self) -> None:
        check_count(tries=self.tries, texts=self.texts)

    def tuned(self, target: Target | Problem, seed: int, start: Start = None) -> Guided:
        """With a lookahead that is fitted to the target."""
        if self.lookahead is not None:
            return self
        return replace(self, lookahead=Lookahead.fit(target, texts=self.texts, seed=seed, progress=False))

    def init(self, target: Target | Problem, rng: Rng, start: Start) -> State:
        """Chains begin at one of their own proposals, chosen by weight, or at the given tokens."""
        problem = bind(target)
        check_autoregressive(problem, "guided sampling")
        lookahead = self.tuned(problem, rng.seed).lookahead
        assert lookahead is not None
        lookahead.check_fits(problem)
        if isinstance(start, Tensor):
            given = State(lookahead.score(problem, checked_start(problem, start, len(rng))), 0, lookahead)
            refuse_impossible_start(given.tokens, given.energy.isfinite())
            return given
        rng, found = rng.fork("start"), list[Proposal]()
        for _ in range(START_ROUNDS):
            found = [self._pick(rng, [*found, *self._draw_texts(problem, lookahead, rng, self.tries)])[0]]
            state = State(found[0], 0, lookahead)
            lost = int((~state.energy.isfinite()).sum())
            if not lost:
                return state
        raise NoStartError(
            f"{lost} of {len(rng)} chains found no text of finite energy among {START_ROUNDS * self.tries} "
            "proposals each; fit the lookahead on more texts, or give tokens to start from"
        )

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        problem = bind(target)
        where = Rng(rng.seed, [state.moves], "guided suffixes").uniform()[0]  # all chains share it
        begin = int(where * problem.length)
        redrawn, *fresh = self._draw_texts(problem, state.lookahead, rng, self.tries, state.tokens[:, :begin])
        suffix = accept_suffix(state.text, redrawn, rng.uniform(), self.log_weight)
        text, log_weights = self._choose(rng, suffix.text, fresh)
        new = State(text, state.moves + 1, state.lookahead)
        tries = torch.full_like(new.tokens[:, 0], self.tries)
        info = blank_info(new.energy)._replace(
            evaluations=tries,
            events=tries,
            swaps=(new.tokens != state.tokens).sum(-1),
            nonfinite=(~log_weights.isfinite()).sum(-1) + (~suffix.finite).long(),
            log_weights=log_weights if self.tries > 1 else None,
            **count_redraws(suffix.accepted, problem.length - begin),
        )
        return new, info

    def synchronise(
        self,
        target: Target | Problem,
        rng: Rng,
        state: State,
        tokens: Int[Tensor, "chain n"],
        energy: Float[Tensor, " chain"],
    ) -> Synchronised:
        """The state after another sampler has moved the tokens."""
        moved = (tokens != state.tokens).any(-1)
        rows, text = moved.nonzero().squeeze(-1), Proposal(*(part.clone() for part in state.text))
        if len(rows):
            for part, scored in zip(text, state.lookahead.score(bind(target), tokens[rows]), strict=True):
                part[rows] = scored
        return Synchronised(state._replace(text=text), moved.long(), torch.zeros_like(tokens[:, 0]))

    def log_weight(self, text: Proposal) -> Float[Tensor, " row"]:
        """log of p W / q."""
        return text.log_weight

    def _draw_texts(
        self,
        problem: Problem,
        lookahead: Lookahead,
        rng: Rng,
        count: int,
        prefix: Int[Tensor, "chain kept"] | None = None,
    ) -> list[Proposal]:
        """``count`` texts for each chain, as one batch; the first with a given prefix, if there is one."""
        levels = rng.uniform(count, problem.length).transpose(0, 1).flatten(0, 1)
        drawn = lookahead.draw(problem, levels, prefix)
        columns = [part.view(count, len(rng), *part.shape[1:]) for part in drawn]
        return [Proposal(*(column[i] for column in columns)) for i in range(count)]

    def _choose(
        self, rng: Rng, present: Proposal, fresh: list[Proposal]
    ) -> tuple[Proposal, Float[Tensor, "chain fresh"]]:
        """One of the present text and the fresh ones, ∝ weight; and the log-weights of those."""
        chosen, log_weight = self._pick(rng, [present, *fresh])
        return chosen, log_weight[:, 1:]

    def _pick(self, rng: Rng, texts: list[Proposal]) -> tuple[Proposal, Float[Tensor, "chain text"]]:
        """One of the texts for each chain, ∝ weight, and the log-weights of all."""
        log_weight = torch.stack([self.log_weight(text) for text in texts], dim=-1)
        is_lost = ~log_weight.isfinite().any(-1, keepdim=True)  # while a start is looked for: any will do
        choice = inverse_cdf(torch.where(is_lost, 0.0, log_weight), rng.uniform())
        chains = torch.arange(len(choice), device=choice.device)
        return Proposal(*(torch.stack(column)[choice, chains] for column in zip(*texts, strict=True))), log_weight


class RedrawnSuffix(NamedTuple):
    text: Proposal
    """The proposed texts where they were accepted, else the present ones."""
    proposed: Int[Tensor, "chain n"]
    accepted: Bool[Tensor, " chain"]
    finite: Bool[Tensor, " chain"]
    """Was the proposed text possible?"""


def redraw_suffix(
    problem: Problem,
    rng: Rng,
    lookahead: Lookahead,
    here: Proposal,
    start: int,
    log_weight: Callable[[Proposal], Float[Tensor, " row"]],
) -> RedrawnSuffix:
    """All positions from ``start`` on drawn anew from q, accepted by the ratio of weights."""
    levels, accept_level = rng.uniform(problem.length - start), rng.uniform()
    drawn = lookahead.propose(problem, here.tokens, start, levels)
    there = drawn._replace(
        log_p=torch.cat([here.log_p[:, :start], drawn.log_p[:, start:]], dim=-1),
        log_q=torch.cat([here.log_q[:, :start], drawn.log_q[:, start:]], dim=-1),
    )
    return accept_suffix(here, there, accept_level, log_weight)


def accept_suffix(
    here: Proposal,
    there: Proposal,
    accept_level: Float[Tensor, " row"],
    log_weight: Callable[[Proposal], Float[Tensor, " row"]],
) -> RedrawnSuffix:
    """Texts whose suffixes were drawn from q, accepted by the ratio of weights."""
    weight = log_weight(there)
    finite = weight.isfinite()
    accepted = finite & (accept_level.log() < weight - log_weight(here))
    rows = accepted[:, None]
    text = Proposal(
        torch.where(rows, there.tokens, here.tokens),
        torch.where(rows, there.log_p, here.log_p),
        torch.where(rows, there.log_q, here.log_q),
        torch.where(accepted, there.log_rest, here.log_rest),
    )
    return RedrawnSuffix(text, there.tokens, accepted, finite)
