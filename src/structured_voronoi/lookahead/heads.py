"""Heads: ψ of a prefix and its next token, a number from 0 to 1 for every token of the vocabulary.

A head reads the position, the hidden state that predicts the token, and the token by a few coordinates of its
embedding, so that it generalises to tokens that no training text held. A head that learns from the scores of whole
texts may also read a sum over the tokens so far.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from structured_voronoi.automata.vocabulary import TokenAutomaton
from structured_voronoi.core.streams import BLOCK

Size = Literal["position", "hidden", "token", "memory"]
"""The input of a head: the position; also the hidden state; also the next token; also the tokens so far."""
COORDINATES, MEMORY_WIDTH, MEMORY_SCALE = 64, 16, 0.3
"""Coordinates of a token; numbers by which a head remembers a token, initially its first coordinates times the scale.
"""
_KNOWN_COORDINATES: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The coordinates of every table of embeddings that is in use."""


class Reader(nn.Module):
    """Logits of ``outputs`` numbers for (hidden state, position, next token): a + u·e_v, linear in the hidden state."""

    coordinates: Tensor

    def __init__(
        self, width: int, length: int, outputs: int, coordinates: Float[Tensor, "token r"], size: Size
    ) -> None:
        super().__init__()
        self.size, self.outputs, rank = size, outputs, coordinates.shape[1]
        self.register_buffer("coordinates", coordinates)
        self.bias = nn.Parameter(torch.zeros(length, outputs))
        self.slope_bias = nn.Parameter(torch.zeros(length, outputs, rank))
        if size == "memory":
            self.memory = nn.Parameter(MEMORY_SCALE * coordinates[:, :MEMORY_WIDTH])
            width += min(MEMORY_WIDTH, rank)
        self.level = nn.Parameter(torch.zeros(outputs, width))
        self.slope = nn.Parameter(torch.zeros(outputs * rank, width))

    def begin_from(self, smaller: Reader) -> None:
        """Copy the parameters of a reader with fewer inputs."""
        self.bias.data.copy_(smaller.bias)
        self.slope_bias.data.copy_(smaller.slope_bias)
        self.level.data[:, : smaller.level.shape[1]] = smaller.level
        self.slope.data[:, : smaller.slope.shape[1]] = smaller.slope

    def parts(
        self, hidden: Float[Tensor, "row d"], position: Int[Tensor, " row"]
    ) -> tuple[Float[Tensor, "row output"], Float[Tensor, "row output r"] | None]:
        """a and u of each row; no u where the next token is not read."""
        level = nn.functional.embedding(position, self.bias)  # its gradient has the same bits on any number of threads
        if self.size == "position":
            return level, None
        level = level + nn.functional.linear(hidden, self.level)
        if self.size == "hidden":
            return level, None
        slope = nn.functional.linear(hidden, self.slope)
        slope = slope + nn.functional.embedding(position, self.slope_bias.flatten(1))
        return level, slope.view(len(hidden), *self.slope_bias.shape[1:])

    def at_token(self, hidden: Tensor, position: Tensor, token: Int[Tensor, " row"]) -> Float[Tensor, "row output"]:
        """The logits for one token of each row, for training."""
        level, slope = self.parts(hidden, position)
        if slope is None:
            return level
        tokens: Tensor = self.coordinates[token]
        return level + (slope * tokens[:, None]).sum(-1)  # many small products are slower

    def logits(
        self, level: Float[Tensor, " row"], slope: Float[Tensor, "row r"] | None, tokens: Int[Tensor, " some"] | None
    ) -> Float[Tensor, "row some"]:
        """a + u·e_v for some tokens v, or for all of them."""
        coordinates = self.coordinates if tokens is None else self.coordinates[tokens]
        if slope is None:
            return level[:, None].expand(-1, len(coordinates))
        return torch.addmm(level[:, None], slope, coordinates.T)

    def logits_at(
        self, level: Float[Tensor, " row"], slope: Float[Tensor, "row r"], tokens: Int[Tensor, "row some"]
    ) -> Float[Tensor, "row some"]:
        """a + u·e_v for some tokens v of each row."""
        if len(self.coordinates) <= tokens.shape[1] * self.coordinates.shape[1]:  # a product with all is faster
            return self.logits(level, slope, None).gather(-1, tokens)
        return level[:, None] + torch.einsum("rk,rsk->rs", slope, self.coordinates[tokens])


