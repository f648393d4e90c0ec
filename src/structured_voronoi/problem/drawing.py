"""Where tokens come from: an autoregressive target redraws them, and chains find their first state."""

from __future__ import annotations

import math
from time import process_time

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import BOUND_TOLERANCE, Choose, Guidance, Redrawn, SoftReading, Start
from structured_voronoi.core.errors import NoBoundError, NoStartError, SamplingError, did_you_mean
from structured_voronoi.core.progress import show_note
from structured_voronoi.core.streams import Rng, block_rows, in_blocks, inverse_cdf, widened
from structured_voronoi.problem.problem import Evaluation, Problem, bind

BLIND_TRIES, RELAXED_TRIES = 500, 1500
"""Draws of each chain that needs a start of finite energy; redraws along the relaxed target, if there is one."""
NORMALISED_TOLERANCE = 0.05
"""By how much rounding may let log p of texts differ from the sum of their tokens' log-probabilities."""
RESTART = 40
"""Redraws after which a chain without a start begins anew."""
ENDLESS, LEAST_ENDED, PATIENCE = 200, 0.01, 30.0
"""Texts that must end, and of which hardly any did, after which it is time to give up; the share that is hardly any;
and the seconds that are spent before."""


def check_autoregressive(problem: Problem, who: str) -> None:
    """Refuse a target whose tokens cannot be redrawn."""
    if not problem.is_autoregressive:
        raise SamplingError(
            f"{who} needs a target with `conditionals(tokens, start)`, a language model for example, and "
            f"{problem.name} has none",
            remedy="use another sampler or start",
        )
    if problem.temperature != 1.0:  # the conditionals of p^(1/T) are not those of p
        raise SamplingError(
            f"{who} does not know temperatures, and this target has {problem.temperature}",
            remedy="use SVS alone",
        )


def redraw(
    problem: Problem,
    tokens: Int[Tensor, "chain n"],
    start: int,
    stop: int,
    levels: Float[Tensor, "chain count"],
) -> Redrawn:
    """The tokens with positions ``start`` to ``stop`` drawn given those before them, each at its level."""

    def redraw_block(tokens: Tensor, levels: Tensor) -> Redrawn:
        return redraw_by(problem, tokens, start, stop, lambda n, scores, _: inverse_cdf(scores, levels[:, n - start]))

    return Redrawn(*in_blocks(redraw_block, tokens, levels, rows_at_a_time=rows_to_redraw(problem)))


def rows_to_redraw(problem: Problem, reorders: bool = False) -> int:
    """How many rows can be redrawn at a time: a few numbers are kept for each row and token of the vocabulary.

    A target without a redraw of its own gives the conditionals of all later positions, too.
    """
    positions = 1 if _redraws_itself(problem, reorders) else problem.length
    return block_rows(3 * 8 * len(problem.embeddings) * positions, problem.memory)


@torch.no_grad()
def redraw_by(
    problem: Problem, tokens: Int[Tensor, "chain n"], start: int, stop: int, choose: Choose, reorders: bool = False
) -> Redrawn:
    """The tokens with positions ``start`` to ``stop`` chosen in turn, from their probabilities given those before.

    With ``reorders`` the choice may name parents, too: rows that each row goes on from.
    """
    if problem.own_redraw is not None and _redraws_itself(problem, reorders):
        redrawn: Redrawn = problem.own_redraw(tokens, start, stop, choose)
        _check_shape(problem, "redrawn tokens", redrawn.tokens, tokens.shape)
        _check_shape(problem, "redrawn log_probs", redrawn.log_probs, (len(tokens), problem.length - start))
        _check_shape(problem, "redrawn log_rest", redrawn.log_rest, tokens.shape[:1])
        return redrawn
    tokens = tokens.clone()
    for n in range(start, stop):
        choice = choose(n, _allowed_conditionals(problem, tokens, n)[:, 0], None)
        if isinstance(choice, tuple):
            choice, parents = choice
            tokens[:, :n] = tokens[parents, :n]
        tokens[:, n] = choice
    log_probs, log_prob = token_log_probs(problem, tokens), problem.target.log_prob(tokens)
    _check_shape(problem, "log_prob", log_prob, tokens.shape[:1])
    return Redrawn(tokens, log_probs[:, start:], log_prob - log_probs.sum(-1))


