"""What heads learn from: hidden states, probabilities and labels recorded while texts are drawn.

For a compiled pattern a text says more than whether it matched. Along the text the model's next-token probabilities p_t
are known, so that r_t(s) = Σ_v p_t(v) r_{t+1}(δ(s, v)) can be computed backwards for every state s: the probability of
success if the future contexts were those of this text. These labels are smooth and rarely zero.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.lookahead.heads import Head, LearntHead, PatternHead
from structured_voronoi.lookahead.reading import live_positions, log_factors
from structured_voronoi.problem.problem import Problem

if TYPE_CHECKING:
    from structured_voronoi.lookahead.weighing import Reading

LIKELY_TOKENS = 64
"""Next tokens of each prefix whose probabilities are recorded for heads that learn from scores."""


class Observed(NamedTuple):
    """Texts with what was recorded while they were drawn."""

    tokens: Int[Tensor, "text n"]
    hidden: Float[Tensor, "text n d"]
    """In half precision, which saves memory."""
    likely: Int[Tensor, "text n some"]
    """The most probable tokens at every position."""
    chances: Float[Tensor, "text n some"]
    """Their probabilities, normalised."""
    expected: Float[Tensor, "text n"]
    """E_p[Π_k ψ_k] at every position; 0 where heads were not used."""
    log_ratio: Float[Tensor, "text n"]
    """log p / q of every token, for the proposal q that it was drawn from."""
    outputs: Int[Tensor, "text n head"]
    """The output of each head for the state after the token; -1 where that state is settled or the text has ended."""
    factors: Float[Tensor, "text head"]
    """W of each factor."""
    live: Bool[Tensor, "text n"]
    """Positions up to the end of each text."""
    labels: tuple[Float[Tensor, "text n output"], ...]
    """For each head, the label of every output after every token."""

    @classmethod
    def of(cls, tokens: Tensor, parts: tuple[Tensor, ...]) -> Self:
        """From the tensors that `label` returns."""
        hidden, likely, chances, expected, log_ratio, outputs, factors, live, *labels = parts
        return cls(tokens, hidden, likely, chances, expected, log_ratio, outputs, factors, live, tuple(labels))

    def parts(self) -> tuple[Tensor, ...]:
        """All tensors but the tokens."""
        return (
            self.hidden,
            self.likely,
            self.chances,
            self.expected,
            self.log_ratio,
            self.outputs,
            self.factors,
            self.live,
            *self.labels,
        )

    @classmethod
    def joined(cls, several: list[Self]) -> Self:
        columns = zip(*((one.tokens, *one.parts()) for one in several), strict=True)
        tokens, *parts = (torch.cat(column) for column in columns)
        return cls.of(tokens, tuple(parts))

    def rows(self, some: Tensor | slice) -> Self:
        return type(self).of(self.tokens[some], tuple(part[some] for part in self.parts()))


def observe(
    heads: dict[str, Head],
    log_probs: Float[Tensor, "row token"],
    hidden: Float[Tensor, "row d"],
    readings: list[Reading] | None,
) -> tuple[Tensor, ...]:
    """What is recorded at one position: a tensor with a row for each text, for `label`."""
    p = log_probs.exp().float()
    some = LIKELY_TOKENS if any(isinstance(head, LearntHead) for head in heads.values()) else 0
    top = p.topk(min(some, p.shape[-1]))
    chances = top.values / top.values.sum(-1, keepdim=True).clamp(min=1e-30)
    value = p.new_zeros(()) if readings is None else math.prod(reading.value for reading in readings)
    expected = (p * value).sum(-1)
    masses = [
        p.new_zeros(len(p), head.kinds[0].shape[1]).index_add_(1, head.kinds[1], p)
        if isinstance(head, PatternHead)
        else p[:, :0]
        for head in heads.values()
    ]
    return hidden.half(), top.indices.int(), chances, expected, *masses


def label(
    problem: Problem,
    heads: dict[str, Head],
    tokens: Int[Tensor, "row n"],
    log_rest: Float[Tensor, " row"],
    log_ratio: Float[Tensor, "row n"],
    seen: list[tuple[Tensor, ...]],
    outputs: list[Int[Tensor, "row head"]],
) -> tuple[Tensor, ...]:
    """The tensors of `Observed` besides the tokens, from what was recorded at each position."""
    hidden, likely, chances, expected, *masses = (torch.stack(column, dim=1) for column in zip(*seen, strict=True))
    live = live_positions(problem, tokens)
    found = log_factors(problem, tokens, log_rest)
    factors = torch.stack([found[name].exp().nan_to_num(0.0).clamp(max=1.0) for name in heads], dim=-1).float()
    labels = [
        _dense_labels(head, mass)
        if isinstance(head, PatternHead)
        else factors[:, k, None, None].expand(-1, tokens.shape[1], 1)
        for k, (head, mass) in enumerate(zip(heads.values(), masses, strict=True))
    ]
    meant = torch.where(live[..., None], torch.stack(outputs, dim=1), -1)
    return hidden, likely, chances, expected, log_ratio.float(), meant, factors, live, *labels


def _dense_labels(head: PatternHead, masses: Float[Tensor, "text n kind"]) -> Float[Tensor, "text n output"]:
    """r_{n+1} of every live state at every position n, computed from the end of the text backwards."""
    automaton, live = head.automaton, head.automaton.live
    following = head.kinds[0][live].long()
    chance = automaton.accepting.float().expand(len(masses), -1)
    labels = []
    for mass in reversed(masses.unbind(1)):
        labels.append(chance[:, live])
        before = automaton.satisfied.float().expand_as(chance).clone()
        before[:, live] = (mass[:, None] * chance[:, following]).sum(-1)
        chance = before
    return torch.stack(labels[::-1], dim=1)
