"""The Voronoi cells of the allowed tokens: which cell a point lies in, and how large the cells are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.streams import MEMORY, block_rows, in_blocks, widened


class Cells(NamedTuple):
    """The table that defines the cells. Inside the geometry a token is its row in this table ("cell").

    The table is centred on its mean, because cells do not change under translation and float32 does better
    near the origin. ``axes`` projects steering fields into the table's space.
    """

    table: Float[Tensor, "cell k"]
    half_norm: Float[Tensor, " cell"]
    """½‖v‖², so that the nearest cell is the argmax of x·v - ½‖v‖²."""
    tokens: Int[Tensor, " cell"]
    """The vocabulary's token of each cell."""
    cell_of: Int[Tensor, " token"]
    """The cell of each token, -1 for tokens that are not allowed."""
    origin: Float[Tensor, " d"]
    axes: Float[Tensor, "d k"] | None
    memory: int
    pinned: int | None = None
    """The cell of padding: what is in it stays, and nothing else enters it."""

    def nearest(
        self, x: Float[Tensor, "chain n k"], here: Int[Tensor, "chain n"] | None = None
    ) -> Int[Tensor, "chain n"]:
        """m*(x): the cell of each point that came from ``here``, in blocks that respect the memory bound."""
        rows, half_norm = x.flatten(0, 1), self.half_norm
        if self.pinned is not None:
            half_norm = half_norm.index_fill(0, torch.tensor(self.pinned, device=x.device), torch.inf)
        size = block_rows(len(self.table) * x.element_size() * 2, self.memory)
        parts = [(products(rows[i : i + size], self.table) - half_norm).argmax(-1) for i in range(0, len(rows), size)]
        found = torch.cat(parts).view(x.shape[:2])
        return found if self.pinned is None or here is None else torch.where(here == self.pinned, here, found)

    def without_pinned(
        self, log_q: Float[Tensor, "chain n cell"], here: Int[Tensor, "chain n"]
    ) -> Float[Tensor, "chain n cell"]:
        """Proposals at every position that leave the pinned cell alone, not normalised."""
        if self.pinned is None:
            return log_q
        is_pinned = torch.arange(log_q.shape[-1], device=here.device) == self.pinned
        return log_q.masked_fill((here == self.pinned)[..., None] != is_pinned, -torch.inf)

    def points(self, cells: Int[Tensor, "chain n"]) -> Float[Tensor, "chain n k"]:
        """The embeddings of the cells' tokens, in the table's space."""
        return self.table[cells]

    def field(self, field: Float[Tensor, "chain n d"]) -> Float[Tensor, "chain n k"]:
        """A steering field in the table's space."""
        field = field.to(self.table.dtype)
        if self.axes is None:
            return field
        return products(field.flatten(0, 1), self.axes.T).view(*field.shape[:2], -1)


FEW = 64
"""Cells of a table that some processors multiply otherwise beside more rows."""


def products(rows: Float[Tensor, "row k"], table: Float[Tensor, "cell k"]) -> Float[Tensor, "row cell"]:
    """rows @ table.T, bit for bit the same for a row whatever rows are beside it.

    For that the rows come in whole blocks and, as a row's last bits else depend on its alignment, and on some
    processors few cells are multiplied otherwise beside more rows, k and the cells in whole 16 bytes.
    """
    whole, cells = 16 // table.element_size(), len(table)
    wider, more = -table.shape[1] % whole, -cells % whole if cells < FEW else 0
    if wider or more:
        rows, table = torch.nn.functional.pad(rows, (0, wider)), torch.nn.functional.pad(table, (0, wider, 0, more))
    product: Tensor = in_blocks(lambda block: block @ table.T, rows)
    return product[:, :cells]