class PatternHead(nn.Module):
    """The head of a compiled pattern: 1 where it is matched, 0 where it no longer can be, learnt in between."""

    def __init__(self, automaton: TokenAutomaton, reader: Reader) -> None:
        super().__init__()
        self.automaton, self.reader = automaton, reader
        live = automaton.live
        self.output_of = torch.full((len(automaton.accepting),), -1, device=live.device)
        self.output_of[live] = torch.arange(len(live), device=live.device)
        usual = automaton.next.mode(0).values
        """The state that each token leads to from most states."""
        *self.usual, (self.commonest, _) = sorted(_tokens_by_state(usual), key=lambda pair: len(pair[1]))
        """The state that most tokens lead to, and for every other usual state the tokens that lead there."""
        is_other = automaton.next != usual
        self.others = {
            state: _tokens_by_state(automaton.next[state], is_other[state])
            for state in is_other.any(-1).nonzero().squeeze(-1).tolist()
        }
        """For every state, the tokens that lead elsewhere from there."""

    @cached_property
    def kinds(self) -> tuple[Int[Tensor, "state kind"], Int[Tensor, " token"]]:
        """Tokens grouped by where they lead from every state: the states after a kind, and the kind of each token."""
        following, kind = torch.unique(self.automaton.next, dim=1, return_inverse=True)
        return following, kind

    def begin(self, tokens: Int[Tensor, "row n"]) -> Int[Tensor, " row"]:
        """The automaton's state after each row of tokens."""
        return self.automaton.states_after(tokens)

    def advance(self, state: Int[Tensor, " row"], token: Int[Tensor, " row"]) -> Int[Tensor, " row"]:
        return self.automaton.next[state, token].long()

    def output_after(self, state: Int[Tensor, " row"]) -> Int[Tensor, " row"]:
        """The output of the reader for a state; -1 where the state is settled."""
        return self.output_of[state]

    def features(self, state: Int[Tensor, " row"], hidden: Float[Tensor, "row d"]) -> Float[Tensor, "row d"]:
        return hidden

    def possible(self, state: Int[Tensor, " row"], n: int, length: int) -> Bool[Tensor, "row token"] | None:
        """The tokens at position ``n`` after which the pattern can still match; None for all tokens."""
        reachable = self.automaton.reachable[length - n - 1]
        if reachable.all():
            return None
        states, rows = torch.unique(state, return_inverse=True)
        return reachable[self.automaton.next[states].long()][rows]

    def value(
        self, state: Int[Tensor, " row"], features: Float[Tensor, "row d"], n: int, length: int
    ) -> Float[Tensor, "row token"]:
        """ψ of every next token at position ``n``."""
        left, position = length - n - 1, torch.full((len(features),), n, device=features.device)
        level, slope = self.reader.parts(features, position)
        value = self._value_after(self.commonest, left, level, slope, None).contiguous()
        for target, tokens in self.usual:
            value[:, tokens] = self._value_after(target, left, level, slope, tokens)
        for present in torch.unique(state).tolist():
            rows = padded_rows((state == present).nonzero().squeeze(-1))
            slopes = None if slope is None else slope[rows]
            for target, tokens in self.others.get(present, ()):
                value[rows[:, None], tokens] = self._value_after(target, left, level[rows], slopes, tokens)
        return value

    def _value_after(
        self, target: int, left: int, level: Tensor, slope: Tensor | None, tokens: Int[Tensor, " some"] | None
    ) -> Float[Tensor, "row some"]:
        """ψ of some tokens, or of all, as if they led to this state with so many tokens left after them."""
        output = int(self.output_of[target])
        if output < 0 or not self.automaton.reachable[left, target]:
            settled = self.automaton.satisfied[target] & self.automaton.reachable[left, target]
            return settled.to(level).expand(len(level), len(self.reader.coordinates if tokens is None else tokens))
        return logistic(self.reader.logits(level[:, output], None if slope is None else slope[:, output], tokens))


