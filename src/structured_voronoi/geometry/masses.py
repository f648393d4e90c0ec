"""Masses of closed cells: μ(C_m) = Π_n P(c_n + σz ∈ C_{m_n}), z ~ N(0, I).

A mass is given for each token, or estimated with noise that is drawn once and kept. The estimate is then a
deterministic function of the state, so the chain has one fixed target, p(m) μ/μ̂, whose error shrinks with the
number of draws.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.geometry.cells import Cells, chunk_size, products

RELIABLE_COUNT = 50


class LogMass(NamedTuple):
    """log μ of the cells of each chain, and whether it rests on too few counts."""

    value: Float[Tensor, " chain"]
    unreliable: Bool[Tensor, " chain"]


class GivenMasses(NamedTuple):
    """One mass (or volume) for each cell; equal masses are all ones."""

    log: Float[Tensor, " cell"]

    def __call__(self, here: Int[Tensor, "chain n"], centre: Float[Tensor, "chain n k"]) -> LogMass:
        return LogMass(self.log[here].sum(-1), torch.zeros_like(here[:, 0], dtype=torch.bool))


class EstimatedMasses(NamedTuple):
    """Counts how many of the frozen points c + σz fall into the cell: μ̂ = (count + ½)/(S + 1)."""

    cells: Cells
    noise: Float[Tensor, "draw k"]
    """σ z of every frozen draw."""
    shifts: Float[Tensor, "draw cell"] | None
    """σ z·v for every draw and every cell, where the memory bound has room for it."""

    def __call__(self, here: Int[Tensor, "chain n"], centre: Float[Tensor, "chain n k"]) -> LogMass:
        # the mass is a function of the tokens, so chains in the same state share one count
        states, inverse = torch.unique(here, dim=0, return_inverse=True)
        some_chain = torch.zeros_like(states[:, 0]).scatter(0, inverse, torch.arange(len(here), device=here.device))
        counts = self.counts(states.flatten(), centre[some_chain].flatten(0, 1)).view(states.shape)
        mass = ((counts + 0.5) / (len(self.noise) + 1)).to(centre.dtype)
        return LogMass(mass.log().sum(-1)[inverse], (counts < RELIABLE_COUNT).any(-1)[inverse])

    def counts(self, here: Int[Tensor, " row"], centre: Float[Tensor, "row k"]) -> Int[Tensor, " row"]:
        """How many frozen points around each centre are nearest to the row's own cell."""
        draws, columns = len(self.noise), len(self.cells.table)
        depth = min(draws, chunk_size(columns * centre.element_size() * 2, self.cells.memory))
        size = chunk_size(depth * columns * centre.element_size() * 2, self.cells.memory)
        found = torch.zeros_like(here)
        for i in range(0, len(here), size):
            rows = slice(i, i + size)
            score = products(centre[rows], self.cells.table) - self.cells.half_norm
            for j in range(0, draws, depth):
                winner = (score[:, None] + self._shifts(slice(j, j + depth))).argmax(-1)
                found[rows] += (winner == here[rows, None]).sum(-1)
        return found

    def _shifts(self, draws: slice) -> Float[Tensor, "draw cell"]:
        return products(self.noise[draws], self.cells.table) if self.shifts is None else self.shifts[draws]


Masses = GivenMasses | EstimatedMasses


def estimated_masses(cells: Cells, sigma: float, noise: Float[Tensor, "draw k"]) -> EstimatedMasses:
    """Masses of cells around Gaussians of width σ, counted on the given standard normal noise."""
    noise = sigma * noise.to(cells.table.dtype)
    fits = len(noise) * len(cells.table) * noise.element_size() <= cells.memory
    return EstimatedMasses(cells, noise, products(noise, cells.table) if fits else None)