def cells_of(
    embeddings: Float[Tensor, "token d"],
    allowed: Bool[Tensor, " token"] | None = None,
    dimensions: int | None = None,
    memory: int = MEMORY,
    padding: int | None = None,
) -> Cells:
    """The cells of a target's allowed tokens, in its first principal components if ``dimensions`` is given."""
    embeddings = embeddings.detach()
    if embeddings.ndim != 2 or not embeddings.is_floating_point():
        raise SamplingError(
            f"embeddings of shape {tuple(embeddings.shape)} and type {embeddings.dtype} cannot define cells",
            remedy="give a (tokens, dimensions) tensor of real numbers",
        )
    tokens = _allowed_tokens(allowed, len(embeddings), embeddings.device)
    table = embeddings[tokens].to(working_dtype(embeddings))
    if not table.isfinite().all():
        token = int(tokens[(~table.isfinite()).any(-1).nonzero()[0, 0]])
        raise SamplingError(
            f"the embedding of token {token} holds a NaN or infinite value",
            remedy="mend it or leave the token out with the target's `allowed` mask",
        )
    if len(tokens) < 2:
        raise SamplingError(
            f"M = {len(tokens)}: there is nothing to sample",
            remedy="a target needs two or more tokens",
        )
    origin = table.mean(0)
    table, axes = table - origin, None
    _refuse_duplicates(table, tokens)
    if dimensions is not None:
        axes = _principal_axes(table, dimensions)
        table = products(table, axes.T)
        _refuse_duplicates(table, tokens)
    cell_of = torch.full((len(embeddings),), -1, device=tokens.device)
    cell_of[tokens] = torch.arange(len(tokens), device=tokens.device)
    pinned = None if padding is None else int(cell_of[padding])
    return Cells(table.contiguous(), (table**2).sum(-1) / 2, tokens, cell_of, origin, axes, memory, pinned)


def working_dtype(embeddings: Tensor) -> torch.dtype:
    """The precision of the motion: that of the embeddings, but at least float32."""
    return torch.promote_types(embeddings.dtype, torch.float32)


def spacing(cells: Cells) -> float:
    """D: the median distance between a token and its nearest neighbour, the unit of `scale`.

    Above 4,096 tokens the median is over at most 4,096 of them, evenly spaced in the table.
    """
    stride = -(-len(cells.table) // 4096)
    rows = cells.table[::stride]
    size = block_rows(len(cells.table) * 8 * 2, cells.memory)
    nearest, table = [], widened(cells.table)
    for i in range(0, len(rows), size):
        gaps = torch.cdist(widened(rows[i : i + size]), table)
        indices = torch.arange(i, min(i + size, len(rows)), device=gaps.device)
        gaps[indices - i, indices * stride] = torch.inf
        nearest.append(gaps.amin(-1))
    return float(torch.cat(nearest).median())


def _allowed_tokens(allowed: Tensor | None, count: int, device: torch.device) -> Tensor:
    if allowed is None:
        return torch.arange(count, device=device)
    if allowed.shape != (count,) or allowed.dtype != torch.bool:
        raise SamplingError(
            f"`allowed` has shape {tuple(allowed.shape)} and type {allowed.dtype}",
            remedy=f"it must be a bool tensor of shape ({count},)",
        )
    return allowed.to(device).nonzero().squeeze(-1)


def _principal_axes(table: Tensor, dimensions: int) -> Tensor:
    if not 1 <= dimensions <= table.shape[1]:
        raise SamplingError(
            f"dimensions = {dimensions}: the embeddings have {table.shape[1]}",
            remedy="choose from 1 to that",
        )
    covariance = widened(table).T @ widened(table)
    axes: Tensor = torch.linalg.eigh(covariance).eigenvectors.flip(-1)[:, :dimensions]
    signs = axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()  # an eigenvector's sign is arbitrary: fix it
    return (axes * signs).to(table.dtype)


def _refuse_duplicates(table: Tensor, tokens: Tensor) -> None:
    rows = np.ascontiguousarray((table + 0.0).cpu().numpy())
    as_bytes = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()
    _, first, inverse, counts = np.unique(as_bytes, return_index=True, return_inverse=True, return_counts=True)
    if (counts == 1).all():
        return
    group = int(np.argmax(counts > 1))
    same = [int(tokens[i]) for i in np.flatnonzero(inverse == group)[:2]]
    raise SamplingError(
        f"tokens {same[0]} and {same[1]} have identical embeddings ({len(first)} of {len(rows)} are distinct), so "
        "their cells coincide",
        remedy="leave all but one out with the target's `allowed` mask",
    )
