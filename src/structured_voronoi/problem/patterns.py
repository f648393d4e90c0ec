"""Patterns of a target as automata over its tokens: which can match, and which tokens they leave possible."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from structured_voronoi.automata.patterns import CannotCompile, compile_pattern
from structured_voronoi.automata.vocabulary import TokenAutomaton, can_all_match, token_bytes
from structured_voronoi.core.contracts import Pattern
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.streams import Rng, inverse_cdf
from structured_voronoi.problem.drawing import redraw_by
from structured_voronoi.problem.problem import Problem


def token_automaton(problem: Problem, name: str) -> TokenAutomaton | None:
    """The automaton of a factor over this vocabulary; None where it cannot be compiled.

    Raises
    ------
    SamplingError
        If no text of the target's length can match.
    """
    pattern = problem.patterns[name]
    if not isinstance(pattern, Pattern):
        made: TokenAutomaton = pattern.automaton(problem.length)
        return made
    try:
        automaton, spelt = compile_pattern(pattern), token_bytes(problem.tokenizer, len(problem.embeddings))
    except CannotCompile:
        return None
    allowed = problem.allowed
    words = spelt if allowed is None else [word if allowed[i] else b"" for i, word in enumerate(spelt)]
    compiled = TokenAutomaton.from_bytes(automaton, words, problem.length, problem.device, problem.padding)
    if not compiled.is_possible:
        limit = "" if problem.padding is None else " at most"
        raise SamplingError(
            f"no text of {problem.length} tokens{limit} can satisfy {name}",
            remedy="lengthen the text or loosen the control",
        )
    return compiled


def check_patterns(problem: Problem) -> None:
    """Raise an error if no text of the target's length can match all its patterns."""
    found = {name: token_automaton(problem, name) for name in problem.patterns}
    compiled = {name: automaton for name, automaton in found.items() if automaton is not None}
    if len(compiled) > 1 and not can_all_match(list(compiled.values()), problem.length):
        limit = "" if problem.padding is None else " at most"
        raise SamplingError(
            f"no text of {problem.length} tokens{limit} can satisfy all of {', '.join(compiled)}",
            remedy="lengthen the text or leave one out",
        )


def draw_possible(problem: Problem, rng: Rng) -> Int[Tensor, "chain n"]:
    """Texts drawn without tokens after which a pattern can no longer match, to start chains from."""
    compiled = [token_automaton(problem, name) for name in problem.patterns]
    automata = [automaton for automaton in compiled if automaton is not None]
    tokens = problem.allowed_tokens[:1].expand(len(rng), problem.length).clone()
    states = [automaton.states_after(tokens[:, :0]) for automaton in automata]
    levels = rng.uniform(problem.length)

    def choose(n: int, scores: Tensor, hidden: Tensor | None) -> Tensor:
        possible = torch.ones_like(scores, dtype=torch.bool)
        for automaton, state in zip(automata, states, strict=True):
            possible &= automaton.reachable[problem.length - n - 1][automaton.next[state].long()]
        masked = scores.masked_fill(~possible, -torch.inf)
        stuck = ~masked.isfinite().any(-1, keepdim=True)  # patterns that are possible alone but not together
        token = inverse_cdf(torch.where(stuck, scores, masked).log_softmax(-1), levels[:, n])
        states[:] = [automaton.next[state, token].long() for automaton, state in zip(automata, states, strict=True)]
        return token

    return redraw_by(problem, tokens, 0, problem.length, choose).tokens
