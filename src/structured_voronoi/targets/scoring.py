"""Log-probabilities of rows of tokens after a prompt, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import SoftReading
from structured_voronoi.core.streams import BLOCK, block_rows, widened
from structured_voronoi.models.loading import head, hidden_states
from structured_voronoi.targets.ending import Ending, log_of


class ScoredText:
    """How a network scores rows of tokens between a prompt and a suffix.

    Logits of the whole vocabulary are held for as many positions at a time as fit into ``memory`` bytes.
    """

    network: Any
    embeddings: Float[Tensor, "token d"]
    allowed: Bool[Tensor, " token"]
    before: Int[Tensor, "row position"]
    """Tokens of the prompt: one row for all, or one for each."""
    after: Int[Tensor, " position"]
    """Tokens of the suffix."""
    ending: Ending | None
    length: int
    memory: int
    device: torch.device
    padding: int | None
    ended: Callable[[Tensor], Tensor] | None
    """Which texts are possible, where they must end."""
    input_map: Float[Tensor, "d d"] | None

    def _grad_of_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        table = self.network.get_input_embeddings()
        with torch.enable_grad():
            embeds = table(self._ids(tokens)).detach().requires_grad_()
            hidden = hidden_states(self.network, embeds=embeds)
            with torch.no_grad():
                scored, after = self._scores(tokens, hidden)
                slope = self._slope(tokens, hidden)
            (gradient,) = torch.autograd.grad(hidden, embeds, slope)
        start = self.before.shape[1]
        as_input = gradient[:, start : start + self.length]
        if self.input_map is not None:
            as_input = as_input @ self.input_map.T
        gradient = self._predicting(hidden).detach() + as_input
        return scored.sum(-1) + after, self._without_padding(gradient, tokens)

    def _without_padding(self, field: Float[Tensor, "chain n d"], tokens: Tensor) -> Float[Tensor, "chain n d"]:
        """The field where tokens may move."""
        return field if self.padding is None else field.masked_fill((tokens == self.padding)[..., None], 0)

    def soft_reading(
        self, weights: Float[Tensor, "chain n candidate"], candidates: Int[Tensor, "chain n candidate"]
    ) -> SoftReading:
        """The conditionals of texts whose tokens are mixtures, read as mixtures of embeddings.

        What stands on the right is the rest, and only its slope needs a backward pass.
        """
        parts = [
            self._soft_reading_of_rows(weights[rows], candidates[rows])
            for rows in self._row_slices(len(weights), self._graph_bytes)
        ]
        return SoftReading(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _soft_reading_of_rows(self, weights: Tensor, candidates: Tensor) -> SoftReading:
        rows, table = len(weights), self.network.get_input_embeddings()
        after = self.after.expand(rows, -1)
        with torch.set_grad_enabled(bool(len(self.after))):
            weights = weights.detach().requires_grad_(bool(len(self.after)))
            parts = [table(self.before.expand(rows, -1)), self.soft_embeds(weights, candidates), table(after)]
            hidden = hidden_states(self.network, embeds=torch.cat(parts, dim=1))
            if len(self.after):
                log_rest = self.gather_log_probs(self._predicting_after(hidden), after, masked=False).sum(-1)
                (slope,) = torch.autograd.grad(log_rest.sum(), weights)
            else:
                log_rest, slope = hidden.new_zeros(rows), torch.zeros_like(weights)
        return SoftReading(self.log_probs(self._predicting(hidden.detach())), log_rest.detach(), slope)

    def soft_embeds(
        self, weights: Float[Tensor, "chain n candidate"], candidates: Int[Tensor, "chain n candidate"]
    ) -> Float[Tensor, "chain n d"]:
        """The input embeddings of mixtures of tokens."""
        embeds: Tensor = self.network.get_input_embeddings()(candidates)
        return torch.einsum("cnk,cnkd->cnd", weights.to(embeds), embeds)

    def _ids(self, tokens: Tensor) -> Tensor:
        rows = len(tokens)
        return torch.cat([self.before.expand(rows, -1), tokens, self.after.expand(rows, -1)], dim=-1)

    def _predicting(self, hidden: Tensor) -> Tensor:
        """The hidden states from which the tokens are predicted: each one position before its token."""
        start = self.before.shape[1] - 1
        return hidden[:, start : start + self.length]

    def _predicting_after(self, hidden: Tensor) -> Tensor:
        """The hidden states from which the suffix and the end are predicted."""
        start = self.before.shape[1] + self.length - 1
        return hidden[:, start : start + len(self.after)]

    def _scores(self, tokens: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """log p of each token, and of all that stands on the right."""
        if hidden is None:
            hidden = hidden_states(self.network, self._ids(tokens))
        scored = self.gather_log_probs(self._predicting(hidden), tokens)
        if self.ending is not None:
            return self._padded(scored, tokens, 0), self._log_ended(tokens).to(scored)
        if not len(self.after):
            return scored, torch.zeros_like(scored[:, 0])
        after = self.after.expand(len(tokens), -1)
        return scored, self.gather_log_probs(self._predicting_after(hidden), after, masked=False).sum(-1)

    def _padded(self, scored: Float[Tensor, "chain rest"], tokens: Tensor, start: int) -> Float[Tensor, "chain rest"]:
        """log p of the tokens from ``start`` on, where what follows the end is certain to be padding."""
        assert self.ending is not None
        is_padding = tokens[:, start:] == self.ending.padding
        return torch.where(self.ending.over(tokens)[:, start:-1], log_of(is_padding).to(scored), scored)

    @property
    def certain_padding(self) -> Float[Tensor, " token"]:
        """log p of every token after the end."""
        is_padding = torch.zeros(len(self.embeddings), dtype=torch.bool, device=self.device)
        if self.padding is not None:
            is_padding[self.padding] = True
        return log_of(is_padding).to(torch.promote_types(self.embeddings.dtype, torch.float32))

    def gather_log_probs(self, hidden: Tensor, ids: Tensor, masked: bool = True) -> Float[Tensor, "chain position"]:
        """log p of these tokens, from the hidden states that predict them, some rows of logits at a time."""
        rows, chosen = hidden.flatten(0, 1), ids.flatten()[:, None]
        size = block_rows(4 * 4 * len(self.embeddings), self.memory)
        parts = [
            self.log_probs(rows[i : i + size], masked).gather(-1, chosen[i : i + size])
            for i in range(0, max(1, len(rows)), size)
        ]
        return torch.cat(parts).view(ids.shape)

    def _slope(self, tokens: Tensor, hidden: Tensor) -> Float[Tensor, "chain position d"]:
        """The gradient of log p(m) at the last hidden states: v_w - Σ_j p_j v_j where each token w is predicted."""
        slope, table = torch.zeros_like(hidden), self.embeddings
        size = block_rows(4 * 4 * len(self.embeddings), self.memory)
        predicted = [(self._predicting, tokens, True)]
        if len(self.after):
            predicted.append((self._predicting_after, self.after.expand(len(tokens), -1), False))
        for select, ids, masked in predicted:
            rows, chosen = select(hidden).flatten(0, 1), ids.flatten()
            parts = [
                table[chosen[i : i + size]] - self.log_probs(rows[i : i + size], masked).exp_().to(table) @ table
                for i in range(0, len(rows), size)
            ]
            pulls = torch.cat(parts).view(*ids.shape, -1)
            if self.ending is not None:
                pulls = pulls.masked_fill(self.ending.over(tokens)[:, :-1, None], 0)
            select(slope)[:] += pulls.to(slope)
        return slope

    def log_probs(self, hidden: Float[Tensor, "*position d"], masked: bool = True) -> Float[Tensor, "*position token"]:
        """log p of every token where these hidden states are the last."""
        logits = head(self.network, hidden)
        if masked:
            logits.masked_fill_(~self.allowed, -torch.inf)
        return logits.log_softmax(-1)

    def _row_slices(self, rows: int, bytes_each: int) -> list[slice]:
        """Blocks of rows that stay within the memory bound, in whole multiples of 8."""
        size = max(BLOCK, block_rows(bytes_each, self.memory))
        return [slice(i, i + size) for i in range(0, rows, size)]

    @property
    def _graph_bytes(self) -> int:
        """A rough size of one row's graph for the backward pass, which keeps every layer."""
        return self.row_bytes * int(self.network.config.get_text_config().num_hidden_layers)

    @property
    def row_bytes(self) -> int:
        """A rough size of one row on its way through the model: twenty numbers a position and dimension."""
        positions = self.before.shape[1] + self.length + len(self.after)
        return int(20 * self.network.config.get_text_config().hidden_size * positions * self.embeddings.element_size())

    def _log_ended(self, tokens: Int[Tensor, "chain n"]) -> Float[Tensor, " chain"]:
        """0 for texts that have ended if they must, -inf for others."""
        if self.ended is None:
            return widened(torch.zeros(len(tokens), device=tokens.device))
        return log_of(self.ended(tokens))
