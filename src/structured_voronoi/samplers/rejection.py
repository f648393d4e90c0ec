"""Rejection sampling (von Neumann 1951): draw from a proposal, accept with a probability. Draws are independent.

The target is p(m) ∝ p_LM(m) · Π_k exp(weight_k · score_k(m)), times the probability of the text that follows the
tokens. A try from the model is accepted with probability Π_k exp(weight_k · (score_k - bound_k)), times that of the
text that follows. With a lookahead, tries are drawn from its proposal q and accepted with probability min(1, w / c), w
= p W / q, which is exact if no weight exceeds the cap c.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import Start, Target
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.info import Info, blank_info
from structured_voronoi.core.streams import Rng, widened, widest_dtype
from structured_voronoi.core.validation import check_count, check_finite
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.lookahead.weighing import Proposal
from structured_voronoi.problem.drawing import check_autoregressive, draw_texts, log_acceptance, log_bound
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.problem.starts import (
    cpu_seconds,
    placeholder_start,
    refuse_endless_texts,
    show_tries,
    which_ended,
)


class State(NamedTuple):
    """The tokens, and the number of draws so far, which selects the random stream of the next one."""

    tokens: Int[Tensor, "chain n"]
    draws: int


class Tries(NamedTuple):
    """Proposed texts."""

    tokens: Int[Tensor, "row n"]
    energy: Float[Tensor, " row"]
    log_chance: Float[Tensor, " row"]
    """log of the probability of acceptance."""
    accepted: Bool[Tensor, " row"]


@dataclass(frozen=True)
class Rejection:
    """Rejection sampling.

    Parameters
    ----------
    max_tries
        Tries of one chain for one draw, after which it gives up.
    batch_size
        Tries that are evaluated at a time; draws do not depend on it.
    lookahead
        The proposal; None: the model.
    log_cap
        log of the cap c on the weights of the lookahead's texts.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> target = sv.verify.sentences(controlled=True)
    >>> draws = sv.sample(target, sv.Rejection(), chains=4, draws=10, progress=False)
    >>> draws["posterior"]["tokens"].shape
    (4, 10, 3)
    """

    max_tries: int = 100_000
    batch_size: int = 64
    lookahead: Lookahead | None = None
    log_cap: float = 0.0

    exact: ClassVar[bool] = True
    independent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count(max_tries=self.max_tries, batch_size=self.batch_size)
        check_finite(log_cap=self.log_cap)

    def init(self, target: Target | Problem, rng: Rng, start: Start) -> State:
        """Placeholder tokens, which the first step does not read."""
        problem = bind(target)
        check_autoregressive(problem, "sv.Rejection")
        log_bound(problem)
        return State(placeholder_start(problem, rng, start), 0)

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        """One text per chain."""
        problem, stream, chains = bind(target), f"{rng.stream}/draw {state.draws}", len(rng)
        tokens, pending = state.tokens.clone(), torch.arange(chains, device=rng.device)
        tried, lost = torch.zeros_like(pending), torch.zeros_like(pending)
        energy = torch.full((chains,), math.inf, dtype=widest_dtype(rng.device), device=rng.device)
        best, total, ended, began = -energy, 0, 0, cpu_seconds()
        while len(pending):
            active, later = pending[: self.batch_size], pending[self.batch_size :]
            # as many tries of each chain as a draw took so far
            each = 1 + int(tried.sum()) // (1 + chains - len(pending))
            each = max(1, min(self.batch_size // len(active), each))
            each = min(each, self.max_tries - int(tried[active].max()))
            offsets = torch.arange(each, device=rng.device)
            rows = rng.chains[active.repeat_interleave(each).to(rng.chains.device)]
            row_rng = type(rng)(rng.seed, rows.tolist(), stream, rng.device)
            drawn = self.tries(problem, row_rng, (tried[active][:, None] + offsets).flatten())
            total, ended = total + len(drawn.tokens), ended + int(which_ended(problem, drawn.tokens).sum())
            refuse_endless_texts(problem, total, ended, began)
            drawn = Tries(*(part.reshape(len(active), each, *part.shape[1:]) for part in drawn))
            done, first = drawn.accepted.any(-1), drawn.accepted.long().argmax(-1)
            count = torch.where(done, first + 1, each)
            counted, finite = offsets < count[:, None], drawn.log_chance.isfinite()
            tokens[active[done]] = drawn.tokens[done, first[done]]
            energy[active[done]] = drawn.energy[done, first[done]]
            tried[active] += count
            lost[active] += (counted & ~finite).sum(-1)
            best[active] = torch.maximum(best[active], torch.where(finite, drawn.log_chance, -math.inf).amax(-1))
            self._give_up(rng, tried, best, active[~done])
            pending = torch.cat([active[~done], later])
            show_tries(chains - len(pending), chains, total, cpu_seconds() - began)
        changed = (tokens != state.tokens).sum(-1)
        info = blank_info(energy)._replace(evaluations=tried, events=tried, swaps=changed, nonfinite=lost)
        return State(tokens, state.draws + 1), info

    def tries(self, problem: Problem, rng: Rng, numbers: Int[Tensor, " row"]) -> Tries:
        """One try for each row of ``rng``; ``numbers`` counts the tries of its chain.

        Each try reads its own part of the chain's random stream, so it does not depend on the batch.
        """
        levels_per_try = problem.length + 1
        rng.counter = numbers.to(rng.counter) * ((levels_per_try + 1) // 2)
        levels = rng.uniform(levels_per_try)
        if self.lookahead is not None:
            return self._weighted(problem, self.lookahead.draw(problem, levels[:, :-1]), levels[:, -1])
        tokens, log_probs, log_rest = draw_texts(problem, levels[:, :-1], "sv.Rejection")
        log_rest = torch.where(log_probs.isfinite().all(-1), log_rest, -torch.inf)
        log_chance = self.log_chance(problem, tokens, log_rest)
        accepted = log_chance.isfinite() & (levels[:, -1].log() < log_chance)
        return Tries(tokens, -(widened(log_probs).sum(-1) + widened(log_rest)), log_chance, accepted)

    def log_chance(
        self, problem: Problem, tokens: Int[Tensor, "row n"], log_rest: Float[Tensor, " row"]
    ) -> Float[Tensor, " row"]:
        """log of the probability that a text drawn from the model is accepted, given the rest of its log p(m)."""
        return log_acceptance(problem, tokens, log_rest)

    def acceptance(self, target: Target | Problem, seed: int, count: int = 256) -> float:
        """An estimate of the acceptance rate from ``count`` tries."""
        problem, total = bind(target), 0.0
        log_bound(problem)
        for begin in range(0, count, self.batch_size):
            rng = Rng(seed, range(begin, min(begin + self.batch_size, count)), "acceptance", problem.device)
            chance = self.tries(problem, rng, torch.zeros_like(rng.chains)).log_chance
            total += float(torch.where(chance.isfinite(), chance, -math.inf).exp().sum())
        return total / count

    def _weighted(self, problem: Problem, drawn: Proposal, level: Float[Tensor, " row"]) -> Tries:
        """Tries from the lookahead."""
        log_acceptance(problem, drawn.tokens, drawn.log_rest)  # raises an error if a score exceeds its bound
        log_weight = drawn.log_weight - log_bound(problem) - self.log_cap
        energy = -(drawn.log_p.sum(-1) + drawn.log_rest)
        return Tries(drawn.tokens, energy, log_weight.clamp(max=0.0), level.log() < log_weight)

    def _give_up(self, rng: Rng, tried: Tensor, best: Tensor, chains: Tensor) -> None:
        for chain in chains[tried[chains] >= self.max_tries].tolist()[:1]:
            raise SamplingError(
                f"none of {int(tried[chain]):,} tries of chain {int(rng.chains[chain])} was accepted; the largest "
                f"probability of acceptance was {math.exp(float(best[chain])):.2g}",
                remedy="lower the weights, loosen the controls, or use sv.Cycle(sv.SVS(), sv.Refresh())",
            )
