"""Redraw, score and accept tokens of an autoregressive target."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import BOUND_TOLERANCE, Choose, Redrawn, SoftReading
from structured_voronoi.core.errors import NoBoundError, SamplingError
from structured_voronoi.core.streams import Rng, block_rows, in_blocks, inverse_cdf, widened
from structured_voronoi.problem.problem import Problem, check_shape


def check_autoregressive(problem: Problem, caller: str) -> None:
    """Raise an error that names the caller unless the tokens of the target can be redrawn."""
    if not problem.is_autoregressive:
        raise SamplingError(
            f"{caller} needs a target with `conditionals(tokens, start)`, for example a language model, and "
            f"{problem.name} has none",
            remedy="use another sampler or start",
        )
    if problem.temperature != 1.0:  # the conditionals of p^(1/T) are not those of p
        raise SamplingError(
            f"{caller} does not support the temperature {problem.temperature} of this target", remedy="use sv.SVS alone"
        )


def redraw(
    problem: Problem,
    tokens: Int[Tensor, "chain n"],
    start: int,
    stop: int,
    levels: Float[Tensor, "chain count"],
) -> Redrawn:
    """Draw positions ``start`` to ``stop`` given those before them, by inversion at the given levels."""

    def redraw_block(tokens: Tensor, levels: Tensor) -> Redrawn:
        return redraw_by(problem, tokens, start, stop, lambda n, scores, _: inverse_cdf(scores, levels[:, n - start]))

    return Redrawn(*in_blocks(redraw_block, tokens, levels, rows_at_a_time=rows_to_redraw(problem)))


def rows_to_redraw(problem: Problem, reorders: bool = False) -> int:
    """Rows that can be redrawn at a time: each takes a few numbers for each token of the vocabulary.

    A target without a redraw of its own computes the conditionals of all later positions as well.
    """
    positions = 1 if _redraws_itself(problem, reorders) else problem.length
    return block_rows(3 * 8 * len(problem.embeddings) * positions, problem.memory)


@torch.no_grad()
def redraw_by(
    problem: Problem, tokens: Int[Tensor, "chain n"], start: int, stop: int, choose: Choose, reorders: bool = False
) -> Redrawn:
    """Choose positions ``start`` to ``stop`` in turn, given their log-probabilities.

    With ``reorders`` the choice may name parents as well: the rows whose earlier tokens each row takes over.
    """
    if problem.own_redraw is not None and _redraws_itself(problem, reorders):
        redrawn: Redrawn = problem.own_redraw(tokens, start, stop, choose)
        check_shape(problem, "tokens of redraw", redrawn.tokens, tokens.shape)
        check_shape(problem, "log_probs of redraw", redrawn.log_probs, (len(tokens), problem.length - start))
        check_shape(problem, "log_rest of redraw", redrawn.log_rest, tokens.shape[:1])
        return redrawn
    tokens = tokens.clone()
    for n in range(start, stop):
        choice = choose(n, _allowed_conditionals(problem, tokens, n)[:, 0], None)
        if isinstance(choice, tuple):
            choice, parents = choice
            tokens[:, :n] = tokens[parents, :n]
        tokens[:, n] = choice
    log_probs, log_prob = token_log_probs(problem, tokens), problem.target.log_prob(tokens)
    check_shape(problem, "log_prob", log_prob, tokens.shape[:1])
    return Redrawn(tokens, log_probs[:, start:], log_prob - log_probs.sum(-1))


def ancestral_draw(problem: Problem, rng: Rng, caller: str = "an ancestral start") -> Redrawn:
    """An independent draw of every text; errors name the caller."""
    return draw_texts(problem, rng.uniform(problem.length), caller)


def draw_texts(problem: Problem, levels: Float[Tensor, "chain n"], caller: str) -> Redrawn:
    """Draw every token given those before it, by inversion at the given levels."""
    check_autoregressive(problem, caller)
    blank = problem.allowed_tokens[:1].expand(levels.shape).clone()
    return redraw(problem, blank, 0, problem.length, levels)


@torch.no_grad()
def token_log_probs(problem: Problem, tokens: Int[Tensor, "chain n"]) -> Float[Tensor, "chain n"]:
    """log p of each token given those before it, among the allowed tokens."""
    own = None if problem.masks else problem.own_token_log_probs

    def score_block(block: Tensor) -> Tensor:
        if own is not None:
            log_probs: Tensor = own(block)
            check_shape(problem, "token_log_probs", log_probs, block.shape)
            return log_probs
        return _allowed_conditionals(problem, block, 0).gather(-1, block[..., None]).squeeze(-1)

    rows = _rows_of_conditionals(problem) if own is None else None
    scored: Tensor = in_blocks(score_block, tokens, rows_at_a_time=rows)
    return scored


def read_softly(
    problem: Problem,
    weights: Float[Tensor, "chain n candidate"],
    candidates: Int[Tensor, "chain n candidate"],
) -> SoftReading:
    """The target's reading of texts whose tokens are mixtures of candidates; other than allowed tokens are masked."""
    assert problem.soft_reading is not None
    reading: SoftReading = problem.soft_reading(weights, candidates)
    shape = (*weights.shape[:2], len(problem.embeddings))
    check_shape(problem, "log_probs of soft_reading", reading.log_probs, shape)
    check_shape(problem, "log_rest of soft_reading", reading.log_rest, weights.shape[:1])
    check_shape(problem, "slope of soft_reading", reading.slope, weights.shape)
    return reading._replace(log_probs=_masked(problem, reading.log_probs)) if problem.masks else reading


