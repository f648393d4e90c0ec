"""Heads: what a prefix and its next token will come to, as a number from 0 to 1 for every token of the vocabulary.

Both kinds read the hidden state that predicts the token, the position, and the token by a few coordinates of its
embedding, so that tokens which no example held are judged by their like. A learnt one may also remember what was said,
as a sum over the tokens so far, or read what its control says of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from structured_voronoi.automata.vocabulary import TokenAutomaton
from structured_voronoi.streams import BLOCK

Size = Literal["position", "hidden", "token", "said", "prefix"]
"""What a head looks at: the position alone; the hidden state, too; the next token, too; beside these the tokens so far,
or what its control says of them."""
SIZES: tuple[Size, ...] = ("position", "hidden", "token", "said", "prefix")
Read = Callable[[Int[Tensor, "row n"]], Float[Tensor, " row"]]
"""Prefixes of texts -> what a control says of them."""
RANK = 64
"""Coordinates of a token."""
SAID, SAID_SCALE = 16, 0.3
"""Numbers by which a token is remembered: its first coordinates to begin with, made as small as this."""
_COORDINATES: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Those of every table of embeddings that is still in use."""


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
        if size == "said":
            self.said = nn.Parameter(SAID_SCALE * coordinates[:, :SAID])
        width += {"said": min(SAID, rank), "prefix": 1}.get(size, 0)
        self.level = nn.Parameter(torch.zeros(outputs, width))
        self.slope = nn.Parameter(torch.zeros(outputs * rank, width))

    def begin_from(self, smaller: Reader) -> None:
        """Take over what a reader learnt that looks at less."""
        self.bias.data.copy_(smaller.bias)
        self.slope_bias.data.copy_(smaller.slope_bias)
        self.level.data[:, : smaller.level.shape[1]] = smaller.level
        self.slope.data[:, : smaller.slope.shape[1]] = smaller.slope

    def parts(
        self, hidden: Float[Tensor, "row d"], position: Int[Tensor, " row"]
    ) -> tuple[Float[Tensor, "row output"], Float[Tensor, "row output r"] | None]:
        """a and u of each row; no u where the next token is not looked at."""
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
        """The logits for one token of each row: what is trained."""
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
    """Of a compiled pattern: exactly 1 where it is met, 0 where it no longer can be, learnt in between."""

    power = 0.8
    """To which values are raised. Heads are too sure of themselves in contexts that they have hardly seen, and one text
    that they thought hopeless weighs as much as hundreds (docs/results/lookahead.md)."""
    is_readable = False

    def __init__(self, automaton: TokenAutomaton, reader: Reader) -> None:
        super().__init__()
        self.automaton, self.reader = automaton, reader
        live = automaton.live
        self.output_of = torch.full((len(automaton.accepting),), -1, device=live.device)
        self.output_of[live] = torch.arange(len(live), device=live.device)
        usual = automaton.next.mode(0).values
        """The state that each token leads to from most states: what a text ends with often decides it."""
        *self.usual, (self.commonest, _) = sorted(_tokens_by_state(usual), key=lambda pair: len(pair[1]))
        """The state that most tokens lead to, and for every other the tokens that do."""
        is_other = automaton.next != usual
        self.others = {
            state: _tokens_by_state(automaton.next[state], is_other[state])
            for state in is_other.any(-1).nonzero().squeeze(-1).tolist()
        }
        """For every state, the tokens that lead elsewhere from there."""

    def begin(self, tokens: Int[Tensor, "row n"]) -> Int[Tensor, " row"]:
        """The automaton's state after each row of tokens."""
        return self.automaton.states_after(tokens)

    def advance(self, state: Int[Tensor, " row"], token: Int[Tensor, " row"]) -> Int[Tensor, " row"]:
        return self.automaton.next[state, token].long()

    def output_after(self, state: Int[Tensor, " row"]) -> Int[Tensor, " row"]:
        """Which output of the reader tells what a state will come to; -1 where that is settled."""
        return self.output_of[state]

    def features(self, state: Int[Tensor, " row"], hidden: Float[Tensor, "row d"]) -> Float[Tensor, "row d"]:
        return hidden

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
        """ψ of some tokens, or of all, as if they led to this state, with so many tokens left after them."""
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
    """σ(x). The last bits of torch's own depend on where in a tensor a number stands, and so on the rows beside it."""
    return 1 / (1 + (-logits).exp())


