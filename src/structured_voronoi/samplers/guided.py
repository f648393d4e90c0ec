"""Guided: texts proposed with a lookahead; exact for any lookahead, as weights use the true p and the true controls.

Each step draws a suffix of the text anew from q and accepts it with min(1, w'/w), w = p W / q, where the prefix
cancels. Then come iterated sampling importance resampling moves (Andrieu, Doucet, Holenstein 2010): given the text m,
draw K - 1 texts from q and choose among all K with probability ∝ w. Both keep p W, and as the fresh texts do not depend
on m, those of all choices are drawn in one batch with the suffix. The lookahead is frozen before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import Start, Synchronised, Target
from structured_voronoi.core.errors import NoStartError
from structured_voronoi.core.info import Info, blank_info, count_redraws
from structured_voronoi.core.streams import Rng, inverse_cdf
from structured_voronoi.core.validation import check_count
from structured_voronoi.lookahead.lookahead import Lookahead, Proposal
from structured_voronoi.problem.drawing import check_autoregressive
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.problem.starts import checked_start, refuse_impossible_start

START_TRIES, START_ROUNDS = 8, 100
"""Proposals, or as many as a choice has, among which a chain looks for its first text; and how often, at most."""


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
    """K: texts among which a chain chooses, the present one included."""
    texts: int = 2048
    """Of the pilot that a lookahead of its own learns from."""
    choices: int = 1
    """How often a step chooses, each time among the present text and K - 1 fresh ones."""

    def __post_init__(self) -> None:
        check_count(tries=self.tries, texts=self.texts, choices=self.choices)

    @property
    def drawn(self) -> int:
        """Texts that a step draws for each chain: one with a new suffix, and the fresh ones."""
        return 1 + self.choices * (self.tries - 1)

    def tuned(self, target: Target | Problem, seed: int, start: Start = None) -> Guided:
        """With a lookahead that is fitted to the target."""
        if self.lookahead is not None:
            return self
        return replace(self, lookahead=Lookahead.fit(target, texts=self.texts, seed=seed))

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
        text = self._find_start(problem, lookahead, rng.fork("start"))
        return State(text, 0, lookahead)

    def _find_start(self, problem: Problem, lookahead: Lookahead, rng: Rng) -> Proposal:
        """One of its own proposals for each chain, by weight; those that have found none go on looking."""
        tries, lost = max(self.tries, START_TRIES), torch.arange(len(rng), device=problem.device)
        text: Proposal | None = None
        for _ in range(START_ROUNDS):
            row_rng = rng.select(lost)
            drawn = self._draw_texts(problem, lookahead, row_rng, tries)
            picked = _taken(drawn, self._pick(row_rng, self._log_weights(drawn)))
            rng.catch_up(lost, row_rng)
            if text is None:
                text = picked
            else:
                for part, of_lost in zip(text, picked, strict=True):
                    part[lost] = of_lost
            lost = lost[~picked.log_weight.isfinite()]
            if not len(lost):
                return text
        raise NoStartError(
            f"{len(lost)} of {len(rng)} chains found no text of finite energy among {START_ROUNDS * tries} proposals "
            "each",
            remedy="fit the lookahead on more texts, or give tokens to start from",
        )

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        problem = bind(target)
        where = Rng(rng.seed, [state.moves], "guided suffixes").uniform()[0]  # all chains share it
        begin = int(where * problem.length)
        redrawn, *fresh = self._draw_texts(problem, state.lookahead, rng, self.drawn, state.tokens[:, :begin])
        suffix = accept_suffix(state.text, redrawn, rng.uniform(), self.log_weight)
        texts = [suffix.text, *fresh]
        log_weights = self._log_weights(texts)
        new = State(_taken(texts, self._choose(rng, log_weights)), state.moves + 1, state.lookahead)
        drawn = torch.full_like(new.tokens[:, 0], self.drawn)
        info = blank_info(new.energy)._replace(
            evaluations=drawn,
            events=drawn,
            swaps=(new.tokens != state.tokens).sum(-1),
            nonfinite=(~log_weights[:, 1:].isfinite()).sum(-1) + (~suffix.finite).long(),
            log_weights=log_weights[:, 1:].reshape(-1, self.choices, self.tries - 1) if fresh else None,
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

    def _log_weights(self, texts: list[Proposal]) -> Float[Tensor, "chain text"]:
        return torch.stack([self.log_weight(text) for text in texts], dim=-1)

    def _choose(self, rng: Rng, log_weights: Float[Tensor, "chain text"]) -> Int[Tensor, " chain"]:
        """Where each chain is after all choices: at first at the first text, the others are fresh."""
        here = torch.zeros(len(rng), dtype=torch.int64, device=log_weights.device)
        for begin in range(1, log_weights.shape[1], max(1, self.tries - 1)):
            present, fresh = log_weights.gather(-1, here[:, None]), log_weights[:, begin : begin + self.tries - 1]
            chosen = self._pick(rng, torch.cat([present, fresh], dim=-1))
            here = torch.where(chosen > 0, begin + chosen - 1, here)
        return here

    def _pick(self, rng: Rng, log_weights: Float[Tensor, "chain text"]) -> Int[Tensor, " chain"]:
        """One of the texts for each chain, ∝ weight."""
        is_lost = ~log_weights.isfinite().any(-1, keepdim=True)  # while a start is looked for: any will do
        return inverse_cdf(torch.where(is_lost, 0.0, log_weights), rng.uniform())


def _taken(texts: list[Proposal], choice: Int[Tensor, " chain"]) -> Proposal:
    """The text of each chain at its choice."""
    chains = torch.arange(len(choice), device=choice.device)
    return Proposal(*(torch.stack(column)[choice, chains] for column in zip(*texts, strict=True)))


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
        log_base=torch.cat([here.log_base[:, :start], drawn.log_base[:, start:]], dim=-1),
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
        torch.where(rows, there.log_base, here.log_base),
        torch.where(accepted, there.log_rest, here.log_rest),
    )
    return RedrawnSuffix(text, there.tokens, accepted, finite)
