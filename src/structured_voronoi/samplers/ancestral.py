"""Ancestral sampling: each token is drawn from the model given those before it.

Exact, with independent draws, for targets that are the model itself. Texts that the target excludes (unfinished ones,
or tokens that are not allowed) are drawn again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import Start, Target
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.info import Info, blank_info
from structured_voronoi.core.streams import BLOCK, Rng, widened, widest_dtype
from structured_voronoi.core.validation import check_count
from structured_voronoi.problem.drawing import ancestral_draw, check_autoregressive, log_acceptance, rows_to_redraw
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.problem.starts import (
    cpu_seconds,
    placeholder_start,
    refuse_endless_texts,
    show_tries,
    which_ended,
)


class State(NamedTuple):
    """The tokens."""

    tokens: Int[Tensor, "chain n"]


class Tries(NamedTuple):
    """Texts drawn from the model."""

    tokens: Int[Tensor, "row n"]
    energy: Float[Tensor, " row"]
    accepted: Bool[Tensor, " row"]
    """Whether they are draws of the target."""


@dataclass(frozen=True)
class Ancestral:
    """Sample the model from left to right.

    Targets with a suffix or controls are refused, as draws of the model do not follow them.

    Parameters
    ----------
    max_nonfinite
        Texts without a finite log p of one chain and draw, after which it gives up.
    max_refused
        Texts with tokens that are not allowed of one chain and draw, after which it gives up.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> target = sv.verify.sentences(controlled=False)
    >>> draws = sv.sample(target, sv.Ancestral(), chains=4, draws=10, progress=False)
    >>> draws["posterior"]["tokens"].shape
    (4, 10, 3)
    """

    max_nonfinite: int = 20
    max_refused: int = 10_000

    exact: ClassVar[bool] = True
    independent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count(max_nonfinite=self.max_nonfinite, max_refused=self.max_refused)

    def init(self, target: Target | Problem, rng: Rng, start: Start) -> State:
        """Placeholder tokens, which the first step does not read."""
        problem = bind(target)
        check_autoregressive(problem, "sv.Ancestral")
        if not problem.normalised:
            raise SamplingError(
                "sv.Ancestral does not support a suffix, a required end or controls",
                remedy="use sv.Rejection(), or sv.Cycle(sv.SVS(), sv.Refresh())",
            )
        return State(placeholder_start(problem, rng, start))

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        """One text per chain. Tries are read from the stream of the chain in order, some of them at a time."""
        problem, chains, began, max_rows = bind(target), len(rng), cpu_seconds(), 64
        tokens = torch.zeros(chains, problem.length, dtype=torch.int64, device=rng.device)
        energy = torch.full((chains,), torch.inf, dtype=widest_dtype(rng.device), device=rng.device)
        drawn = torch.zeros(chains, dtype=torch.bool, device=rng.device)
        lost, refused, endless = (torch.zeros_like(tokens[:, 0]) for _ in range(3))
        most, each, stride = min(max_rows, max(BLOCK, rows_to_redraw(problem))), 1, 0
        while True:
            rows = (~drawn).nonzero().squeeze(-1)
            number = torch.arange(each, device=rows.device)
            row_rng = rng.select(rows.repeat_interleave(each))
            row_rng.counter += stride * number.repeat(len(rows)).to(row_rng.counter)
            first = row_rng.counter.clone()
            tries = draw_tries(problem, row_rng)
            stride = int((row_rng.counter - first)[0])
            text, text_energy, accepted = (part.view(len(rows), each, *part.shape[1:]) for part in tries)
            found, taken = accepted.any(-1), accepted.long().argmax(-1)
            count = torch.where(found, taken + 1, each)
            ended, failed = which_ended(problem, tries.tokens).view_as(accepted), (number < count[:, None]) & ~accepted
            lost[rows] += (failed & ended & ~text_energy.isfinite()).sum(-1)
            refused[rows] += (failed & ended & text_energy.isfinite()).sum(-1)
            endless[rows] += (failed & ~ended).sum(-1)
            tokens[rows[found]], energy[rows[found]] = text[found, taken[found]], text_energy[found, taken[found]]
            drawn[rows[found]] = True
            rng.counter[rows.to(rng.counter.device)] += stride * count.to(rng.counter)
            done, failures = int(drawn.sum()), lost + refused + endless
            if done == chains:
                break
            refuse_endless_texts(problem, done + int(failures.sum()), done + int((lost + refused).sum()), began)
            self._give_up(int(lost.max()), int(refused.max()))
            left, failed_tries = chains - done, int(failures.sum())
            # rows are padded to whole blocks anyway
            each = max(1, min(most // left, max(BLOCK // left, 1 + failed_tries // (1 + done))))
            word = "accepted" if problem.ended is None else f"ended within {problem.length} tokens"
            show_tries(done, chains, done + failed_tries, cpu_seconds() - began, word)
        ones = torch.ones_like(lost)
        info = blank_info(energy)._replace(
            evaluations=ones + failures, events=ones, nonfinite=lost, swaps=(tokens != state.tokens).sum(-1)
        )
        return State(tokens), info

    def _give_up(self, lost: int, refused: int) -> None:
        if lost >= self.max_nonfinite:
            raise SamplingError(
                f"the model gave {lost} texts of one chain no finite log p",
                remedy="use another model or a wider dtype: its weights may be damaged",
            )
        if refused >= self.max_refused:
            raise SamplingError(
                f"{refused:,} texts of one chain hold tokens that are not allowed",
                remedy="allow more tokens, or mask the conditionals of the target itself",
            )


def draw_tries(problem: Problem, rng: Rng) -> Tries:
    """One try for each row of ``rng``."""
    tokens, log_probs, log_rest = ancestral_draw(problem, rng, "sv.Ancestral")
    energy = -(widened(log_probs).sum(-1) + log_rest)
    log_chance, accepted = log_acceptance(problem, tokens, log_rest), energy.isfinite()
    if problem.masks:
        accepted &= rng.uniform().log() < log_chance
    return Tries(tokens, energy, accepted)
