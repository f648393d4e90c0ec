"""A cache of the states that each chain evaluated last.

A trajectory often crosses the same bisector twice, outward and inward, and the next trajectory crosses it again. Energy
and centre are functions of the tokens, so the state behind it is evaluated once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.streams import widened


class Proposal(NamedTuple):
    """The evaluation of a proposed state."""

    potential: Float[Tensor, " row"]
    """U(m), plus log μ(C_m) for closed cells, in the widest type."""
    centre: Float[Tensor, "row n k"]
    finite: Bool[Tensor, " row"]
    """False if the energy is infinite or NaN, so that the state is impossible."""


class Memo(NamedTuple):
    """The states each chain evaluated last, in a ring of slots. Draws do not depend on the number of slots."""

    cell: Int[Tensor, "chain slot n"]
    potential: Float[Tensor, "chain slot"]
    centre: Float[Tensor, "chain slot n k"]
    finite: Bool[Tensor, "chain slot"]
    next: Int[Tensor, " chain"]

    def copy(self) -> Memo:
        """A deep copy, as `store` writes in place."""
        return Memo(*(part.clone() for part in self))

    def recall(self, rows: Int[Tensor, " row"], cell: Int[Tensor, "row n"]) -> tuple[Proposal, Bool[Tensor, " row"]]:
        """The evaluations of these states, and which of the states were found."""
        same = (self.cell[rows] == cell[:, None]).all(-1)
        slots = (rows, same.long().argmax(-1))
        return Proposal(self.potential[slots], self.centre[slots], self.finite[slots]), same.any(-1)

    def store(self, rows: Int[Tensor, " row"], cell: Int[Tensor, "row n"], proposal: Proposal) -> None:
        """Overwrite the oldest slot of each row, in place."""
        slots = (rows, self.next[rows])
        self.cell[slots], self.potential[slots], self.centre[slots], self.finite[slots] = cell, *proposal
        self.next[rows] = (self.next[rows] + 1) % self.cell.shape[1]


def empty_memo(slots: int, centre: Float[Tensor, "chain n k"], memory_each: int | None = None) -> Memo:
    """An empty memo for centres of this shape, with fewer slots if a chain's would take more than its memory.

    The bound is per chain, so that evaluation counts do not depend on the number of chains.
    """
    chains, n, k = centre.shape
    if memory_each is not None:
        slots = max(1, min(slots, memory_each // (n * (k * centre.element_size() + 8))))
    cell = torch.full((chains, slots, n), -1, device=centre.device)
    return Memo(
        cell,
        widened(centre.new_zeros(chains, slots)),
        centre.new_zeros(chains, slots, *centre.shape[1:]),
        torch.zeros_like(cell[..., 0], dtype=torch.bool),
        torch.zeros_like(cell[:, 0, 0]),
    )
