"""The first state of every chain, and when to stop looking for one."""

from __future__ import annotations

from dataclasses import dataclass
from time import process_time

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from structured_voronoi.core.contracts import Guidance, Start
from structured_voronoi.core.errors import NoStartError, SamplingError, did_you_mean
from structured_voronoi.core.progress import show_note
from structured_voronoi.core.streams import Rng, in_blocks, widened
from structured_voronoi.problem.drawing import ancestral_draw, redraw
from structured_voronoi.problem.patterns import draw_possible
from structured_voronoi.problem.problem import Evaluation, Problem, bind


@dataclass(frozen=True)
class SearchLimits:
    """When to give up looking for a start, or for texts that end within their length."""

    draws: int = 500
    """Draws of a chain until its start has a finite energy."""
    redraws: int = 1500
    """Redraws of a chain along the relaxed target, if there is one."""
    restart_period: int = 40
    """Redraws after which a chain begins with a new text."""
    min_texts: int = 200
    """Never give up after fewer texts, or redraws of all chains without a start."""
    seconds: float = 30.0
    """Never give up after fewer seconds of computing; the limits above hold all the same."""
    min_ended_share: float = 0.01
    """The smallest share of texts that end within their length."""


SEARCH_LIMITS = SearchLimits()


def checked_start(problem: Problem, start: Int[Tensor, "chain n"], chains: int) -> Int[Tensor, "chain n"]:
    """The user's start: one row of allowed tokens for each chain, or an error."""
    shape = (chains, problem.length)
    if start.shape != shape or start.dtype != torch.int64:
        raise SamplingError(
            f"start has shape {tuple(start.shape)} and type {start.dtype}",
            remedy=f"give an int64 tensor of shape {shape}, (chains, positions)",
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
    """Raise an error if the target gives some of the user's starts probability zero."""
    for chain in (~possible).nonzero().squeeze(-1).tolist()[:1]:
        raise SamplingError(
            f"the start of chain {chain}, tokens {tokens[chain].tolist()}, has no finite energy",
            remedy="start from a state with positive probability",
        )


def placeholder_start(problem: Problem, rng: Rng, start: Start) -> Int[Tensor, "chain n"]:
    """Tokens for samplers that never read their start: the user's, or the first allowed token everywhere."""
    if isinstance(start, Tensor):
        return checked_start(problem, start, len(rng))
    _check_start_name(problem, start, len(rng))
    return problem.allowed_tokens[:1].expand(len(rng), problem.length).clone()


def find_start(
    problem: Problem, rng: Rng, start: Start, guidance: Guidance
) -> tuple[Int[Tensor, "chain n"], Evaluation]:
    """Tokens of finite energy to start from, and their evaluation.

    Parameters
    ----------
    problem
        The bound target.
    rng
        One stream per chain; searching does not advance it.
    start
        Tokens, ``"random"``, ``"ancestral"``, or None for ancestral draws where the target has them.
    guidance
        The field of the evaluation.

    Raises
    ------
    NoStartError
        If some chain finds no state of finite energy within the search limits.
    """
    if isinstance(start, Tensor):
        tokens = checked_start(problem, start, len(rng))
        first = problem.evaluate(tokens, guidance)
        refuse_impossible_start(tokens, first.possible)
        return tokens, first
    _check_start_name(problem, start, len(rng))
    rng = rng.fork("start")  # draws of the chains do not depend on how long a start was looked for
    is_ancestral = start == "ancestral" or (start is None and problem.is_autoregressive)

    def draw(rng: Rng) -> Tensor:
        return ancestral_draw(problem, rng).tokens if is_ancestral else _random_tokens(problem, rng)

    tokens = draw(rng)
    if is_ancestral:
        _check_that_texts_end(problem, rng.fork("endings"), tokens)
    draws, is_relaxable = 0, problem.relaxed_target is not None and problem.is_autoregressive
    if is_relaxable:
        tokens = _fill_by_patterns(problem, rng.fork("patterns"), tokens)
        tokens, redraws = _follow_relaxed_target(problem, rng, tokens)
    first = problem.evaluate(tokens, guidance)
    # if redraws along the relaxed target have found no start, blind draws will not
    while not first.possible.all() and draws < SEARCH_LIMITS.draws and not is_relaxable:
        failed, draws = ~first.possible, draws + 1
        rows = failed.nonzero().squeeze(-1)
        row_rng = rng.select(rows)
        tokens[rows] = draw(row_rng)
        rng.catch_up(rows, row_rng)
        first = problem.evaluate_where(failed, tokens, first, guidance)
    failed = ~first.possible
    if not failed.any():
        return tokens, first
    count, kind = int(failed.sum()), "ancestral" if is_ancestral else "random"
    tried = f"{count * redraws} redraws" if is_relaxable else f"{count * draws} {kind} draws"
    raise NoStartError(
        f"{count} of {len(rng)} chains found no state of finite energy: none of their {tried} had one",
        cause=problem.why_impossible(tokens[failed]) if problem.why_impossible else "",
        remedy="loosen the controls, lengthen the text, use rejection, or give tokens to start from",
    )


def which_ended(problem: Problem, tokens: Int[Tensor, "row n"]) -> Bool[Tensor, " row"]:
    """The texts that end within their length; all of them, if the target does not require it."""
    ended: Tensor = torch.ones_like(tokens[:, 0], dtype=torch.bool) if problem.ended is None else problem.ended(tokens)
    return ended


def cpu_seconds() -> float:
    """Seconds that this process has computed, per thread."""
    return process_time() / torch.get_num_threads()


def show_tries(found: int, wanted: int, tries: int, seconds: float, word: str = "accepted") -> None:
    """Show the share of accepted tries and the time left beside the progress bar."""
    left = f", about {seconds * (wanted - found) / found:.0f} s left" if found else ""
    show_note(f"{found} of {tries:,} tries {word}{left}")


def refuse_endless_texts(problem: Problem, texts: int, ended: int, began: float) -> None:
    """Raise an error if hardly any text ends within the length; not before some seconds, as texts may be cheap."""
    limits = SEARCH_LIMITS
    enough = texts >= limits.min_texts and cpu_seconds() - began > limits.seconds
    if enough and ended < limits.min_ended_share * texts:
        raise NoStartError(
            f"{ended} of {texts} texts ended within {problem.length} tokens",
            remedy="raise max_tokens, add a stop string, or allow texts that do not end (finish='any')",
        )


def _check_that_texts_end(problem: Problem, rng: Rng, tokens: Int[Tensor, "row n"]) -> None:
    """Draw texts until one ends, or give up."""
    texts, ended, began = len(tokens), int(which_ended(problem, tokens).sum()), cpu_seconds()
    while not ended:
        texts += len(rng)
        ended += int(which_ended(problem, ancestral_draw(problem, rng).tokens).sum())
        refuse_endless_texts(problem, texts, ended, began)


def _check_start_name(problem: Problem, start: Start, chains: int) -> None:
    if start is not None and (not isinstance(start, str) or start not in ("random", "ancestral")):
        choices = did_you_mean(str(start), ["random", "ancestral"])
        raise SamplingError(
            f"{start!r} is unknown",
            argument="start",
            remedy=f"{choices}, or an int64 tensor of shape {(chains, problem.length)}",
        )


def _random_tokens(problem: Problem, rng: Rng) -> Int[Tensor, "chain n"]:
    """Uniform allowed tokens; where texts end, a uniform number of them and then padding."""
    choices, length = problem.allowed_tokens, problem.length
    if problem.padding is None:
        return choices[(rng.uniform(length) * len(choices)).long()]
    choices = choices[choices != problem.padding]
    tokens = choices[(rng.uniform(length) * len(choices)).long()]
    end = (rng.uniform() * length).long()
    return tokens.masked_fill(torch.arange(length, device=tokens.device) >= end[:, None], problem.padding)


def _fill_by_patterns(problem: Problem, rng: Rng, tokens: Int[Tensor, "chain n"]) -> Int[Tensor, "chain n"]:
    """Replace states of infinite energy by draws in which the patterns of controls can match."""
    tokens, max_draws = tokens.clone(), 50
    if not problem.has_patterns:
        return tokens
    for _ in range(max_draws):
        lost = (~in_blocks(problem.target.log_prob, tokens).isfinite()).nonzero().squeeze(-1)
        if not len(lost):
            break
        row_rng = rng.select(lost)
        tokens[lost] = draw_possible(problem, row_rng)
        rng.catch_up(lost, row_rng)
    return tokens


def _follow_relaxed_target(
    problem: Problem, rng: Rng, tokens: Int[Tensor, "chain n"]
) -> tuple[Int[Tensor, "chain n"], int]:
    """Replace states of infinite energy by the results of suffix redraws; also returns the number of redraws.

    The redraws follow a target in which an impossible text is merely improbable, so that controls are satisfied one
    after the other.
    """
    assert problem.relaxed_target is not None
    relaxed, tokens, began, limits = bind(problem.relaxed_target()), tokens.clone(), cpu_seconds(), SEARCH_LIMITS
    lost = (~in_blocks(problem.target.log_prob, tokens).isfinite()).nonzero().squeeze(-1)
    log_rest = widened(torch.full((len(tokens),), -torch.inf, device=tokens.device))
    for step in range(limits.redraws):
        hopeless = len(lost) == len(tokens) and step >= limits.min_texts and cpu_seconds() - began > limits.seconds
        if not len(lost) or hopeless:
            return tokens, step
        show_note(f"{len(tokens) - len(lost)} of {len(tokens)} starts found in {step} redraws")
        restarts = step % limits.restart_period == 0  # one control may have left no room for another
        begin = 0 if restarts else int(Rng(rng.seed, [step], "start places").uniform()[0] * problem.length)
        levels, accept_level = rng.uniform(problem.length - begin)[lost], rng.uniform()[lost]
        new = redraw(relaxed, tokens[lost], begin, problem.length, levels)
        accepted = restarts | (accept_level.log() < new.log_rest - log_rest[lost])
        changed = lost[accepted]
        tokens[changed], log_rest[changed] = new.tokens[accepted], widened(new.log_rest[accepted])
        if len(changed):
            satisfied = changed[in_blocks(problem.target.log_prob, tokens[changed]).isfinite()]
            lost = lost[~torch.isin(lost, satisfied)]
    return tokens, limits.redraws
