"""Rows of tokens that a language model continues token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.streams import BLOCK

if TYPE_CHECKING:
    from structured_voronoi.targets.text import TextTarget


class Growing:
    """Rows that grow token by token, with their keys and values kept.

    Rows that are over need the model no longer: they leave its batch in whole blocks of 8, which keeps the last bits of
    the others, and the model rests when all are over.
    """

    def __init__(self, lm: TextTarget, tokens: Int[Tensor, "row n"]) -> None:
        self.lm, self.cache = lm, lm.prompt_cache(len(tokens))
        self.rows = torch.arange(len(tokens), device=tokens.device)
        """Those in the model's batch."""
        self.ids = torch.cat([lm.before[:, -1:].expand(len(tokens), -1), tokens], dim=-1)
        """What the model has not read yet."""
        self.state = torch.zeros_like(self.rows) if lm.ending is None else lm.ending.states(tokens)[:, -1]
        self.hidden = lm.embeddings.new_zeros(len(tokens), lm.embeddings.shape[1])

    @property
    def is_over(self) -> Bool[Tensor, " row"]:
        if self.lm.ending is None:
            return torch.zeros_like(self.state, dtype=torch.bool)
        return self.lm.ending.is_over(self.state)

    def predict(self) -> tuple[Float[Tensor, "row token"], Float[Tensor, "row d"]]:
        """log p of every next token and the hidden state it comes from: the last one of a row that is over."""
        if self.lm.ending is None:
            hidden = self._run(self.ids)[:, -1]
            return self.lm.log_probs(hidden), hidden
        going, self.hidden = ~self.is_over, self.hidden.clone()
        scores = self.lm.certain_padding.repeat(len(going), 1)
        if going.any():
            hidden, asked = self._run(self.ids)[:, -1], going[self.rows]
            self.hidden[self.rows[asked]] = hidden[asked]
            scores[self.rows[asked]] = self.lm.log_probs(hidden)[asked]
        return scores, self.hidden

    def append(self, token: Int[Tensor, " row"], parents: Int[Tensor, " row"] | None) -> None:
        """Each row goes on with its token, or its parent does in its place."""
        if self.lm.ending is None:
            if parents is not None:
                self._select(parents)
            self.ids = token[:, None]
            return
        in_batch, place = torch.zeros_like(self.is_over), torch.zeros_like(self.state)
        in_batch[self.rows], place[self.rows] = True, torch.arange(len(self.rows), device=token.device)
        sources = torch.arange(len(token), device=token.device) if parents is None else parents
        self.state, self.hidden = self.lm.ending.advance(self.state[sources], token), self.hidden[sources]
        going = int((~self.is_over).sum())
        if not going:
            return
        order = torch.argsort(2 * self.is_over.long() + (~in_batch).long(), stable=True)
        kept = order[: going + -going % BLOCK].sort().values
        if parents is not None or not torch.equal(kept, self.rows):
            self._select(place[sources[kept]])
        self.rows, self.ids = kept, token[kept, None]

    def score(self, tokens: Int[Tensor, "row rest"]) -> tuple[Float[Tensor, "row rest"], Float[Tensor, " row"]]:
        """log p of the tokens that follow, and of what stands on the right of them; 0 for rows that are over."""
        after = self.lm.after.expand(len(tokens), -1)
        following, count = torch.cat([tokens, after], dim=-1), tokens.shape[1]
        scored = self.lm.certain_padding.new_zeros(tokens.shape)
        rest = scored.new_zeros(len(tokens))
        if following.shape[1] and not self.is_over.all():
            hidden = self._run(torch.cat([self.ids, following[self.rows, :-1]], dim=-1))
            scored[self.rows] = self.lm.gather_log_probs(hidden[:, :count], tokens[self.rows])
            right = self.lm.gather_log_probs(hidden[:, count:], after[self.rows], masked=False)
            rest[self.rows] = right.sum(-1)
        return scored, rest

    def _run(self, ids: Int[Tensor, "row position"]) -> Float[Tensor, "row position d"]:
        out = self.lm.network.base_model(input_ids=ids, past_key_values=self.cache, use_cache=True)
        self.cache = out.past_key_values
        states: Tensor = out.last_hidden_state
        return states

    def _select(self, rows: Int[Tensor, " row"]) -> None:
        """The model's batch becomes these rows of it."""
        assert self.cache is not None
        self.cache.reorder_cache(rows)