def padded_rows(rows: Int[Tensor, " row"]) -> Int[Tensor, " padded"]:
    """Rows with the first one repeated to a multiple of 8, so that no row's numbers depend on how many there are."""
    return torch.cat([rows, rows[:1].expand(-len(rows) % BLOCK)])


class LearntHead(nn.Module):
    """Of anything else: learnt from texts that were scored. Its state is the text so far, which controls may read."""

    def __init__(self, reader: Reader, read: Read | None) -> None:
        super().__init__()
        self.reader, self.read = reader, read

    @property
    def power(self) -> float:
        """Most learn from scores of whole texts, which say less than the labels of patterns."""
        return 0.8 if self.reader.size == "said" else 0.6

    @property
    def is_readable(self) -> bool:
        """May the control be asked about prefixes?"""
        return self.read is not None

    def begin(self, tokens: Int[Tensor, "row n"]) -> Int[Tensor, "row n"]:
        return tokens

    def advance(self, state: Int[Tensor, "row n"], token: Int[Tensor, " row"]) -> Int[Tensor, "row n"]:
        return torch.cat([state, token[:, None]], dim=-1)

    def output_after(self, state: Int[Tensor, "row n"]) -> Int[Tensor, " row"]:
        return state.new_zeros(len(state))

    def features(self, state: Int[Tensor, "row n"], hidden: Float[Tensor, "row d"]) -> Float[Tensor, "row d"]:
        """The hidden states and, if the reader takes it, what was said so far or what the control says of it."""
        if self.reader.size == "said":
            return torch.cat([hidden, nn.functional.embedding(state, self.reader.said).sum(1)], dim=-1)
        if self.reader.size != "prefix":
            return hidden
        assert self.read is not None
        return torch.cat([hidden, self.read(state).to(hidden)[:, None]], dim=-1)

    def value(
        self, state: Int[Tensor, "row n"], features: Float[Tensor, "row d"], n: int, length: int
    ) -> Float[Tensor, "row token"]:
        """ψ of every next token at position ``n``."""
        position = torch.full((len(features),), n, device=features.device)
        level, slope = self.reader.parts(features, position)
        return logistic(self.reader.logits(level[:, 0], None if slope is None else slope[:, 0], None))


Head = PatternHead | LearntHead


def token_coordinates(embeddings: Float[Tensor, "token d"], rank: int = RANK) -> Float[Tensor, "token r"]:
    """The first principal components of the embeddings, each of variance 1; no token stands out by its length.

    Rare tokens have odd embeddings, and what was learnt from others must not be multiplied by their length. They are
    kept as long as the embeddings live.
    """
    key = rank, 0 if embeddings.is_inference() else embeddings._version
    kept: dict[tuple[int, int], Tensor] = _COORDINATES.setdefault(embeddings, {})  # type: ignore[no-untyped-call]
    if key in kept:
        return kept[key]
    table = embeddings.detach().float()
    table = torch.where(table.isfinite(), table, 0)
    centred = table - table.mean(0)
    covariance = centred.double().T @ centred.double()
    axes: Tensor = torch.linalg.eigh(covariance).eigenvectors.flip(-1)[:, : min(rank, table.shape[1])]
    coordinates: Tensor = centred @ axes.float()
    coordinates = coordinates / coordinates.std(0).clamp(min=1e-6)
    kept[key] = coordinates * (rank**0.5 / coordinates.norm(dim=-1, keepdim=True).clamp(min=1e-6)).clamp(max=1)
    return kept[key]