def _tokens_by_state(
    following: Int[Tensor, " token"], some: Bool[Tensor, " token"] | None = None
) -> list[tuple[int, Int[Tensor, " some"]]]:
    """States, and the tokens that lead to each of them; of some tokens, or of all."""
    some = torch.ones_like(following, dtype=torch.bool) if some is None else some
    return [
        (state, (some & (following == state)).nonzero().squeeze(-1)) for state in torch.unique(following[some]).tolist()
    ]


def logistic(logits: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """σ(x), never 0. The last bits of torch's own depend on where in a tensor a number is, and so on other rows."""
    return 1 / (1 + (-logits.clamp(min=-60.0)).exp())


def padded_rows(rows: Int[Tensor, " row"]) -> Int[Tensor, " padded"]:
    """Rows with the first one repeated to a multiple of 8, so that no result depends on the number of rows."""
    return torch.cat([rows, rows[:1].expand(-len(rows) % BLOCK)])


class LearntHead(nn.Module):
    """The head of any other control, learnt from the scores of whole texts. Its state is the text so far."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.reader = reader

    def begin(self, tokens: Int[Tensor, "row n"]) -> Int[Tensor, "row n"]:
        return tokens

    def advance(self, state: Int[Tensor, "row n"], token: Int[Tensor, " row"]) -> Int[Tensor, "row n"]:
        return torch.cat([state, token[:, None]], dim=-1)

    def output_after(self, state: Int[Tensor, "row n"]) -> Int[Tensor, " row"]:
        return state.new_zeros(len(state))

    def features(self, state: Int[Tensor, "row n"], hidden: Float[Tensor, "row d"]) -> Float[Tensor, "row d"]:
        """The hidden states and, if the reader takes it, the memory of the tokens so far."""
        if self.reader.size != "memory":
            return hidden
        return torch.cat([hidden, nn.functional.embedding(state, self.reader.memory).sum(1)], dim=-1)

    def value(
        self, state: Int[Tensor, "row n"], features: Float[Tensor, "row d"], n: int, length: int
    ) -> Float[Tensor, "row token"]:
        """ψ of every next token at position ``n``."""
        position = torch.full((len(features),), n, device=features.device)
        level, slope = self.reader.parts(features, position)
        return logistic(self.reader.logits(level[:, 0], None if slope is None else slope[:, 0], None))


Head = PatternHead | LearntHead


def token_coordinates(embeddings: Float[Tensor, "token d"], rank: int = COORDINATES) -> Float[Tensor, "token r"]:
    """The first principal components of the embeddings, each of variance 1; long rows are shortened.

    Rare tokens have unusual embeddings, and what was learnt from others must not be multiplied by their length. The
    result is kept as long as the embeddings are in use.
    """
    key = rank, 0 if embeddings.is_inference() else embeddings._version
    known: dict[tuple[int, int], Tensor] = _KNOWN_COORDINATES.setdefault(embeddings, {})  # type: ignore[no-untyped-call]
    if key in known:
        return known[key]
    table = embeddings.detach().float()
    table = torch.where(table.isfinite(), table, 0)
    centred = table - table.mean(0)
    covariance = centred.double().T @ centred.double()
    axes: Tensor = torch.linalg.eigh(covariance).eigenvectors.flip(-1)[:, : min(rank, table.shape[1])]
    coordinates: Tensor = centred @ axes.float()
    coordinates = coordinates / coordinates.std(0).clamp(min=1e-6)
    known[key] = coordinates * (rank**0.5 / coordinates.norm(dim=-1, keepdim=True).clamp(min=1e-6)).clamp(max=1)
    return known[key]