def _redraws_itself(problem: Problem, reorders: bool) -> bool:
    """Has the target a redraw of its own that leaves out what is not allowed and, if need be, reorders rows?"""
    can_reorder = bool(getattr(problem, "reorders", False))
    return problem.own_redraw is not None and not problem.masks and (can_reorder or not reorders)


def _check_shape(problem: Problem, name: str, value: object, shape: tuple[int, ...]) -> None:
    """Refuse what would be broadcast into nonsense."""
    if not isinstance(value, Tensor) or tuple(value.shape) != tuple(shape):
        received = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise SamplingError(
            f"the {name} of {problem.name} are {received} for {shape[0]} rows of tokens",
            remedy=f"it must be a tensor of shape {tuple(shape)}",
        )


@torch.no_grad()
def token_log_probs(problem: Problem, tokens: Int[Tensor, "chain n"]) -> Float[Tensor, "chain n"]:
    """log p of each token given those before it, among the allowed ones."""

    def score_block(block: Tensor) -> Tensor:
        if problem.own_token_log_probs is not None and not problem.masks:
            log_probs: Tensor = problem.own_token_log_probs(block)
            _check_shape(problem, "token_log_probs", log_probs, block.shape)
            return log_probs
        return _allowed_conditionals(problem, block, 0).gather(-1, block[..., None]).squeeze(-1)

    rows = None
    if problem.own_token_log_probs is None or problem.masks:
        rows = block_rows(3 * 8 * problem.length * len(problem.embeddings), problem.memory)
    scored: Tensor = in_blocks(score_block, tokens, rows_at_a_time=rows)
    return scored


def _allowed_conditionals(problem: Problem, tokens: Tensor, start: int) -> Float[Tensor, "chain rest token"]:
    """The target's conditionals, renormalised over the allowed tokens where it does not do so itself.

    What that changes counts as part of the rest of log p(m), so that redraws stay exact for p restricted to them.
    """
    log_probs: Tensor = problem.target.conditionals(tokens, start)  # type: ignore[attr-defined]
    shape = (len(tokens), problem.length - start, len(problem.embeddings))
    _check_shape(problem, "conditionals", log_probs, shape)
    if problem.masks:
        assert problem.allowed is not None
        log_probs = log_probs.masked_fill(~problem.allowed.to(log_probs.device), -torch.inf).log_softmax(-1)
    return log_probs


def read_softly(
    problem: Problem,
    weights: Float[Tensor, "chain n candidate"],
    candidates: Int[Tensor, "chain n candidate"],
) -> SoftReading:
    """What a target says of texts whose tokens are mixtures of candidates; tokens that are not allowed are masked."""
    assert problem.soft_reading is not None
    reading: SoftReading = problem.soft_reading(weights, candidates)
    shape = (*weights.shape[:2], len(problem.embeddings))
    _check_shape(problem, "soft_reading's log_probs", reading.log_probs, shape)
    _check_shape(problem, "soft_reading's log_rest", reading.log_rest, weights.shape[:1])
    _check_shape(problem, "soft_reading's slope", reading.slope, weights.shape)
    if not problem.masks:
        return reading
    assert problem.allowed is not None
    return reading._replace(log_probs=reading.log_probs.masked_fill(~problem.allowed.to(problem.device), -torch.inf))


def _log_allowed_mass(problem: Problem, tokens: Int[Tensor, "row n"]) -> Float[Tensor, " row"]:
    """log of the probability that the model, given each prefix of the tokens, goes on with an allowed token."""
    assert problem.allowed is not None
    allowed = problem.allowed.to(problem.device)

    def mass_of_block(block: Tensor) -> Tensor:
        log_probs: Tensor = problem.target.conditionals(block, 0)  # type: ignore[attr-defined]
        return widened(log_probs).masked_fill(~allowed, -torch.inf).logsumexp(-1).sum(-1)

    rows = block_rows(3 * 8 * problem.length * len(problem.embeddings), problem.memory)
    mass: Tensor = in_blocks(mass_of_block, tokens, rows_at_a_time=rows)
    return mass


