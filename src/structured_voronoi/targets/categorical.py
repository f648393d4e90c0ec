"""One token from a categorical distribution over embedded elements: the paper's toy and hypercube."""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Float
from torch import Tensor

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.targets.tabular import TabularTarget

TOY_PROBABILITIES = (0.05, 0.15, 0.3, 0.5)
"""The paper does not print the toy's distribution; this one is ours."""


class CategoricalTarget(TabularTarget):
    """p over M elements with embeddings in R^d, inside the box [-box, box]^d if one is given.

    ``gradient`` is an optional steering field, one vector an element.

    >>> toy(temperature=1.0).probabilities()
    tensor([0.0500, 0.1500, 0.3000, 0.5000], dtype=torch.float64)
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
                remedy="one number for each element is needed, or sv.TabularTarget for sequences",
            )
        super().__init__(embeddings, log_prob, gradient)
        if box is not None:
            outside = (embeddings.abs() > box).any(-1).nonzero()
            if not 0 < box < float("inf") or len(outside):
                where = f"leaves out the embedding of token {int(outside[0, 0])}" if len(outside) else "is no size"
                raise SamplingError(
                    f"box = {box} {where}",
                    remedy=f"the largest coordinate is {float(embeddings.abs().max()):g}, choose a larger box",
                )
        self.box = box


def toy(temperature: float = 1.0) -> CategoricalTarget:
    """Four square cells in the plane (the paper's example 3.3) at a temperature."""
    corners = torch.tensor([[1.0, 1], [-1, 1], [-1, -1], [1, -1]], dtype=torch.float64)
    return CategoricalTarget(corners, torch.tensor(TOY_PROBABILITIES, dtype=torch.float64).log() / temperature, box=2.0)


def hypercube(dimensions: int, temperature: float = 0.5) -> CategoricalTarget:
    """2^k cubic cells in R^k, with probabilities ∝ 1, 2, 3, … before the temperature."""
    corners = torch.tensor(list(itertools.product([1.0, -1.0], repeat=dimensions)), dtype=torch.float64)
    weights = torch.arange(1, len(corners) + 1, dtype=torch.float64)
    return CategoricalTarget(corners, weights.log() / temperature, box=2.0)


def slopes(embeddings: Float[Tensor, "token d"], log_prob: Float[Tensor, " token"]) -> Float[Tensor, "token 1 d"]:
    """A steering field: at each embedding the slope of log p that fits the others best, near ones above all."""
    apart = embeddings[None] - embeddings[:, None]
    distance = apart.norm(dim=-1)
    near = distance.masked_fill(distance == 0, torch.inf).amin(-1)
    weight = (-((distance / near.median()) ** 2) / 2).exp()[..., None]
    rise = (log_prob[None] - log_prob[:, None])[..., None]
    ridge = 0.1 * near.median() ** 2 * torch.eye(embeddings.shape[1], dtype=embeddings.dtype)
    found: Tensor = torch.linalg.solve((apart * weight).mT @ apart + ridge, (apart * weight).mT @ rise)
    return found.mT
