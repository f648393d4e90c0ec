"""FUDGE: future discriminators for generation.

Yang and Klein (2021). Each token is drawn from the language model's conditional over its most probable candidates,
multiplied by a classifier's probability of the label given the text so far:
p(w | before) · p(label | before, w)^γ. Fast, but not exact: normalised at every position, the product is the
distribution of no fixed target unless the classifier predicts the future perfectly.
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

Predictor = Callable[[Int[Tensor, "row n"]], Float[Tensor, " row"]]
"""(prefixes of one length from 1 to N, none of which has ended) -> log p(label | prefix)."""


class State(NamedTuple):
    """The tokens."""

    tokens: Int[Tensor, "chain n"]


class Candidates(NamedTuple):
    """The candidates for the next token."""

    log_weight: Float[Tensor, "chain candidate"]
    token: Int[Tensor, "chain candidate"]
    predicted: Int[Tensor, " chain"]
    """The number of prefixes that were given to the predictor."""
    nonfinite: Int[Tensor, " chain"]
    """The number of its results that are not finite."""


@dataclass(frozen=True)
class Fudge:
    """FUDGE. Not exact.

    Parameters
    ----------
    predictor
        Function of prefixes (rows, n) that returns log p(label | prefix), for example
        ``partial(PrefixClassifier.load(folder).log_prob, label=…)``.
    weight
        γ, the power of the predictor's probability.
    candidates
        Most probable tokens of the model at each position among which the next one is drawn.
    min_probability
        Candidates that are less probable are left out, except for the most probable one.

    Examples
    --------
    >>> import torch
    >>> import structured_voronoi as sv
    >>> target = sv.verify.sentences(controlled=False)
    >>> fudge = sv.baselines.Fudge(lambda prefixes: torch.zeros(len(prefixes)))
    >>> sv.sample(target, fudge, chains=4, draws=2, progress=False)["posterior"]["tokens"].shape
    (4, 2, 3)
    """

    predictor: Predictor = field(repr=False)
    weight: float = 1.0
    candidates: int = 200
    min_probability: float = 0.0

    exact: ClassVar[bool] = False
    independent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_finite(weight=self.weight)
        check_count(candidates=self.candidates)
        check_finite(min_probability=self.min_probability)
        if not 0 <= self.min_probability < 1:
            raise SamplingError(
                f"{self.min_probability!r} is no probability below 1",
                argument="min_probability",
                remedy="choose one, for example 1e-4",
            )
        if not callable(self.predictor):
            raise SamplingError(
                f"{self.predictor!r} cannot be called",
                argument="predictor",
                remedy="give a function of prefixes (rows, n) that returns log p(label | prefix)",
            )

    def init(self, target: Target | Problem, rng: Rng, start: Start) -> State:
        """Placeholder tokens, which the first step does not read."""
        problem = bind(target)
        check_autoregressive(problem, "FUDGE")
        return State(placeholder_start(problem, rng, start))

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        """One text per chain; ``evaluations`` counts texts, ``events`` the prefixes given to the predictor."""
        problem, levels = bind(target), rng.uniform(state.tokens.shape[1])

        def draw_block(tokens: Tensor, levels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            before, predicted, lost = tokens[:, :0], torch.zeros_like(tokens[:, 0]), torch.zeros_like(tokens[:, 0])

            def choose(n: int, log_prob: Tensor, hidden: Tensor | None) -> Tensor:
                nonlocal before, predicted, lost
                found = self.weighted(log_prob, before, problem.padding)
                choice = inverse_cdf(found.log_weight, levels[:, n])
                before = torch.cat([before, found.token.gather(-1, choice[:, None])], dim=-1)
                predicted, lost = predicted + found.predicted, lost + found.nonfinite
                return before[:, n]

            tokens, log_probs, log_rest = redraw_by(problem, tokens, 0, problem.length, choose)
            return tokens, widened(log_probs).sum(-1) + widened(log_rest), predicted, lost

        rows = rows_to_redraw(problem)
        tokens, log_prob, predicted, lost = in_blocks(draw_block, state.tokens, levels, rows_at_a_time=rows)
        energy, ones = torch.where(log_prob.isfinite(), -log_prob, torch.inf), torch.ones_like(predicted)
        info = blank_info(energy)._replace(
            evaluations=ones, events=predicted, swaps=(tokens != state.tokens).sum(-1), nonfinite=lost
        )
        return State(tokens), info

    def weighted(
        self, log_prob: Float[Tensor, "chain token"], before: Int[Tensor, "chain n"], padding: int | None = None
    ) -> Candidates:
        """The candidates for the next token, weighted by the predictor.

        Candidates without a finite prediction are impossible; if all are, the model alone decides. For a text that ends
        here the prefix before its end is given to the predictor; texts that have ended, or are empty, are not.
        """
        top = widened(log_prob).topk(min(self.candidates, log_prob.shape[-1]), dim=-1)
        prefixes = torch.cat([before[:, None].expand(-1, top.indices.shape[1], -1), top.indices[..., None]], dim=-1)
        likely = top.values.isfinite()
        if self.min_probability:
            likely &= top.values >= math.log(self.min_probability)
        likely[:, 0] = True
        ends = likely & (top.indices == padding) if padding is not None else torch.zeros_like(likely)
        ends_here = ends & (top.values < 0) & bool(before.shape[1])  # after the end, padding is certain
        scores = torch.full_like(top.values, -torch.inf).masked_fill(ends, 0.0)
        scores[ends_here] = self._predict(before[ends_here.nonzero()[:, 0]])
        scores[likely & ~ends] = self._predict(prefixes[likely & ~ends])
        predicted = likely & ~ends | ends_here
        finite = scores.isfinite()
        log_weight = torch.where(finite, top.values + self.weight * torch.where(finite, scores, 0), -torch.inf)
        possible = log_weight.isfinite().any(-1, keepdim=True)
        nonfinite = (~finite & predicted & top.values.isfinite()).sum(-1)
        return Candidates(torch.where(possible, log_weight, top.values), top.indices, predicted.sum(-1), nonfinite)

    def _predict(self, prefixes: Int[Tensor, "row n"]) -> Float[Tensor, " row"]:
        """The predictor's results, for some prefixes at a time."""
        size = 4096
        parts = [in_blocks(self._predict_block, prefixes[i : i + size]) for i in range(0, len(prefixes), size)]
        return torch.cat(parts) if parts else widened(torch.zeros(0, device=prefixes.device))

    def _predict_block(self, prefixes: Int[Tensor, "row n"]) -> Float[Tensor, " row"]:
        found = self.predictor(prefixes)
        if not isinstance(found, Tensor) or found.shape != prefixes.shape[:1]:
            received = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"type {type(found).__name__}"
            raise SamplingError(
                f"the result of the predictor has {received} for {len(prefixes)} prefixes",
                remedy=f"return a tensor of shape {(len(prefixes),)}",
            )
        return widened(found.detach().to(prefixes.device))
