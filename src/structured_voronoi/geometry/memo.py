"""A memo of the states that each chain has evaluated.

The same gate is often met twice, outward and inward, and again by the next trajectory. Energy and centre are
functions of the tokens, so a state that was evaluated a moment ago need not be evaluated again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.streams import widened

EMPTY = -1


class Proposal(NamedTuple):
    """The evaluation of a proposed state; ``finite`` is False where the state is impossible or its energy is NaN."""

    potential: Float[Tensor, " row"]
    """U(m), plus log μ(C_m) for closed cells, in the widest type."""
    centre: Float[Tensor, "row n k"]
    finite: Bool[Tensor, " row"]


class Memo(NamedTuple):
    """The states each chain evaluated last, in a ring of slots.

    A remembered evaluation equals a new one, so draws do not depend on the memo.
    """

    cell: Int[Tensor, "chain slot n"]
    potential: Float[Tensor, "chain slot"]
    centre: Float[Tensor, "chain slot n k"]
    finite: Bool[Tensor, "chain slot"]
    next: Int[Tensor, " chain"]

    def copy(self) -> Memo:
        """A copy that `store` may change without changing this memo."""
        return Memo(*(part.clone() for part in self))

    def recall(self, rows: Int[Tensor, " row"], cell: Int[Tensor, "row n"]) -> tuple[Proposal, Bool[Tensor, " row"]]:
        """The remembered evaluations of these states, and which of the states were remembered."""
        same = (self.cell[rows] == cell[:, None]).all(-1)
        slots = (rows, same.long().argmax(-1))
        return Proposal(self.potential[slots], self.centre[slots], self.finite[slots]), same.any(-1)

    def store(self, rows: Int[Tensor, " row"], cell: Int[Tensor, "row n"], proposal: Proposal) -> None:
        """Write into the oldest slots, in place."""
        slots = (rows, self.next[rows])
        self.cell[slots], self.potential[slots], self.centre[slots], self.finite[slots] = cell, *proposal
        self.next[rows] = (self.next[rows] + 1) % self.cell.shape[1]


def empty_memo(slots: int, centre: Float[Tensor, "chain n k"], memory_each: int | None = None) -> Memo:
    """A memo with nothing in it, for centres of this shape; fewer slots where a chain's would exceed its memory.

    The bound is per chain, so that how much a chain remembers does not depend on the chains beside it.
    """
    chains, n, k = centre.shape
    if memory_each is not None:
        slots = max(1, min(slots, memory_each // (n * (k * centre.element_size() + 8))))
    cell = torch.full((chains, slots, n), EMPTY, device=centre.device)
    return Memo(
        cell,
        widened(centre.new_zeros(chains, slots)),
        centre.new_zeros(chains, slots, *centre.shape[1:]),
        torch.zeros_like(cell[..., 0], dtype=torch.bool),
        torch.zeros_like(cell[:, 0, 0]),
    )
