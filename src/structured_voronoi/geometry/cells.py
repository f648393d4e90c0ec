"""The Voronoi cells of the allowed tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.streams import MEMORY, block_rows, in_blocks, widened


class Cells(NamedTuple):
    """The table of points that defines the cells. A cell is a row of this table.

    The table is centred on its mean: cells are invariant under translation, and float32 is more precise near the
    origin.
    """

    table: Float[Tensor, "cell k"]
    half_norm: Float[Tensor, " cell"]
    """½‖v‖²: the nearest cell is the argmax of x·v - ½‖v‖²."""
    tokens: Int[Tensor, " cell"]
    """The token of each cell."""
    cell_of: Int[Tensor, " token"]
    """The cell of each token, -1 for tokens that are not allowed."""
    origin: Float[Tensor, " d"]
    """The mean that was subtracted."""
    axes: Float[Tensor, "d k"] | None
    """Principal axes that project to the space of the table; None: all dimensions."""
    memory: int
    """Bytes that temporary tables may take."""
    pinned: int | None = None
    """The cell of padding: positions in it stay there, and no other position enters it."""

    def nearest(
        self, x: Float[Tensor, "chain n k"], here: Int[Tensor, "chain n"] | None = None
    ) -> Int[Tensor, "chain n"]:
        """m*(x): the cell of each point; points that come from the pinned cell stay in it."""
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
        """Unnormalised proposals at every position that neither leave nor enter the pinned cell."""
        if self.pinned is None:
            return log_q
        is_pinned = torch.arange(log_q.shape[-1], device=here.device) == self.pinned
        return log_q.masked_fill((here == self.pinned)[..., None] != is_pinned, -torch.inf)

    def points(self, cells: Int[Tensor, "chain n"]) -> Float[Tensor, "chain n k"]:
        """The points of the cells, in the space of the table."""
        return self.table[cells]

    def field(self, field: Float[Tensor, "chain n d"]) -> Float[Tensor, "chain n k"]:
        """A steering field, projected to the space of the table."""
        field = field.to(self.table.dtype)
        if self.axes is None:
            return field
        return products(field.flatten(0, 1), self.axes.T).view(*field.shape[:2], -1)


def products(rows: Float[Tensor, "row k"], table: Float[Tensor, "cell k"]) -> Float[Tensor, "row cell"]:
    """rows @ table.T, where the bits of a row do not depend on the other rows.

    The last bits of a product depend on the number of rows, on the alignment of a row and, for small tables on some
    processors, on the number of cells. So rows are multiplied in blocks of 8, and the sizes of rows and of small
    tables are padded to multiples of 16 bytes.
    """
    small_table = 64
    whole, cells = 16 // table.element_size(), len(table)
    wider, more = -table.shape[1] % whole, -cells % whole if cells < small_table else 0
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
    """The cells of the allowed tokens.

    Parameters
    ----------
    embeddings
        One point for each token.
    allowed
        The tokens that have a cell; None: all.
    dimensions
        Project the points to this many principal components.
    memory
        Bytes that temporary tables may take.
    padding
        The token whose cell is pinned.

    Raises
    ------
    SamplingError
        If points are not finite or not distinct, or if there are fewer than two.
    """
    embeddings = embeddings.detach()
    if embeddings.ndim != 2 or not embeddings.is_floating_point():
        raise SamplingError(
            f"the embeddings have shape {tuple(embeddings.shape)} and type {embeddings.dtype}",
            remedy="give a floating-point tensor of shape (tokens, dimensions)",
        )
    tokens = allowed_tokens(allowed, len(embeddings), embeddings.device)
    table = embeddings[tokens].to(working_dtype(embeddings))
    if not table.isfinite().all():
        token = int(tokens[(~table.isfinite()).any(-1).nonzero()[0, 0]])
        raise SamplingError(
            f"the embedding of token {token} is not finite", remedy="correct it, or exclude the token by `allowed`"
        )
    if len(tokens) < 2:
        raise SamplingError(
            f"the number of allowed tokens is {len(tokens)}", remedy="give a target with two or more tokens"
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
    """The dtype of positions and momenta: that of the embeddings, but at least float32."""
    return torch.promote_types(embeddings.dtype, torch.float32)


def spacing(cells: Cells) -> float:
    """D, the unit of ``scale``: the median distance between a token and its nearest neighbour.

    In a larger table the median is taken over at most 4,096 tokens, evenly spaced in the table.
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


def allowed_tokens(allowed: object, count: int, device: torch.device) -> Int[Tensor, " allowed"]:
    """The tokens that a mask allows, or all of ``count`` tokens; an error if the mask is wrong or excludes all."""
    if allowed is None:
        return torch.arange(count, device=device)
    if not isinstance(allowed, Tensor) or allowed.shape != (count,) or allowed.dtype != torch.bool:
        found = f"type {type(allowed).__name__}"
        if isinstance(allowed, Tensor):
            found = f"shape {tuple(allowed.shape)} and type {allowed.dtype}"
        raise SamplingError(f"`allowed` has {found}", remedy=f"give a bool tensor of shape ({count},)")
    if not allowed.any():
        raise SamplingError("`allowed` excludes every token", remedy="allow two or more")
    return allowed.to(device).nonzero().squeeze(-1)


def _principal_axes(table: Tensor, dimensions: int) -> Tensor:
    if not 1 <= dimensions <= table.shape[1]:
        raise SamplingError(
            f"{dimensions} is out of range",
            argument="dimensions",
            remedy=f"choose a number from 1 to {table.shape[1]}, the dimension of the embeddings",
        )
    covariance = widened(table).T @ widened(table)
    axes: Tensor = torch.linalg.eigh(covariance).eigenvectors.flip(-1)[:, :dimensions]
    signs = axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()  # an eigenvector's sign is arbitrary
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
        f"tokens {same[0]} and {same[1]} have identical embeddings ({len(first)} of {len(rows)} are distinct)",
        remedy="exclude all but one of them by `allowed`",
    )
