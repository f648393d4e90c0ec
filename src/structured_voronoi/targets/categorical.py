"""Categorical distributions over embedded tokens, with the toy and the hypercube of the paper."""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Float
from torch import Tensor

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.targets.tabular import TabularTarget

TOY_PROBABILITIES = (0.05, 0.15, 0.3, 0.5)
"""Probabilities of the toy, which the paper does not print."""


class CategoricalTarget(TabularTarget):
    """Distribution of one token over M embedded tokens.

    Parameters
    ----------
    embeddings
        Tensor (M, d).
    log_prob
        log p of each token, up to a constant; -inf for impossible tokens.
    box
        Every coordinate of x lies in [-box, box]; required by ``base="uniform"``.
    gradient
        Steering field, one vector per token.

    Raises
    ------
    SamplingError
        If shapes do not match, or an embedding lies outside the box.

    Examples
    --------
    >>> import torch
    >>> import structured_voronoi as sv
    >>> target = sv.CategoricalTarget(torch.eye(2), torch.tensor([0.25, 0.75]).log())
    >>> target.probabilities()
    tensor([0.2500, 0.7500], dtype=torch.float64)
    """

    def __init__(
        self,
        embeddings: Float[Tensor, "token d"],
        log_prob: Float[Tensor, " token"],
        box: float | None = None,
        gradient: Float[Tensor, "token 1 d"] | None = None,
    ) -> None:
        if log_prob.ndim != 1:
            raise SamplingError(
                f"log_prob has shape {tuple(log_prob.shape)}",
                remedy="give one number per token, or use sv.TabularTarget for sequences",
            )
        super().__init__(embeddings, log_prob, gradient)
        if box is not None:
            outside = (embeddings.abs() > box).any(-1).nonzero()
            if not 0 < box < float("inf") or len(outside):
                problem = f"excludes the embedding of token {int(outside[0, 0])}" if len(outside) else "is not finite"
                raise SamplingError(
                    f"{box} {problem}",
                    argument="box",
                    remedy=f"use a box larger than the largest coordinate, {float(embeddings.abs().max()):g}",
                )
        self.box = box


def toy(temperature: float = 1.0) -> CategoricalTarget:
    """Return the toy of the paper (example 3.3): four square cells in the plane.

    Examples
    --------
    >>> toy(temperature=1.0).probabilities()
    tensor([0.0500, 0.1500, 0.3000, 0.5000], dtype=torch.float64)
    """
    corners = torch.tensor([[1.0, 1], [-1, 1], [-1, -1], [1, -1]], dtype=torch.float64)
    return CategoricalTarget(corners, torch.tensor(TOY_PROBABILITIES, dtype=torch.float64).log() / temperature, box=2.0)


def hypercube(dimensions: int, temperature: float = 0.5) -> CategoricalTarget:
    """Return the hypercube of the paper: 2^k cubic cells in R^k with probabilities ∝ 1, 2, 3, … at temperature 1.

    Examples
    --------
    >>> hypercube(1, temperature=1.0).probabilities()
    tensor([0.3333, 0.6667], dtype=torch.float64)
    """
    corners = torch.tensor(list(itertools.product([1.0, -1.0], repeat=dimensions)), dtype=torch.float64)
    weights = torch.arange(1, len(corners) + 1, dtype=torch.float64)
    return CategoricalTarget(corners, weights.log() / temperature, box=2.0)


def slopes(embeddings: Float[Tensor, "token d"], log_prob: Float[Tensor, " token"]) -> Float[Tensor, "token 1 d"]:
    """Return a steering field: the slope of log p at each embedding by least squares, weighted by nearness."""
    apart = embeddings[None] - embeddings[:, None]
    distance = apart.norm(dim=-1)
    near = distance.masked_fill(distance == 0, torch.inf).amin(-1)
    weight = (-((distance / near.median()) ** 2) / 2).exp()[..., None]
    rise = (log_prob[None] - log_prob[:, None])[..., None]
    ridge = 0.1 * near.median() ** 2 * torch.eye(embeddings.shape[1], dtype=embeddings.dtype)
    found: Tensor = torch.linalg.solve((apart * weight).mT @ apart + ridge, (apart * weight).mT @ rise)
    return found.mT
