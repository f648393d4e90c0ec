"""Small targets whose states can be listed."""

from __future__ import annotations

import torch
from torch import Tensor

from structured_voronoi.core.contracts import Enumerable
from structured_voronoi.targets.categorical import toy
from structured_voronoi.targets.potts import PottsTarget
from structured_voronoi.targets.tabular import AutoregressiveTable, TabularTarget


def random_target(
    seed: int,
    tokens: int = 6,
    length: int = 2,
    dimensions: int = 3,
    field_sd: float = 0.2,
    dtype: torch.dtype = torch.float64,
) -> TabularTarget:
    """Return a target with random embeddings, a random table and a random steering field.

    Parameters
    ----------
    seed
        Seed of the random numbers.
    tokens, length, dimensions
        M, N and d.
    field_sd
        Standard deviation of the field. With the default, most chains move.
    dtype
        Type of all tensors.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> sv.verify.random_target(seed=0, tokens=3, length=2).probabilities().shape
    torch.Size([9])
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    embeddings, log_prob = normal(tokens, dimensions), normal(*(tokens,) * length)
    field = field_sd * normal(*(tokens,) * length, length, dimensions)
    return TabularTarget(embeddings.to(dtype), log_prob.to(dtype), field.to(dtype))


def sentences(controlled: bool) -> AutoregressiveTable:
    """Return an autoregressive target of three positions over five tokens.

    Parameters
    ----------
    controlled
        Whether log p includes scores, as with controls.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> sv.verify.sentences(controlled=True).normalised
    False
    """
    random, other = random_target(1, 5, 3, 3, 0.2), random_target(2, 5, 3, 3, 0.2)
    table = 2 * random.table - (2 * random.table).logsumexp((0, 1, 2))
    return AutoregressiveTable(random.embeddings, table, random.gradient, -other.table.abs() if controlled else None)


def known_targets() -> dict[str, Enumerable]:
    """Return the targets of `svs verify` by name.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> sorted(sv.verify.known_targets())
    ['controlled', 'pairs', 'potts', 'sentences', 'toy', 'triples']
    """
    return {
        "pairs": random_target(0, 6, 2, 3, 0.2),
        "triples": random_target(3, 5, 3, 4, 0.2),
        "potts": PottsTarget(side=2, states=3, coupling=0.5),
        "toy": toy(0.5),
        "sentences": sentences(controlled=False),
        "controlled": sentences(controlled=True),
    }
