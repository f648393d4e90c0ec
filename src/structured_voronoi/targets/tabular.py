"""Any distribution over [M]^N whose table fits into memory: the truth is known, so samplers can be checked."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import SoftReading
from structured_voronoi.core.errors import SamplingError


class TabularTarget:
    """p(m) ∝ exp(table[m_1, …, m_N]); entries of -inf are impossible states.

    ``gradient`` is an optional steering field of shape (M, …, M, N, d). It need not be the gradient of anything.
    """

    def __init__(
        self,
        embeddings: Float[Tensor, "token d"],
        log_prob_table: Float[Tensor, ...],
        gradient: Float[Tensor, "... n d"] | None = None,
    ) -> None:
        m, n = len(embeddings), log_prob_table.ndim
        if n == 0:
            raise SamplingError(
                "N = 0: the table is a single number",
                remedy="give one axis of size M for each position",
            )
        if tuple(log_prob_table.shape) != (m,) * n:
            raise SamplingError(
                f"the table has shape {tuple(log_prob_table.shape)} but there are {m} embeddings",
                remedy=f"every axis must have size {m}",
            )
        if m < 2:
            raise SamplingError(f"M = {m}: there is nothing to sample", remedy="a target needs two or more tokens")
        if not embeddings.is_floating_point():
            raise SamplingError(
                f"embeddings of type {embeddings.dtype}",
                remedy="give real numbers, for example embeddings.double()",
            )
        if not embeddings.isfinite().all():
            token = int((~embeddings.isfinite()).any(-1).nonzero()[0, 0])
            raise SamplingError(
                f"the embedding of token {token} holds a NaN or infinite value",
                remedy="give finite numbers",
            )
        bad = (log_prob_table.isnan() | (log_prob_table == torch.inf)).nonzero()
        if len(bad):
            state = tuple(bad[0].tolist())
            raise SamplingError(
                f"the table holds {float(log_prob_table[state])} at {state}",
                remedy="entries must be numbers below +inf (-inf for impossible states)",
            )
        if not log_prob_table.isfinite().any():
            raise SamplingError("the table has no finite entry, so no state is possible", remedy="give at least one")
        if gradient is not None and tuple(gradient.shape) != (*log_prob_table.shape, n, embeddings.shape[1]):
            raise SamplingError(
                f"the gradient has shape {tuple(gradient.shape)}",
                remedy=(
                    f"it must be {(*log_prob_table.shape, n, embeddings.shape[1])}: a (positions, dimensions) "
                    "field for every state"
                ),
            )
        self.embeddings, self.table = embeddings, log_prob_table.to(embeddings)
        self.gradient = None if gradient is None else gradient.to(embeddings)
        self.length = n

    def log_prob(self, tokens: Int[Tensor, "chain n"]) -> Float[Tensor, " chain"]:
        return self.table[tokens.unbind(-1)]

    def log_prob_and_grad(self, tokens: Int[Tensor, "chain n"]) -> tuple[Tensor, Tensor]:
        if self.gradient is None:
            return self.log_prob(tokens), self.embeddings.new_zeros(*tokens.shape, self.embeddings.shape[1])
        return self.log_prob(tokens), self.gradient[tokens.unbind(-1)]

    def support(self) -> Int[Tensor, "state n"]:
        """Every possible state, in the table's order; with an `allowed` mask, those of allowed tokens only."""
        states = self.table.isfinite().nonzero()
        allowed = getattr(self, "allowed", None)
        return states if allowed is None else states[allowed[states].all(-1)]

    def probabilities(self) -> Float[Tensor, " state"]:
        """The exact probability of each state of the support, float64."""
        return self.log_prob(self.support()).double().softmax(0)


class AutoregressiveTable(TabularTarget):
    """A table read from left to right: it knows p(token | tokens before it), as a language model does.

    ``scores``, a table of the same shape with entries ≤ 0, weigh the texts as controls do.
    """

    def __init__(
        self,
        embeddings: Float[Tensor, "token d"],
        log_prob_table: Float[Tensor, ...],
        gradient: Float[Tensor, "... n d"] | None = None,
        scores: Float[Tensor, ...] | None = None,
    ) -> None:
        super().__init__(embeddings, log_prob_table if scores is None else log_prob_table + scores, gradient)
        self.model, self.normalised = log_prob_table.to(embeddings), scores is None
        self.scores = torch.zeros_like(self.model) if scores is None else scores.to(embeddings)

    def conditionals(self, tokens: Int[Tensor, "chain n"], start: int) -> Float[Tensor, "chain rest token"]:
        """log p(· | tokens before) at every position from ``start``, by summing the table over what follows."""
        log_probs = []
        for n in range(start, self.length):
            log_probs.append(self._marginal(n)[tokens[:, :n].unbind(-1)].expand(len(tokens), -1).log_softmax(-1))
        return torch.stack(log_probs, dim=1)

    def soft_reading(
        self, weights: Float[Tensor, "chain n candidate"], candidates: Int[Tensor, "chain n candidate"]
    ) -> SoftReading:
        """The conditionals and the score that independent draws from the mixtures would have on average."""
        rows, size = len(weights), len(self.embeddings)
        with torch.enable_grad():
            weights = weights.detach().to(self.model).requires_grad_()
            mixtures = self.model.new_zeros(rows, self.length, size).scatter_add(-1, candidates, weights)
            prefixes, log_probs = self.model.new_ones(rows, 1), []
            for n in range(self.length):
                log_probs.append((prefixes @ self._marginal(n).view(-1, size).softmax(-1)).log())
                prefixes = (prefixes[:, :, None] * mixtures[:, n, None]).flatten(1)
            log_rest = prefixes @ self.scores.flatten()
            (slope,) = torch.autograd.grad(log_rest.sum(), weights)
        return SoftReading(torch.stack(log_probs, dim=1).detach(), log_rest.detach(), slope)

    def _marginal(self, n: int) -> Float[Tensor, ...]:
        """log p of the tokens up to position ``n``, up to a constant."""
        after = tuple(range(n + 1, self.length))
        return self.model.logsumexp(after) if after else self.model