def draw_all(problem: Problem, levels: Float[Tensor, "chain n"], who: str) -> Redrawn:
    """Every token of every row drawn given those before it; errors say that ``who`` needs that."""
    check_autoregressive(problem, who)
    blank = problem.allowed_tokens[:1].expand(levels.shape).clone()
    return redraw(problem, blank, 0, problem.length, levels)


def ancestral_draw(problem: Problem, rng: Rng, who: str = "an ancestral start") -> Redrawn:
    """Independent draws from an autoregressive target, one a chain."""
    return draw_all(problem, rng.uniform(problem.length), who)


def log_acceptance(
    problem: Problem, tokens: Int[Tensor, "row n"], log_rest: Float[Tensor, " row"]
) -> Float[Tensor, " row"]:
    """log of the probability that rejection accepts a text drawn from the model, given the rest of its log p(m)."""
    log_rest = widened(log_rest.detach())
    if problem.normalised:  # the model's own draws are the truth, if it draws allowed tokens only
        if not problem.masks:
            _check_normalised(problem, log_rest)
        chance = _log_allowed_mass(problem, tokens) if problem.masks else torch.zeros_like(log_rest)
        return torch.where(log_rest.isfinite(), chance, -torch.inf)
    chance = log_rest - log_bound(problem)
    above = chance.isfinite() & (chance > BOUND_TOLERANCE)
    if above.any():
        reason = problem.why_above_bound(tokens[above]) if problem.why_above_bound else ""
        excess = float(chance[above][0])
        reason = reason or f"log p of the target exceeds that of the model by {excess:.6g} more than its `log_bound`"
        raise NoBoundError(
            f"{reason}: rejection would not be exact",
            remedy="declare a bound that scores never exceed or use svs+refresh",
        )
    return chance


def _check_normalised(problem: Problem, log_rest: Float[Tensor, " row"]) -> None:
    """Refuse a target that is taken for normalised though its log_prob is not the sum of its conditionals."""
    finite = log_rest[log_rest.isfinite()]
    if len(finite) and float(finite.max() - finite.min()) > NORMALISED_TOLERANCE:
        raise SamplingError(
            f"log_prob of {problem.name} is not the sum of its conditionals (it differs by {float(finite.min()):.4g} "
            f"to {float(finite.max()):.4g}), so that draws from these are not the truth",
            remedy="set `normalised = False`",
        )


def log_bound(problem: Problem) -> float:
    """An upper bound of log p of the target minus that of the model; an error if it is not finite."""
    bound = float(getattr(problem.target, "log_bound", None) or 0.0)
    if not math.isfinite(bound):
        raise NoBoundError(
            f"the target's log_bound is {bound}",
            remedy="rejection needs a finite one, or use svs+refresh",
        )
    return bound


def checked_start(problem: Problem, start: Int[Tensor, "chain n"], chains: int) -> Int[Tensor, "chain n"]:
    """The tokens that a user starts from, if there is one row of allowed tokens for each chain."""
    shape = (chains, problem.length)
    if start.shape != shape or start.dtype != torch.int64:
        raise SamplingError(
            f"start has shape {tuple(start.shape)} and type {start.dtype}",
            remedy=f"it must be int64 of shape {shape}: (chains, N)",
        )
    start, size = start.to(problem.device), len(problem.embeddings)
    bad = (start < 0) | (start >= size)
    if problem.allowed is not None:
        bad |= ~problem.allowed.to(problem.device)[start.clamp(0, size - 1)]
    if bad.any():
        chain, n = bad.nonzero()[0].tolist()
        raise SamplingError(
            f"start holds token {int(start[chain, n])} at chain {chain}, position {n}, which is not allowed or "
            f"outside the vocabulary of {size}",
            remedy="start from allowed tokens",
        )
    return start


