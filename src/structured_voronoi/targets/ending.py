"""Where texts end: with the end-of-text token, or with the token that completes a stop string; padding follows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.streams import widened
from structured_voronoi.models.prompts import check_text

Finish = Literal["length", "stop", "any"]
"""Exactly N tokens without an end; texts that end within N tokens; texts that end or are cut at N tokens."""

ENDING = "the text ends"
"""The name of this condition among the factors of a target."""


class Ending(NamedTuple):
    """Where texts end: with the end token, or with the token that completes a stop string; what follows is padding.

    An automaton over tokens. It starts in state 0, and its last state is that of a text that is over.
    """

    tokens: tuple[int, ...]
    """Those that end a text and are no part of it; the first is the end-of-text token, which is the padding, too."""
    next: Int[Tensor, "state token"]

    @property
    def padding(self) -> int:
        return self.tokens[0]

    def advance(self, state: Int[Tensor, " row"], token: Int[Tensor, " row"]) -> Int[Tensor, " row"]:
        return self.next[state, token].long()

    def is_over(self, state: Int[Tensor, " row"]) -> Bool[Tensor, " row"]:
        return state == len(self.next) - 1

    def states(self, tokens: Int[Tensor, "row n"]) -> Int[Tensor, "row after"]:
        """The state before each of the n positions and, at last, after all of them."""
        states = [tokens.new_zeros(len(tokens))]
        for column in tokens.unbind(-1):
            states.append(self.advance(states[-1], column))
        return torch.stack(states, dim=-1)

    def over(self, tokens: Int[Tensor, "row n"]) -> Bool[Tensor, "row after"]:
        """Is the text over before each of the n positions and, at last, after all of them?"""
        return self.is_over(self.states(tokens))

    def is_text(self, tokens: Int[Tensor, "row n"], must_end: bool = True) -> Bool[Tensor, " row"]:
        """Which rows hold a text, which ends if it must, and padding after its end?"""
        over = self.over(tokens)
        is_text = (~over[:, :-1] | (tokens == self.padding)).all(-1)
        return over[:, -1] & is_text if must_end else is_text

    def automaton(self, length: int) -> Any:
        """The same, as a lookahead reads it: texts that are over match."""
        from structured_voronoi.automata.vocabulary import TokenAutomaton

        over = self.is_over(torch.arange(len(self.next), device=self.next.device))
        return TokenAutomaton(self.next, over, over, length)


def end_tokens(
    model: Any, tokenizer: Any, end: int, stop: Sequence[str | int]
) -> tuple[tuple[int, ...], list[str | int]]:
    """All tokens that end a text and are no part of it, the end-of-text token first; and the stops that are others.

    Those are special tokens: the further ones with which the model's texts end, as a model may have one for texts and
    one for turns in a conversation, and those among the stops.
    """
    added, size = tokenizer.added_tokens_decoder, len(model.get_output_embeddings().weight)
    special = {str(entry): token for token, entry in added.items() if entry.special and token < size}
    named = [special.get(one, one) if isinstance(one, str) else one for one in stop]
    also = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    known = [*(also if isinstance(also, list) else [also]), *named]
    ends = dict.fromkeys([end, *(token for token in known if token in special.values())])
    return tuple(ends), [one for one in named if one not in ends]


def make_ending(
    tokenizer: Any,
    allowed: Bool[Tensor, " token"],
    ends: tuple[int, ...],
    stop: Sequence[str | int],
    length: int,
) -> Ending:
    """Texts of allowed tokens end with an end token, or with one of the stops: a text, or the number of a token."""
    steps = torch.zeros(2, len(allowed), dtype=torch.int32)
    texts = [one for one in stop if isinstance(one, str)]
    if texts:
        from structured_voronoi.automata.vocabulary import stop_steps

        if not all(texts):
            raise SamplingError("a stop string is empty, so that every text would end at once", remedy="leave it out")
        for text in texts:
            check_text("stop", text)
        steps = torch.from_numpy(stop_steps(texts, tokenizer, allowed.tolist(), length))
    ids = [*ends, *(one for one in stop if not isinstance(one, str))]
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < len(allowed) or not allowed[token]:
            raise SamplingError(
                f"stop holds {token!r}, which is no text and no token that may be sampled",
                remedy="give texts, or the numbers of tokens",
            )
    steps[:, ids] = len(steps) - 1
    steps[-1] = len(steps) - 1
    return Ending(ends, steps.to(allowed.device))


def checked_stops(stop: str | int | Sequence[str | int]) -> tuple[str | int, ...]:
    """The texts and tokens with which texts end, one or several."""
    if isinstance(stop, str | int):
        return (stop,)
    if not isinstance(stop, Collection) or isinstance(stop, bytes):
        raise SamplingError(f"stop = {stop!r} is no text and no list of texts", remedy="write stop=['.'] for example")
    return tuple(stop)


def log_of(truth: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """0 where it holds, -inf elsewhere."""
    return widened(torch.zeros(truth.shape, device=truth.device)).masked_fill(~truth, -torch.inf)
