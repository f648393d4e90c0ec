"""Ancestral sampling: each token from the model given those before it. Exact, and every draw is independent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from structured_voronoi.contracts import Info, Start, Target, blank_info
from structured_voronoi.errors import SamplingError
from structured_voronoi.problem.drawing import (
    ancestral_draw,
    check_autoregressive,
    forgettable_start,
    log_acceptance,
    refuse_endless,
    seconds_of_work,
)
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.streams import Rng, widened, widest_dtype

WHO = "ancestral sampling"
AT_A_TIME = 64
"""Tries that are drawn at a time by the last chains to find a text, if texts took so many before."""
TRIES, REFUSED_TRIES = 20, 10_000
"""Texts without a finite log p that a chain may draw in turn; texts refused as no draws of the target."""


class State(NamedTuple):
    tokens: Int[Tensor, "chain n"]


@dataclass(frozen=True)
class Ancestral:
    """No settings. Targets with a suffix, an end at length or controls are refused: ancestral draws do not follow them.

    Where texts must end within N tokens, those that have not are drawn again, which is exact.
    """

    independent: ClassVar[bool] = True
    """Draws need no warm-up."""

    def init(self, target: Target | Problem, rng: Rng, start: Start) -> State:
        """Tokens to begin with, which are no draw: they are forgotten."""
        problem = bind(target)
        check_autoregressive(problem, WHO)
        if not problem.normalised:
            raise SamplingError(
                "ancestral sampling does not see a suffix, the end of the text or controls; use sv.Rejection(), or "
                "sv.Cycle(sv.SVS(), sv.Refresh()); on the command line --sampler auto"
            )
        return State(forgettable_start(problem, rng, start))

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        """One text a chain; texts without a finite log p, refused and unfinished ones are counted and drawn again.

        Few chains that go on have several tries at a time, each from where it would begin in the chain's stream.
        """
        problem, began = bind(target), seconds_of_work()
        tokens, drawn = state.tokens.clone(), torch.zeros_like(state.tokens[:, 0], dtype=torch.bool)
        energy = torch.full_like(drawn, torch.inf, dtype=widest_dtype(tokens.device))
        lost, refused, endless = (torch.zeros_like(tokens[:, 0]) for _ in range(3))
        each, stride = 1, 0
        while not drawn.all():
            rows = (~drawn).nonzero().squeeze(-1)
            place = torch.arange(each, device=rows.device)
            row_rng = rng.select(rows.repeat_interleave(each))
            row_rng.counter += stride * place.repeat(len(rows)).to(row_rng.counter)
            first = row_rng.counter.clone()
            tries = _draw(problem, row_rng)
            stride = int((row_rng.counter - first)[0])
            text, log_loss, accepted = (part.view(len(rows), each, *part.shape[1:]) for part in tries)
            found, taken = accepted.any(-1), accepted.long().argmax(-1)
            count = torch.where(found, taken + 1, each)
            ended = torch.ones_like(tries[2]) if problem.ended is None else problem.ended(tries[0])
            ended, failed = ended.view_as(accepted), (place < count[:, None]) & ~accepted
            lost[rows] += (failed & ended & ~log_loss.isfinite()).sum(-1)
            refused[rows] += (failed & ended & log_loss.isfinite()).sum(-1)
            endless[rows] += (failed & ~ended).sum(-1)
            tokens[rows[found]], energy[rows[found]] = text[found, taken[found]], log_loss[found, taken[found]]
            drawn[rows[found]] = True
            rng.counter[rows.to(rng.counter.device)] += stride * count.to(rng.counter)
            self._give_up(problem, drawn, lost, refused, endless, began)
            done, tries_so_far = int(drawn.sum()), int((lost + refused + endless).sum())
            each = max(1, min(AT_A_TIME // max(1, len(drawn) - done), 1 + tries_so_far // (1 + done)))
        changed, ones = (tokens != state.tokens).sum(-1), torch.ones_like(lost)
        evaluations = ones + lost + refused + endless
        info = blank_info(energy)._replace(evaluations=evaluations, events=ones, swaps=changed, nonfinite=lost)
        return State(tokens), info

    def _give_up(
        self, problem: Problem, drawn: Tensor, lost: Tensor, refused: Tensor, endless: Tensor, began: float
    ) -> None:
        """Say so where a chain has drawn in vain for too long."""
        if drawn.all():
            return
        ended = int(drawn.sum() + (lost + refused).sum())
        refuse_endless(problem, ended + int(endless.sum()), ended, began)
        if int(lost.max()) >= TRIES:
            raise SamplingError(
                f"the model had no finite log p for {TRIES} texts of one chain in turn; its weights may be "
                "damaged, or its dtype too narrow: try another"
            )
        if int(refused.max()) >= REFUSED_TRIES:
            raise SamplingError(
                f"{REFUSED_TRIES:,} texts of one chain in turn were refused: the model hardly ever draws the "
                "tokens that are `allowed`; allow more of them, or mask the conditionals of the target itself"
            )


def _draw(problem: Problem, rng: Rng) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their energies, and which of them are accepted as draws of the target restricted to allowed tokens."""
    tokens, log_probs, log_rest = ancestral_draw(problem, rng, WHO)
    energy = -(widened(log_probs).sum(-1) + log_rest)
    log_chance, drawn = log_acceptance(problem, tokens, log_rest), energy.isfinite()
    if problem.masks:
        drawn &= rng.uniform().log() < log_chance
    return tokens, energy, drawn