def refuse_impossible_start(tokens: Int[Tensor, "chain n"], possible: Bool[Tensor, " chain"]) -> None:
    """Refuse tokens to start from that the target holds to be impossible."""
    for chain in (~possible).nonzero().squeeze(-1).tolist()[:1]:
        raise SamplingError(
            f"the start of chain {chain}, tokens {tokens[chain].tolist()}, has no finite energy",
            remedy="start from a state with positive probability",
        )


def forgettable_start(problem: Problem, rng: Rng, start: Start) -> Int[Tensor, "chain n"]:
    """Tokens for samplers that draw each text anew: the given ones, or the first allowed token everywhere."""
    if isinstance(start, Tensor):
        return checked_start(problem, start, len(rng))
    _check_start_word(problem, start, len(rng))
    return problem.allowed_tokens[:1].expand(len(rng), problem.length).clone()


def find_start(
    problem: Problem, rng: Rng, start: Start, guidance: Guidance
) -> tuple[Int[Tensor, "chain n"], Evaluation]:
    """The tokens the chains start from, all of finite energy, and their evaluation."""
    if isinstance(start, Tensor):
        tokens = checked_start(problem, start, len(rng))
        first = problem.evaluate(tokens, guidance)
        refuse_impossible_start(tokens, first.possible)
        return tokens, first
    _check_start_word(problem, start, len(rng))
    rng = rng.fork("start")  # retries of one chain must not shift the random numbers of another
    is_ancestral = start == "ancestral" or (start is None and problem.is_autoregressive)

    def draw(rng: Rng) -> Tensor:
        return ancestral_draw(problem, rng).tokens if is_ancestral else _random_tokens(problem, rng)

    tokens = draw(rng)
    if is_ancestral:
        _refuse_endless_model(problem, rng.fork("endings"), tokens)
    is_relaxable = problem.relaxed_target is not None and problem.is_autoregressive
    if is_relaxable:
        tokens, redraws = _follow_relaxed_target(problem, rng, tokens, RELAXED_TRIES)
    first = problem.evaluate(tokens, guidance)
    for _ in range(BLIND_TRIES):
        if first.possible.all():
            return tokens, first
        if is_relaxable:  # what the relaxed target does not lead to, blind draws will not find
            break
        failed = ~first.possible
        rows = failed.nonzero().squeeze(-1)
        row_rng = rng.select(rows)
        tokens[rows] = draw(row_rng)
        rng.catch_up(rows, row_rng)
        first = problem.evaluate_where(failed, tokens, first, guidance)
    failed = ~first.possible
    count = int(failed.sum())
    draws = f"{count * BLIND_TRIES} {'ancestral' if is_ancestral else 'random'} draws"
    if is_relaxable:
        draws = f"{count * redraws} redraws"
    reason = problem.why_impossible(tokens[failed]) if problem.why_impossible else ""
    raise NoStartError(
        f"{count} of {len(rng)} chains found no state of finite energy: none of their {draws} had one"
        f"{f' ({reason}); loosen the control, or' if reason else ';'} lengthen the text, try rejection, or give tokens "
        "to start from"
    )


def which_ended(problem: Problem, tokens: Int[Tensor, "row n"]) -> Bool[Tensor, " row"]:
    """Which of these texts end as they must; all, where they need not."""
    ended: Tensor = torch.ones_like(tokens[:, 0], dtype=torch.bool) if problem.ended is None else problem.ended(tokens)
    return ended


def count_ended(problem: Problem, tokens: Int[Tensor, "row n"]) -> int:
    """How many of these texts end as they must."""
    return int(which_ended(problem, tokens).sum())


def seconds_of_work() -> float:
    """Seconds that this process has computed, not those that it waited for others."""
    return process_time() / torch.get_num_threads()


def show_tries(found: int, wanted: int, tries: int, seconds: float, word: str = "accepted") -> None:
    """What a person who waits wants to know: how rare texts are that will do, and when there will be enough."""
    left = f", about {seconds * (wanted - found) / found:.0f} s left" if found else ""
    show_note(f"{found} of {tries:,} tries {word}{left}")