def log_acceptance(
    problem: Problem, tokens: Int[Tensor, "row n"], log_rest: Float[Tensor, " row"]
) -> Float[Tensor, " row"]:
    """log of the probability that rejection accepts a text drawn from the model, given the rest of its log p(m)."""
    log_rest = widened(log_rest.detach())
    if problem.normalised:  # draws of the model are draws of the target, if they hold allowed tokens only
        if not problem.masks:
            _check_normalised(problem, log_rest)
        log_chance = _log_allowed_mass(problem, tokens) if problem.masks else torch.zeros_like(log_rest)
        return torch.where(log_rest.isfinite(), log_chance, -torch.inf)
    log_chance = log_rest - log_bound(problem)
    above = log_chance.isfinite() & (log_chance > BOUND_TOLERANCE)
    if above.any():
        reason = problem.why_above_bound(tokens[above]) if problem.why_above_bound else ""
        excess = float(log_chance[above][0])
        reason = reason or f"log p of the target exceeds that of the model by {excess:.6g} more than its `log_bound`"
        raise NoBoundError(
            f"{reason}: rejection would not be exact",
            remedy="declare a bound that scores never exceed, or use sv.Cycle(sv.SVS(), sv.Refresh())",
        )
    return log_chance


def log_bound(problem: Problem) -> float:
    """An upper bound of log p of the target minus that of the model; an error if it is not finite."""
    bound = float(getattr(problem.target, "log_bound", None) or 0.0)
    if not math.isfinite(bound):
        raise NoBoundError(
            f"the target's log_bound is {bound}",
            remedy="declare a finite bound, which rejection needs, or use sv.Cycle(sv.SVS(), sv.Refresh())",
        )
    return bound


def _check_normalised(problem: Problem, log_rest: Float[Tensor, " row"]) -> None:
    """Raise an error if log_prob differs from the sum of the conditionals by more than rounding."""
    tolerance, finite = 0.05, log_rest[log_rest.isfinite()]
    if len(finite) and float(finite.max() - finite.min()) > tolerance:
        raise SamplingError(
            f"log_prob of {problem.name} is not the sum of its conditionals: the difference is from "
            f"{float(finite.min()):.4g} to {float(finite.max()):.4g}",
            remedy="set `normalised = False`",
        )


def _log_allowed_mass(problem: Problem, tokens: Int[Tensor, "row n"]) -> Float[Tensor, " row"]:
    """log Π_n P(token n is allowed | tokens before it)."""

    def mass_of_block(block: Tensor) -> Tensor:
        log_probs: Tensor = problem.target.conditionals(block, 0)  # type: ignore[attr-defined]
        return _masked(problem, widened(log_probs)).logsumexp(-1).sum(-1)

    mass: Tensor = in_blocks(mass_of_block, tokens, rows_at_a_time=_rows_of_conditionals(problem))
    return mass


def _redraws_itself(problem: Problem, reorders: bool) -> bool:
    """Whether the target has a redraw of its own that masks tokens and, if needed, reorders rows."""
    can_reorder = bool(getattr(problem, "reorders", False))
    return problem.own_redraw is not None and not problem.masks and (can_reorder or not reorders)


def _allowed_conditionals(problem: Problem, tokens: Tensor, start: int) -> Float[Tensor, "chain rest token"]:
    """The target's conditionals, renormalised over the allowed tokens if it does not mask them itself.

    The change counts as part of the rest of log p(m), so redraws are exact for p restricted to allowed tokens.
    """
    log_probs: Tensor = problem.target.conditionals(tokens, start)  # type: ignore[attr-defined]
    shape = (len(tokens), problem.length - start, len(problem.embeddings))
    check_shape(problem, "conditionals", log_probs, shape)
    return _masked(problem, log_probs).log_softmax(-1) if problem.masks else log_probs


def _masked(problem: Problem, log_probs: Tensor) -> Tensor:
    assert problem.allowed is not None
    return log_probs.masked_fill(~problem.allowed.to(log_probs.device), -torch.inf)


def _rows_of_conditionals(problem: Problem) -> int:
    """Rows whose conditionals at all positions fit into memory."""
    return block_rows(3 * 8 * problem.length * len(problem.embeddings), problem.memory)
