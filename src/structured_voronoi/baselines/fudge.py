"""FUDGE: future discriminators for generation (Yang & Klein 2021). Fast, and not exact by design.

Each token is drawn from the language model's conditional over its most probable candidates, multiplied by the
probability of the label given the text so far, from a classifier of prefixes: p(w | before) · p(label | before, w)^γ.
Normalised anew at every position, the product is not that of any fixed target unless the classifier knows the future.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import Start, Target
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.info import Info, blank_info
from structured_voronoi.core.streams import Rng, in_blocks, inverse_cdf, widened
from structured_voronoi.core.validation import check_count, check_finite
from structured_voronoi.problem.drawing import check_autoregressive, redraw_by, rows_to_redraw
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.problem.starts import placeholder_start

ROWS = 4096
"""Prefixes that the predictor is asked about at a time."""

Predictor = Callable[[Int[Tensor, "row n"]], Float[Tensor, " row"]]
"""log p(label | prefix) of each prefix; all have the same length, from 1 to N, and none holds the end of a text."""


class State(NamedTuple):
    tokens: Int[Tensor, "chain n"]


class Candidates(NamedTuple):
    """The next tokens that are considered."""

    log_weight: Float[Tensor, "chain candidate"]
    token: Int[Tensor, "chain candidate"]
    asked: Int[Tensor, " chain"]
    """The number of prefixes that the predictor was asked about."""
    unknown: Int[Tensor, " chain"]
    """The number of prefixes for which the predictor had no finite answer."""


@dataclass(frozen=True)
class Fudge:
    """Settings of FUDGE."""

    predictor: Predictor = field(repr=False)
    weight: float = 1.0
    """γ: the power of the predictor's probability."""
    candidates: int = 200
    """Most probable tokens of the model that are considered at each position."""
    least: float = 0.0
    """Candidates less probable than this are left out: they hardly weigh, and the predictor is slow."""

    independent: ClassVar[bool] = True
    """Draws need no warm-up."""

    def __post_init__(self) -> None:
        check_finite(weight=self.weight)
        check_count(candidates=self.candidates)
        check_finite(least=self.least)
        if not 0 <= self.least < 1:
            raise SamplingError(
                f"least = {self.least!r} is no probability below 1",
                remedy="choose one, for example least=1e-4",
            )
        if not callable(self.predictor):
            raise SamplingError(
                f"predictor = {self.predictor!r} cannot be called",
                remedy=(
                    "give a function of prefixes (rows, n) that returns log p(label | prefix), for example "
                    "partial(PrefixClassifier.load(folder).log_prob, label=…)"
                ),
            )

    def init(self, target: Target | Problem, rng: Rng, start: Start) -> State:
        """Tokens to begin with, which are no draw: FUDGE forgets them."""
        problem = bind(target)
        check_autoregressive(problem, "FUDGE")
        return State(placeholder_start(problem, rng, start))

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        """One text a chain; ``evaluations`` counts texts, ``events`` the prefixes the predictor was asked about."""
        problem, levels = bind(target), rng.uniform(state.tokens.shape[1])

        def draw_block(tokens: Tensor, levels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            before, asked, lost = tokens[:, :0], torch.zeros_like(tokens[:, 0]), torch.zeros_like(tokens[:, 0])

            def choose(n: int, log_prob: Tensor, hidden: Tensor | None) -> Tensor:
                nonlocal before, asked, lost
                log_weight, token, questions, unknown = self.weighted(log_prob, before, problem.padding)
                choice = inverse_cdf(log_weight, levels[:, n])
                before = torch.cat([before, token.gather(-1, choice[:, None])], dim=-1)
                asked, lost = asked + questions, lost + unknown
                return before[:, n]

            tokens, log_probs, log_rest = redraw_by(problem, tokens, 0, problem.length, choose)
            return tokens, widened(log_probs).sum(-1) + widened(log_rest), asked, lost

        rows = rows_to_redraw(problem)
        tokens, log_prob, asked, lost = in_blocks(draw_block, state.tokens, levels, rows_at_a_time=rows)
        energy = torch.where(log_prob.isfinite(), -log_prob, torch.inf)
        info = blank_info(energy)._replace(
            evaluations=torch.ones_like(asked), events=asked, swaps=(tokens != state.tokens).sum(-1), nonfinite=lost
        )
        return State(tokens), info

    def weighted(
        self, log_prob: Float[Tensor, "chain token"], before: Int[Tensor, "chain n"], padding: int | None = None
    ) -> Candidates:
        """Candidates without a finite answer are impossible; where all are, the model alone decides.

        A text that would end here is judged by what stands before; one that has ended, or is empty, is not judged.
        """
        top = widened(log_prob).topk(min(self.candidates, log_prob.shape[-1]), dim=-1)
        prefixes = torch.cat([before[:, None].expand(-1, top.indices.shape[1], -1), top.indices[..., None]], dim=-1)
        likely = top.values >= math.log(self.least) if self.least else torch.ones_like(top.values, dtype=torch.bool)
        likely &= top.values.isfinite()
        likely[:, 0] = True
        ends = likely & (top.indices == padding) if padding is not None else torch.zeros_like(likely)
        judged = ends & (top.values < 0) & bool(before.shape[1])  # after the end, padding is certain
        answers = torch.full_like(top.values, -torch.inf).masked_fill(ends, 0.0)
        answers[judged] = self._answers(before[judged.nonzero()[:, 0]])
        answers[likely & ~ends] = self._answers(prefixes[likely & ~ends])
        asked = likely & ~ends | judged
        finite = answers.isfinite()
        log_weight = torch.where(finite, top.values + self.weight * torch.where(finite, answers, 0), -torch.inf)
        possible = log_weight.isfinite().any(-1, keepdim=True)
        unknown = (~finite & asked & top.values.isfinite()).sum(-1)
        return Candidates(torch.where(possible, log_weight, top.values), top.indices, asked.sum(-1), unknown)

    def _answers(self, prefixes: Int[Tensor, "row n"]) -> Float[Tensor, " row"]:
        """The predictor's, some rows at a time."""
        parts = [in_blocks(self._answer, prefixes[i : i + ROWS]) for i in range(0, len(prefixes), ROWS)]
        return torch.cat(parts) if parts else widened(torch.zeros(0, device=prefixes.device))

    def _answer(self, prefixes: Int[Tensor, "row n"]) -> Float[Tensor, " row"]:
        answer = self.predictor(prefixes)
        if not isinstance(answer, Tensor) or answer.shape != prefixes.shape[:1]:
            received = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
            raise SamplingError(
                f"the predictor answers {len(prefixes)} prefixes with {received}",
                remedy=f"it must return a tensor of shape {(len(prefixes),)}",
            )
        return widened(answer.detach().to(prefixes.device))