def refuse_endless(problem: Problem, tries: int, ended: int, began: float) -> None:
    """Give up on texts that must end, but hardly ever do; not before some seconds, as many tries may be cheap."""
    if tries >= ENDLESS and ended < LEAST_ENDED * tries and seconds_of_work() - began > PATIENCE:
        raise NoStartError(
            f"{ended} of {tries} texts ended within {problem.length} tokens",
            remedy=(
                "raise the length (--length on the command line), give a stop string, or take texts that need "
                "not end (--ends never)"
            ),
        )


def _refuse_endless_model(problem: Problem, rng: Rng, tokens: Int[Tensor, "row n"]) -> None:
    """Give up before more is tried in vain, if none of these texts has ended and neither do others."""
    tries, ended, began = len(tokens), count_ended(problem, tokens), seconds_of_work()
    while not ended:
        tries, ended = tries + len(rng), count_ended(problem, ancestral_draw(problem, rng).tokens)
        refuse_endless(problem, tries, ended, began)


def _check_start_word(problem: Problem, start: Start, chains: int) -> None:
    if start is not None and (not isinstance(start, str) or start not in ("random", "ancestral")):
        choices = did_you_mean(str(start), ["random", "ancestral"])
        raise SamplingError(
            f"start = {start!r} is not possible; {choices}",
            remedy=f"or an int64 tensor of shape {(chains, problem.length)}",
        )


def _random_tokens(problem: Problem, rng: Rng) -> Int[Tensor, "chain n"]:
    """Any allowed tokens; if texts end, so many of them, all numbers being equally likely, and then padding."""
    choices, length = problem.allowed_tokens, problem.length
    if problem.padding is None:
        return choices[(rng.uniform(length) * len(choices)).long()]
    choices = choices[choices != problem.padding]
    tokens = choices[(rng.uniform(length) * len(choices)).long()]
    end = (rng.uniform() * length).long()
    return tokens.masked_fill(torch.arange(length, device=tokens.device) >= end[:, None], problem.padding)


def _follow_relaxed_target(
    problem: Problem, rng: Rng, tokens: Int[Tensor, "chain n"], tries: int
) -> tuple[Int[Tensor, "chain n"], int]:
    """The tokens, with those of infinite energy replaced by the results of suffix redraws; and how many each had.

    The redraws follow a target in which an impossible text is merely improbable, so that controls are met one by one.
    It is given up sooner if no chain at all has found a start after ENDLESS redraws and PATIENCE seconds.
    """
    assert problem.relaxed_target is not None
    relaxed, tokens, began = bind(problem.relaxed_target()), tokens.clone(), seconds_of_work()
    lost = (~in_blocks(problem.target.log_prob, tokens).isfinite()).nonzero().squeeze(-1)
    log_rest = widened(torch.full((len(tokens),), -torch.inf, device=tokens.device))
    for step in range(tries):
        if not len(lost) or (len(lost) == len(tokens) and step >= ENDLESS and seconds_of_work() - began > PATIENCE):
            return tokens, step
        show_note(f"{len(tokens) - len(lost)} of {len(tokens)} starts found in {step} redraws")
        restarts = step % RESTART == 0  # a chain may be stuck where meeting one control leaves no room for another
        begin = 0 if restarts else int(Rng(rng.seed, [step], "start places").uniform()[0] * problem.length)
        levels, accept_level = rng.uniform(problem.length - begin)[lost], rng.uniform()[lost]
        new = redraw(relaxed, tokens[lost], begin, problem.length, levels)
        accepted = restarts | (accept_level.log() < new.log_rest - log_rest[lost])
        changed = lost[accepted]
        tokens[changed], log_rest[changed] = new.tokens[accepted], widened(new.log_rest[accepted])
        if len(changed):
            satisfied = changed[in_blocks(problem.target.log_prob, tokens[changed]).isfinite()]
            lost = lost[~torch.isin(lost, satisfied)]
    return tokens, tries
