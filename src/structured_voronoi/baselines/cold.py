"""COLD: Langevin dynamics on the logits of a soft text, which the model then makes hard.

Qin, Welleck, Khashabi and Choi (2022). ỹ (N, M) are logits of tokens at every position. A step of the dynamics is ỹ' =
ỹ - η ∇E(ỹ) + σ ε, ε ~ N(0, I), with E(ỹ) = -λ Σ_n Σ_w p(w | soft text before n) log softmax(ỹ_n)_w - log_rest(soft
text), where the soft text holds the mixture softmax(ỹ_n) of tokens at position n, and log_rest is the rest of log p:
controls and the text that follows. Finally each position takes, from left to right, the token with the largest ỹ among
the model's most probable ones.

Not exact: E is not the energy of a text, the noise decays, and the hard text follows no known distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.baselines.langevin import decayed
from structured_voronoi.core.contracts import Redrawn, Start, Target
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.info import Info, blank_info
from structured_voronoi.core.streams import Rng, block_rows, in_blocks, widened
from structured_voronoi.core.validation import check_count, check_finite, check_positive
from structured_voronoi.problem.drawing import ancestral_draw, check_autoregressive, read_softly, redraw_by
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.problem.starts import placeholder_start


class State(NamedTuple):
    """The tokens."""

    tokens: Int[Tensor, "chain n"]


@dataclass(frozen=True)
class COLD:
    """COLD. Not exact.

    The defaults were tuned on the bundled model.

    Parameters
    ----------
    step_size
        η.
    noise
        σ at the first step of the dynamics.
    final_noise
        σ at the last step.
    iterations
        Steps of the dynamics, with an evaluation each.
    fluency
        λ, the weight of the model; the paper's mean over positions corresponds to 1/N.
    candidates
        Most probable tokens of a position that take part in a step and among which the hard text chooses.
    min_logit
        Smallest logit, so that tokens which are impossible at first may become possible.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> target = sv.verify.sentences(controlled=True)
    >>> draws = sv.sample(target, sv.baselines.COLD(iterations=2), chains=4, draws=2, progress=False)
    >>> draws["posterior"]["tokens"].shape
    (4, 2, 3)
    """

    step_size: float = 0.2
    noise: float = 0.05
    final_noise: float = 0.01
    iterations: int = 20
    fluency: float = 0.05
    candidates: int = 100
    min_logit: float = -30.0

    exact: ClassVar[bool] = False
    independent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive(step_size=self.step_size, noise=self.noise, final_noise=self.final_noise, fluency=self.fluency)
        check_count(iterations=self.iterations, candidates=self.candidates)
        check_finite(min_logit=self.min_logit)

    def init(self, target: Target | Problem, rng: Rng, start: Start) -> State:
        """Placeholder tokens, which the first step does not read."""
        problem = bind(target)
        check_autoregressive(problem, "COLD")
        if problem.soft_reading is None:
            raise SamplingError(
                "COLD needs a target with `soft_reading(weights, candidates)`, for example a language model, and "
                f"{problem.name} has none",
                remedy="use another sampler",
            )
        return State(placeholder_start(problem, rng, start))

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        """One text per chain; ``evaluations`` counts the initial text, the dynamics and the hard text."""
        problem = bind(target)

        def draw_block(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            streams = rng.select(rows)
            start = ancestral_draw(problem, streams, "COLD").tokens
            logits, lost = self._follow_dynamics(problem, streams, start)
            rng.catch_up(rows, streams)
            tokens, log_probs, log_rest = self._harden(problem, logits)
            return tokens, widened(log_probs).sum(-1) + widened(log_rest), lost

        tokens, log_prob, lost = in_blocks(
            draw_block, torch.arange(len(rng)), rows_at_a_time=self._rows_at_a_time(problem)
        )
        count = torch.full_like(lost, self.iterations)
        info = blank_info(torch.where(log_prob.isfinite(), -log_prob, torch.inf))._replace(
            evaluations=count + 3, gradients=count, swaps=(tokens != state.tokens).sum(-1), nonfinite=lost
        )
        return State(tokens), info

    def _follow_dynamics(
        self, problem: Problem, rng: Rng, start: Int[Tensor, "chain n"]
    ) -> tuple[Float[Tensor, "chain n token"], Int[Tensor, " chain"]]:
        """ỹ after the dynamics, and the number of steps without a finite gradient, which add noise only.

        Initially ỹ is the model's log-probabilities along the start, and 0 for the tokens of the start.
        """
        certain = start[..., None]
        log_probs = read_softly(problem, torch.ones_like(certain, dtype=problem.dtype), certain).log_probs
        logits = log_probs.to(problem.dtype).clamp(min=self.min_logit).scatter(-1, certain, 0.0)
        lost = torch.zeros_like(start[:, 0])
        for step in range(self.iterations):
            known, candidates = log_probs.topk(min(self.candidates, log_probs.shape[-1]), dim=-1)
            y = logits.gather(-1, candidates).masked_fill(known == -torch.inf, -torch.inf)
            mixture = y.softmax(-1)
            log_probs, _, slope = read_softly(problem, mixture, candidates)
            gradient = self.gradient(mixture, log_probs.gather(-1, candidates).softmax(-1).to(y), slope.to(y))
            finite = gradient.isfinite().flatten(1).all(-1)
            lost += ~finite
            noise = decayed(self.noise, self.final_noise, max(1, self.iterations - 1), step)
            moved = y - self.step_size * gradient.where(finite[:, None, None], torch.zeros_like(gradient))
            moved = moved + noise * rng.normal(*y.shape[1:]).to(y)
            logits = logits.scatter(-1, candidates, moved.clamp(min=self.min_logit))
        return logits, lost

    def gradient(
        self,
        mixture: Float[Tensor, "chain n candidate"],
        expected: Float[Tensor, "chain n candidate"],
        slope: Float[Tensor, "chain n candidate"],
    ) -> Float[Tensor, "chain n candidate"]:
        """∇E at ỹ, from the mixture softmax(ỹ), the model's probabilities, and the gradient of log_rest there."""
        at_logits = mixture * (slope - (mixture * slope).sum(-1, keepdim=True))
        return self.fluency * (mixture - expected) - at_logits

    def _harden(self, problem: Problem, logits: Float[Tensor, "chain n token"]) -> Redrawn:
        """At each position the token with the largest ỹ among the model's most probable ones."""

        def choose(n: int, log_prob: Tensor, hidden: Tensor | None) -> Tensor:
            known, top = log_prob.topk(min(self.candidates, log_prob.shape[-1]), dim=-1)
            y = logits[:, n].gather(-1, top).masked_fill(known == -torch.inf, -torch.inf)
            return top.gather(-1, y.argmax(-1, keepdim=True)).squeeze(-1)

        blank = problem.allowed_tokens[:1].expand(logits.shape[:2]).clone()
        return redraw_by(problem, blank, 0, problem.length, choose)

    def _rows_at_a_time(self, problem: Problem) -> int:
        """Chains that fit into memory: a few numbers per token of the vocabulary, and the candidates' embeddings."""
        size, width = problem.embeddings.shape
        taken = 8 * problem.length * (4 * size + 2 * min(self.candidates, size) * width)
        return block_rows(taken + problem.row_bytes, problem.memory)
