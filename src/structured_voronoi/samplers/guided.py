"""Guided sampling: texts are proposed by a lookahead and weighted by p W / q.

Each step redraws a suffix from the proposal q and accepts it with probability min(1, w'/w), where the prefix cancels in
the weights w = p W / q. Then follow iterated sampling importance resampling moves (Andrieu, Doucet and Holenstein
2010): draw K - 1 texts from q and choose one of all K texts with probability ∝ w. Both keep p W stationary for every
lookahead, because weights use the true p and the true controls. The fresh texts do not depend on the current one, so
they are drawn in one batch with the suffix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import Start, Synchronised, Target
from structured_voronoi.core.errors import NoStartError
from structured_voronoi.core.info import Info, blank_info, count_redraws
from structured_voronoi.core.streams import Rng, inverse_cdf
from structured_voronoi.core.validation import check_count
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.lookahead.weighing import Proposal
from structured_voronoi.problem.drawing import check_autoregressive
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.problem.starts import checked_start, refuse_impossible_start

MIN_START_TRIES = 8
"""Fewest proposals among which a chain chooses its first text."""


class State(NamedTuple):
    """The current text with its weight."""

    text: Proposal
    moves: int
    """The number of steps so far, which selects the next suffix."""
    lookahead: Lookahead

    @property
    def tokens(self) -> Int[Tensor, "chain n"]:
        """The tokens of the text."""
        return self.text.tokens

    @property
    def energy(self) -> Float[Tensor, " chain"]:
        """U(m) of the text."""
        return -(self.text.log_p.sum(-1) + self.text.log_rest)


@dataclass(frozen=True, eq=False)
class Guided:
    """Choose among texts that a lookahead proposes.

    Parameters
    ----------
    lookahead
        The proposal; None: fit one to the target.
    tries
        K, the texts among which a chain chooses, including the current one.
    texts
        Texts from which a lookahead is learned if none is given.
    choices
        Choices of one step, each among the current text and K - 1 fresh ones.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> target = sv.verify.sentences(controlled=True)
    >>> draws = sv.sample(target, sv.Guided(tries=4, texts=64), chains=4, draws=10, progress=False)
    >>> draws["posterior"]["tokens"].shape
    (4, 10, 3)
    """

    lookahead: Lookahead | None = None
    tries: int = 16
    texts: int = 2048
    choices: int = 1

    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count(tries=self.tries, texts=self.texts, choices=self.choices)

    @property
    def drawn(self) -> int:
        """Texts that a step draws for each chain: one with a new suffix, and the fresh ones."""
        return 1 + self.choices * (self.tries - 1)

    def tuned(self, target: Target | Problem, seed: int, start: Start = None) -> Guided:
        """A copy with a lookahead that is fitted to the target."""
        if self.lookahead is not None:
            return self
        return replace(self, lookahead=Lookahead.fit(target, texts=self.texts, seed=seed))

    def init(self, target: Target | Problem, rng: Rng, start: Start) -> State:
        """The first state: the given tokens, or proposals chosen by weight."""
        problem = bind(target)
        check_autoregressive(problem, "sv.Guided")
        lookahead = self.tuned(problem, rng.seed).lookahead
        assert lookahead is not None
        lookahead.check_fits(problem)
        if isinstance(start, Tensor):
            given = State(lookahead.score(problem, checked_start(problem, start, len(rng))), 0, lookahead)
            refuse_impossible_start(given.tokens, given.energy.isfinite())
            return given
        return State(self._find_start(problem, lookahead, rng.fork("start")), 0, lookahead)

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        """A suffix and ``choices`` choices."""
        problem = bind(target)
        where = Rng(rng.seed, [state.moves], "guided suffixes").uniform()[0]  # shared by all chains
        begin = int(where * problem.length)
        redrawn, *fresh = self._draw_texts(problem, state.lookahead, rng, self.drawn, state.tokens[:, :begin])
        suffix = accept_suffix(state.text, redrawn, rng.uniform(), self.log_weight)
        texts = [suffix.text, *fresh]
        log_weights = self._log_weights(texts)
        new = State(_texts_at(texts, self._choose(rng, log_weights)), state.moves + 1, state.lookahead)
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
        """log of the importance weight p W / q."""
        return text.log_weight

    def _find_start(self, problem: Problem, lookahead: Lookahead, rng: Rng) -> Proposal:
        """A proposal of finite weight for each chain."""
        tries, rounds, lost = max(self.tries, MIN_START_TRIES), 100, torch.arange(len(rng), device=problem.device)
        text: Proposal | None = None
        for _ in range(rounds):
            row_rng = rng.select(lost)
            drawn = self._draw_texts(problem, lookahead, row_rng, tries)
            picked = _texts_at(drawn, self._pick(row_rng, self._log_weights(drawn)))
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
            f"{len(lost)} of {len(rng)} chains found no text of finite energy in {rounds * tries} proposals",
            remedy="fit the lookahead on more texts, or give tokens to start from",
        )

    def _draw_texts(
        self,
        problem: Problem,
        lookahead: Lookahead,
        rng: Rng,
        count: int,
        prefix: Int[Tensor, "chain kept"] | None = None,
    ) -> list[Proposal]:
        """``count`` texts for each chain as one batch; the first begins with ``prefix``, if it is given."""
        levels = rng.uniform(count, problem.length).transpose(0, 1).flatten(0, 1)
        drawn = lookahead.draw(problem, levels, prefix)
        columns = [part.view(count, len(rng), *part.shape[1:]) for part in drawn]
        return [Proposal(*(column[i] for column in columns)) for i in range(count)]

    def _log_weights(self, texts: list[Proposal]) -> Float[Tensor, "chain text"]:
        return torch.stack([self.log_weight(text) for text in texts], dim=-1)

    def _choose(self, rng: Rng, log_weights: Float[Tensor, "chain text"]) -> Int[Tensor, " chain"]:
        """The text of each chain after all choices; the first is the current one, the others are fresh."""
        here = torch.zeros(len(rng), dtype=torch.int64, device=log_weights.device)
        for begin in range(1, log_weights.shape[1], max(1, self.tries - 1)):
            present, fresh = log_weights.gather(-1, here[:, None]), log_weights[:, begin : begin + self.tries - 1]
            chosen = self._pick(rng, torch.cat([present, fresh], dim=-1))
            here = torch.where(chosen > 0, begin + chosen - 1, here)
        return here

    def _pick(self, rng: Rng, log_weights: Float[Tensor, "chain text"]) -> Int[Tensor, " chain"]:
        """A text for each chain with probability ∝ weight; any, if all weights are 0."""
        all_zero = ~log_weights.isfinite().any(-1, keepdim=True)
        return inverse_cdf(torch.where(all_zero, 0.0, log_weights), rng.uniform())


class RedrawnSuffix(NamedTuple):
    """The outcome of a redraw of a suffix."""

    text: Proposal
    """The proposed texts if accepted, else the current ones."""
    proposed: Int[Tensor, "chain n"]
    accepted: Bool[Tensor, " chain"]
    finite: Bool[Tensor, " chain"]
    """Whether the proposed text has a finite weight."""


def redraw_suffix(
    problem: Problem,
    rng: Rng,
    lookahead: Lookahead,
    here: Proposal,
    start: int,
    log_weight: Callable[[Proposal], Float[Tensor, " row"]],
) -> RedrawnSuffix:
    """Redraw all positions from ``start`` on from the lookahead, and accept by the ratio of weights."""
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
    """Accept texts with a new suffix by the ratio of weights."""
    weight = log_weight(there)
    finite = weight.isfinite()
    accepted = finite & (accept_level.log() < weight - log_weight(here))
    chosen = (
        torch.where(accepted.view(-1, *[1] * (new.ndim - 1)), new, old) for new, old in zip(there, here, strict=True)
    )
    return RedrawnSuffix(Proposal(*chosen), there.tokens, accepted, finite)


def _texts_at(texts: list[Proposal], choice: Int[Tensor, " chain"]) -> Proposal:
    """The chosen text of each chain."""
    chains = torch.arange(len(choice), device=choice.device)
    return Proposal(*(torch.stack(column)[choice, chains] for column in zip(*texts, strict=True)))
