"""Ancestral sampling: each token from the model given those before it. Exact, and every draw is independent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import Start, Target
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.info import Info, blank_info
from structured_voronoi.core.streams import BLOCK, Rng, widened, widest_dtype
from structured_voronoi.problem.drawing import ancestral_draw, check_autoregressive, log_acceptance, rows_to_redraw
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.problem.starts import (
    cpu_seconds,
    placeholder_start,
    refuse_endless_texts,
    show_tries,
    which_ended,
)

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
                "sv.Cycle(sv.SVS(), sv.Refresh())",
                remedy="on the command line --sampler auto",
            )
        return State(placeholder_start(problem, rng, start))

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        """One text a chain; texts without a finite log p, refused and unfinished ones are counted and drawn again."""
        problem = bind(target)
        tokens, info = draw_until_found(problem, rng, lambda rows, row_rng: draw_tries(problem, row_rng))
        return State(tokens), info._replace(swaps=(tokens != state.tokens).sum(-1))


class Tries(NamedTuple):
    """Texts of the model."""

    tokens: Int[Tensor, "row n"]
    energy: Float[Tensor, " row"]
    accepted: Bool[Tensor, " row"]
    """Which of them are draws of the target restricted to allowed tokens."""


def draw_tries(problem: Problem, rng: Rng) -> Tries:
    """One try for each row of ``rng``."""
    tokens, log_probs, log_rest = ancestral_draw(problem, rng, WHO)
    energy = -(widened(log_probs).sum(-1) + log_rest)
    log_chance, accepted = log_acceptance(problem, tokens, log_rest), energy.isfinite()
    if problem.masks:
        accepted &= rng.uniform().log() < log_chance
    return Tries(tokens, energy, accepted)


def draw_until_found(
    problem: Problem, rng: Rng, draw: Callable[[Int[Tensor, " row"], Rng], Tries]
) -> tuple[Int[Tensor, "chain n"], Info]:
    """The first try of every chain that is accepted; ``draw`` takes the chains' numbers in ``rng``, and their streams.

    Few chains that go on have several tries at a time, each from where it would begin in the chain's stream.
    """
    chains, began = len(rng), cpu_seconds()
    tokens = torch.zeros(chains, problem.length, dtype=torch.int64, device=rng.device)
    energy = torch.full((chains,), torch.inf, dtype=widest_dtype(rng.device), device=rng.device)
    drawn = torch.zeros(chains, dtype=torch.bool, device=rng.device)
    lost, refused, endless = (torch.zeros_like(tokens[:, 0]) for _ in range(3))
    most, each, stride = min(AT_A_TIME, max(BLOCK, rows_to_redraw(problem))), 1, 0
    while not drawn.all():
        rows = (~drawn).nonzero().squeeze(-1)
        place = torch.arange(each, device=rows.device)
        every = rows.repeat_interleave(each)
        row_rng = rng.select(every)
        row_rng.counter += stride * place.repeat(len(rows)).to(row_rng.counter)
        first = row_rng.counter.clone()
        tries = draw(every, row_rng)
        stride = int((row_rng.counter - first)[0])
        text, log_loss, accepted = (part.view(len(rows), each, *part.shape[1:]) for part in tries)
        found, taken = accepted.any(-1), accepted.long().argmax(-1)
        count = torch.where(found, taken + 1, each)
        ended, failed = which_ended(problem, tries.tokens).view_as(accepted), (place < count[:, None]) & ~accepted
        lost[rows] += (failed & ended & ~log_loss.isfinite()).sum(-1)
        refused[rows] += (failed & ended & log_loss.isfinite()).sum(-1)
        endless[rows] += (failed & ~ended).sum(-1)
        tokens[rows[found]], energy[rows[found]] = text[found, taken[found]], log_loss[found, taken[found]]
        drawn[rows[found]] = True
        rng.counter[rows.to(rng.counter.device)] += stride * count.to(rng.counter)
        _give_up(problem, drawn, lost, refused, endless, began)
        done, in_vain = int(drawn.sum()), int((lost + refused + endless).sum())
        if done < chains:
            left = chains - done
            each = max(1, min(most // left, max(BLOCK // left, 1 + in_vain // (1 + done))))  # blocks are filled anyway
            word = "accepted" if problem.ended is None else f"ended within {problem.length} tokens"
            show_tries(done, chains, done + in_vain, cpu_seconds() - began, word)
    ones = torch.ones_like(lost)
    return tokens, blank_info(energy)._replace(evaluations=ones + lost + refused + endless, events=ones, nonfinite=lost)


def _give_up(problem: Problem, drawn: Tensor, lost: Tensor, refused: Tensor, endless: Tensor, began: float) -> None:
    """Say so where a chain has drawn in vain for too long."""
    if drawn.all():
        return
    ended = int(drawn.sum() + (lost + refused).sum())
    refuse_endless_texts(problem, ended + int(endless.sum()), ended, began)
    if int(lost.max()) >= TRIES:
        raise SamplingError(
            f"the model had no finite log p for {TRIES} texts of one chain in turn",
            remedy="its weights may be damaged, or its dtype too narrow: try another",
        )
    if int(refused.max()) >= REFUSED_TRIES:
        raise SamplingError(
            f"{REFUSED_TRIES:,} texts of one chain in turn were refused: the model hardly ever draws the tokens that "
            "are `allowed`",
            remedy="allow more of them, or mask the conditionals of the target itself",
        )
