"""The pilot of a lookahead: texts of the model, what it thought on the way, and labels of every prefix of them.

For a compiled pattern a text says more than whether it matched. Along it the model's next-token probabilities p_t are
known, so that r_t(s) = Σ_v p_t(v) r_{t+1}(δ(s, v)) can be computed backwards for every state s: the chance of success
if the future's contexts were those of this text. These labels are smooth and never all zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.lookahead.heads import LearntHead, PatternHead
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.lookahead.reading import hidden_features, log_factors
from structured_voronoi.problem.drawing import redraw_by
from structured_voronoi.problem.problem import Problem
from structured_voronoi.progress import Tick
from structured_voronoi.streams import Rng, block_rows, in_blocks, inverse_cdf, widened

ROWS = 256
"""Texts that are drawn, or labelled, at a time, so that progress is seen."""
LIKELY = 64
"""Next tokens of every prefix whose probabilities are kept, if something is learnt from scores: what is expected at the
next position is their mean."""


class Pilot(NamedTuple):
    """Texts of the model, what it thought on the way, and the labels of every prefix."""

    hidden: Float[Tensor, "text n d"]
    tokens: Int[Tensor, "text n"]
    likely: Int[Tensor, "text n some"]
    """The most probable tokens at every position."""
    chances: Float[Tensor, "text n some"]
    """Their probabilities, as if there were no others."""
    labels: dict[str, Float[Tensor, "text n output"]]


def draw_pilot(problem: Problem, lookahead: Lookahead, texts: int, seed: int, tick: Tick | None = None) -> Pilot:
    """Ancestral texts with their hidden states, block by block, so that no more probabilities are kept than fit."""
    rows = min(ROWS, block_rows(4 * problem.length * len(problem.embeddings), problem.memory))
    levels = Rng(seed, texts, "lookahead pilot", problem.device).uniform(problem.length)
    some = LIKELY if any(isinstance(head, LearntHead) for head in lookahead.heads.values()) else 0

    def draw_block(levels: Tensor) -> tuple[Tensor, ...]:
        hidden_states, probabilities, likely, chances = (list[Tensor]() for _ in range(4))

        def choose(n: int, log_probs: Tensor, hidden: Tensor | None) -> Tensor:
            hidden_states.append(hidden_features(problem, hidden, len(log_probs)))
            probabilities.append(log_probs.softmax(-1).float())
            top = probabilities[-1].topk(min(some, log_probs.shape[-1]))
            likely.append(top.indices.int())
            chances.append(top.values / top.values.sum(-1, keepdim=True))
            return inverse_cdf(log_probs, levels[:, n])

        blank = problem.allowed_tokens[:1].expand(levels.shape).clone()
        tokens, _, log_rest = redraw_by(problem, blank, 0, problem.length, choose)
        factors = log_factors(problem, tokens, widened(log_rest))
        labels = [
            _dense_labels(head, probabilities)
            if isinstance(head, PatternHead)
            else factors[name].exp().nan_to_num(0.0).clamp(max=1.0).float()[:, None, None].expand(-1, problem.length, 1)
            for name, head in lookahead.heads.items()
        ]
        if tick is not None:
            tick("texts of the model", len(tokens))
        return torch.stack(hidden_states, 1), tokens, torch.stack(likely, 1), torch.stack(chances, 1), *labels

    hidden, tokens, likely, chances, *labels = in_blocks(draw_block, levels, rows_at_a_time=rows)
    return Pilot(hidden, tokens, likely, chances, dict(zip(lookahead.heads, labels, strict=True)))


def _dense_labels(head: PatternHead, probabilities: list[Tensor]) -> Float[Tensor, "text n output"]:
    """r_{n+1} of every live state at every position n, from the end of the text backwards."""
    automaton, live = head.automaton, head.automaton.live
    following, kind = torch.unique(automaton.next, dim=1, return_inverse=True)  # tokens that do the same everywhere
    following = following[live].long()
    chance = automaton.accepting.float().expand(len(probabilities[0]), -1)  # of every state, at the end
    labels = []
    for p in reversed(probabilities):
        labels.append(chance[:, live])
        before = automaton.satisfied.float().expand_as(chance).clone()
        mass = p.new_zeros(len(p), following.shape[1]).index_add_(1, kind, p)
        before[:, live] = (mass[:, None] * chance[:, following]).sum(-1)
        chance = before
    return torch.stack(labels[::-1], dim=1)
