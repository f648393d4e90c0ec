"""Distributions over sequences that are given as a table, so that the exact probabilities are known."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import SoftReading
from structured_voronoi.core.errors import SamplingError


class TabularTarget:
    """Distribution p(m) ∝ exp(table[m_1, …, m_N]) over sequences of N tokens.

    Parameters
    ----------
    embeddings
        Tensor (M, d).
    log_prob_table
        Tensor with N axes of size M; -inf for impossible states.
    gradient
        Steering field (M, …, M, N, d); any field keeps samplers exact.

    Raises
    ------
    SamplingError
        If shapes do not match, or numbers are not finite.

    Examples
    --------
    >>> import torch
    >>> import structured_voronoi as sv
    >>> target = sv.TabularTarget(torch.eye(2), torch.tensor([[0.1, 0.2], [0.3, 0.4]]).log())
    >>> target.support().tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    >>> target.probabilities()
    tensor([0.1000, 0.2000, 0.3000, 0.4000], dtype=torch.float64)
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
                remedy="give one axis of size M per position",
            )
        if tuple(log_prob_table.shape) != (m,) * n:
            raise SamplingError(
                f"the table has shape {tuple(log_prob_table.shape)} but there are {m} embeddings",
                remedy=f"give every axis size {m}",
            )
        if m < 2:
            raise SamplingError(f"M = {m}: there is nothing to sample", remedy="use two or more tokens")
        if not embeddings.is_floating_point():
            raise SamplingError(
                f"embeddings have type {embeddings.dtype}",
                remedy="use floating-point numbers, for example embeddings.double()",
            )
        if not embeddings.isfinite().all():
            token = int((~embeddings.isfinite()).any(-1).nonzero()[0, 0])
            raise SamplingError(
                f"the embedding of token {token} has a NaN or infinite value",
                remedy="use finite numbers",
            )
        bad = (log_prob_table.isnan() | (log_prob_table == torch.inf)).nonzero()
        if len(bad):
            state = tuple(bad[0].tolist())
            raise SamplingError(
                f"the table has {float(log_prob_table[state])} at {state}",
                remedy="use numbers below +inf, or -inf for impossible states",
            )
        if not log_prob_table.isfinite().any():
            raise SamplingError("the table has no finite entry, so no state is possible", remedy="give one or more")
        if gradient is not None and tuple(gradient.shape) != (*log_prob_table.shape, n, embeddings.shape[1]):
            raise SamplingError(
                f"the gradient has shape {tuple(gradient.shape)}",
                remedy=f"use shape {(*log_prob_table.shape, n, embeddings.shape[1])}: (N, d) per state",
            )
        self.embeddings, self.table = embeddings, log_prob_table.to(embeddings)
        self.gradient = None if gradient is None else gradient.to(embeddings)
        self.length = n

    def log_prob(self, tokens: Int[Tensor, "chain n"]) -> Float[Tensor, " chain"]:
        """Return the entries of the table."""
        return self.table[tokens.unbind(-1)]

    def log_prob_and_grad(self, tokens: Int[Tensor, "chain n"]) -> tuple[Tensor, Tensor]:
        """Return the entries of the table and the steering field, which is 0 if none was given."""
        if self.gradient is None:
            return self.log_prob(tokens), self.embeddings.new_zeros(*tokens.shape, self.embeddings.shape[1])
        return self.log_prob(tokens), self.gradient[tokens.unbind(-1)]

    def support(self) -> Int[Tensor, "state n"]:
        """Return every possible state of allowed tokens, in the order of the table."""
        states = self.table.isfinite().nonzero()
        allowed = getattr(self, "allowed", None)
        return states if allowed is None else states[allowed[states].all(-1)]

    def probabilities(self) -> Float[Tensor, " state"]:
        """Return the exact probability of each state of the support, as float64."""
        return self.log_prob(self.support()).double().softmax(0)


class AutoregressiveTable(TabularTarget):
    """Table with the distribution of each token given the tokens before it, like a language model.

    Parameters
    ----------
    embeddings, log_prob_table, gradient
        As for `TabularTarget`.
    scores
        Table of the same shape with entries ≤ 0, which are added to log p as the scores of controls are.

    Examples
    --------
    >>> target = AutoregressiveTable(torch.eye(2), torch.tensor([[0.1, 0.2], [0.3, 0.4]]).log())
    >>> target.conditionals(torch.tensor([[1, 0]]), start=1).exp()
    tensor([[[0.4286, 0.5714]]])
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
        """Return log p(· | previous tokens) at every position from ``start`` on, by sums over the table."""
        log_probs = []
        for n in range(start, self.length):
            log_probs.append(self._marginal(n)[tokens[:, :n].unbind(-1)].expand(len(tokens), -1).log_softmax(-1))
        return torch.stack(log_probs, dim=1)

    def soft_reading(
        self, weights: Float[Tensor, "chain n candidate"], candidates: Int[Tensor, "chain n candidate"]
    ) -> SoftReading:
        """Return the mean conditionals and the mean score of independent draws from the mixtures."""
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
        """Return log p of the tokens up to position ``n``, up to a constant."""
        after = tuple(range(n + 1, self.length))
        return self.model.logsumexp(after) if after else self.model
