"""Masses of closed cells: μ(C_m) = Π_n P(c_n + σz ∈ C_{m_n}), z ~ N(0, I).

Masses are given, or estimated with noise that is drawn once and reused. The estimate μ̂ is then a deterministic function
of the state, so that the chain has the fixed target p(m) μ/μ̂, whose error decreases with the number of draws.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.streams import block_rows
from structured_voronoi.geometry.cells import Cells, products


class LogMass(NamedTuple):
    """log μ of the cells of each chain."""

    value: Float[Tensor, " chain"]
    unreliable: Bool[Tensor, " chain"]
    """Estimated from too few counts at some position."""


class GivenMasses(NamedTuple):
    """One mass (or volume) for each cell."""

    log: Float[Tensor, " cell"]

    def __call__(self, here: Int[Tensor, "chain n"], centre: Float[Tensor, "chain n k"]) -> LogMass:
        return LogMass(self.log[here].sum(-1), torch.zeros_like(here[:, 0], dtype=torch.bool))


class EstimatedMasses(NamedTuple):
    """μ̂ = (count + ½)/(S + 1), where the count is of the S points c + σz that fall into the cell."""

    cells: Cells
    noise: Float[Tensor, "draw k"]
    """σ z of every draw."""
    shifts: Float[Tensor, "draw cell"] | None
    """σ z·v of every draw and cell; None if the memory bound is too small."""
    reliable_count: int = 50

    def __call__(self, here: Int[Tensor, "chain n"], centre: Float[Tensor, "chain n k"]) -> LogMass:
        # the mass of a position depends on its cell and centre only: count each distinct pair once
        keys = torch.cat([here.flatten()[:, None].to(centre.dtype), centre.flatten(0, 1)], dim=-1)
        _, inverse = torch.unique(keys, dim=0, return_inverse=True)
        rows = torch.zeros(int(inverse.max()) + 1, dtype=torch.int64, device=here.device)
        rows = rows.scatter(0, inverse, torch.arange(len(inverse), device=here.device))
        counts = self.counts(here.flatten()[rows], centre.flatten(0, 1)[rows])[inverse].view(here.shape)
        mass = ((counts + 0.5) / (len(self.noise) + 1)).to(centre.dtype)
        return LogMass(mass.log().sum(-1), (counts < self.reliable_count).any(-1))

    def counts(self, here: Int[Tensor, " row"], centre: Float[Tensor, "row k"]) -> Int[Tensor, " row"]:
        """How many points around each centre are nearest to the row's cell.

        Products with the table are computed once for each group of rows and each group of draws that fits into memory.
        """
        bytes_each, quarter = len(self.cells.table) * centre.element_size(), self.cells.memory // 4
        height, depth = block_rows(bytes_each, quarter), block_rows(bytes_each, quarter)
        counted = torch.zeros_like(here)
        for i in range(0, len(here), height):
            score = products(centre[i : i + height], self.cells.table) - self.cells.half_norm
            for j in range(0, len(self.noise), depth):
                shifts = self._shifts(slice(j, j + depth))
                size = block_rows(2 * bytes_each * len(shifts), 2 * quarter)
                for k in range(0, len(score), size):
                    rows = slice(i + k, i + min(k + size, len(score)))
                    winner = (score[k : k + size, None] + shifts).argmax(-1)
                    counted[rows] += (winner == here[rows, None]).sum(-1)
        return counted

    def _shifts(self, draws: slice) -> Float[Tensor, "draw cell"]:
        return products(self.noise[draws], self.cells.table) if self.shifts is None else self.shifts[draws]


Masses = GivenMasses | EstimatedMasses


def estimated_masses(cells: Cells, sigma: float, noise: Float[Tensor, "draw k"]) -> EstimatedMasses:
    """Masses of cells under Gaussians of standard deviation σ, estimated on standard normal noise."""
    noise = sigma * noise.to(cells.table.dtype)
    fits = len(noise) * len(cells.table) * noise.element_size() <= cells.memory
    return EstimatedMasses(cells, noise, products(noise, cells.table) if fits else None)
