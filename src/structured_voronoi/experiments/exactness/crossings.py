"""The exact crossing finder compared with the paper's α grid on straight trajectories through the same cells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from structured_voronoi.core.progress import progress_bar
from structured_voronoi.experiments.report import new_figure, table, write_report
from structured_voronoi.geometry.cells import Cells, cells_of
from structured_voronoi.geometry.flows import CLOSED_WALLS, Particle, Straight
from structured_voronoi.geometry.memo import Proposal
from structured_voronoi.geometry.motion import Trajectory, simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Settings:
    runs: int = 400
    """Trajectories for each set of embeddings and each step size ε; each is one drift ε r."""
    seed: int = 0
    progress: bool = True
    embeddings: tuple[tuple[int, int], ...] = ((6, 2), (20, 3), (100, 4), (100, 8))
    """(tokens, dimensions) of each set of random embeddings."""
    step_sizes: tuple[float, ...] = (0.5, 1.0, 1.5)
    alphas: tuple[float, ...] = (0.1, 0.3, 0.4)
    """Fractions α of the grid."""
    pictured_alpha: float = 0.3
    """Fraction α in the picture."""
    reference_points: int = 5_000
    """Points per trajectory in the reference."""


def run(settings: Settings, out: Path) -> list[Path]:
    """Run both finders on all trajectories, with constant energy so that the paths are straight."""
    rows: list[dict[str, Any]] = []
    with progress_bar(
        len(settings.embeddings) * len(settings.step_sizes), settings.progress, "crossings", stage="experiment"
    ) as tick:
        for tokens, dimensions in settings.embeddings:
            for step_size in settings.step_sizes:
                rows += _compare_finders(tokens, dimensions, step_size, settings)
                tick()
    results = {"runs": settings.runs, "seed": settings.seed, "rows": rows}
    return write_report(out, "crossings", results, _markdown(rows, settings), {"crossings": _picture(rows, settings)})


def _compare_finders(tokens: int, dimensions: int, step_size: float, settings: Settings) -> list[dict[str, Any]]:
    runs, generator = settings.runs, torch.Generator().manual_seed(settings.seed)
    cells = cells_of(torch.randn(tokens, dimensions, generator=generator, dtype=torch.float64))
    x = cells.table[torch.randint(tokens, (runs,), generator=generator)]
    x = x + 0.2 * torch.randn(runs, dimensions, generator=generator, dtype=torch.float64)
    velocity = step_size * torch.randn(runs, dimensions, generator=generator, dtype=torch.float64)
    truth = [_reference_path(cells, x[i], velocity[i], settings.reference_points) for i in range(runs)]
    crossing = float(np.mean([len(path) > 1 for path in truth]))
    shared = {"tokens": tokens, "dimensions": dimensions, "step_size": step_size, "crossing": crossing}
    exact = _exact_paths(cells, x, velocity)
    crossings = sum(len(path) - 1 for path in exact) / runs
    rows = [
        {
            **shared,
            "alpha": 0.0,
            "finder": "exact",
            "wrong": _share_wrong(exact, truth),
            "evaluations": crossings,
            "evaluations_as_printed": crossings,
        }
    ]
    for alpha in settings.alphas:
        fractions = int(np.ceil(1 / alpha - 1e-9))
        times = torch.clamp(torch.arange(fractions + 1, dtype=torch.float64) * alpha, max=1)
        grid = [_cells_along(cells, x[i], velocity[i], times) for i in range(runs)]
        noticed = sum(len(path) - 1 for path in grid) / runs
        rows.append(
            {
                **shared,
                "alpha": alpha,
                "finder": "grid",
                "wrong": _share_wrong(grid, truth),
                "evaluations": noticed,
                "evaluations_as_printed": float(fractions),
            }
        )
    return rows


def _exact_paths(cells: Cells, x: Tensor, velocity: Tensor) -> list[list[int]]:
    """The cells that `simulate` visits with constant energy."""
    cell = cells.nearest(x[:, None])
    paths = [[int(start)] for start in cell[:, 0]]
    proposed_cells: list[Tensor] = []

    def evaluate(proposed: Tensor) -> Proposal:
        proposed_cells.append(proposed)
        return Proposal(x.new_zeros(len(proposed)), cells.points(proposed), torch.ones(len(proposed), dtype=torch.bool))

    far = torch.full((x.shape[1],), 1e6, dtype=x.dtype)
    for i in range(len(x)):
        proposed_cells.clear()
        start = Particle(cell[i : i + 1], x[i, None, None], velocity[i, None, None], x.new_zeros(1), x[i, None, None])
        simulate(Trajectory(cells, start, x.new_ones(1), Straight(-far, far), CLOSED_WALLS, evaluate))
        paths[i] += [int(proposed[0, 0]) for proposed in proposed_cells]
    return paths


def _reference_path(cells: Cells, x: Tensor, velocity: Tensor, points: int) -> list[int]:
    """The sequence of cells along the path, on a fine grid that is refined wherever the cell changes."""
    times = torch.linspace(0, 1, points + 1, dtype=x.dtype)
    visited = cells.nearest((x + times[:, None] * velocity)[:, None])[:, 0]
    path = [int(visited[0])]
    for i in (visited[1:] != visited[:-1]).nonzero().squeeze(-1).tolist():
        between = torch.linspace(float(times[i]), float(times[i + 1]), 1001, dtype=x.dtype)
        path += _cells_along(cells, x, velocity, between)[1:]
    return path


def _cells_along(cells: Cells, x: Tensor, velocity: Tensor, times: Tensor) -> list[int]:
    """The sequence of cells at the given times, without repetitions."""
    visited = cells.nearest((x + times[:, None] * velocity)[:, None])[:, 0]
    return [int(cell) for cell in torch.unique_consecutive(visited)]


def _share_wrong(paths: list[list[int]], truth: list[list[int]]) -> float:
    return float(np.mean([path != true_path for path, true_path in zip(paths, truth, strict=True)]))


def _markdown(rows: list[dict[str, Any]], settings: Settings) -> str:
    columns = {
        "M": "tokens",
        "d": "dimensions",
        "ε": "step_size",
        "α": "alpha",
        "finder": "finder",
        "wrong trajectories": "wrong",
        "trajectories with crossings": "crossing",
        "evaluations": "evaluations",
        "evaluations as printed": "evaluations_as_printed",
    }
    intro = (
        f"{settings.runs} straight trajectories ε r, r ~ N(0, I), from a point in a random cell. A trajectory "
        f"is wrong if its sequence of cells differs from the reference with {settings.reference_points:,} points. "
        "Evaluations: one per crossing for the exact finder; one per detected change of cell for the grid. Evaluations "
        "as printed: one per fraction, as in the paper's algorithm. "
        f"Seed {settings.seed}."
    )
    body = [[row[key] for key in columns.values()] for row in rows]
    return "\n\n".join(
        ["# Crossing finders: exact and on a grid", intro, table(list(columns), body), "![crossings](crossings.png)"]
    )


def _picture(rows: list[dict[str, Any]], settings: Settings) -> Figure:
    figure, axis = new_figure(5.5, 3.8)
    for tokens, dimensions in settings.embeddings:
        shown = [
            row
            for row in rows
            if (row["tokens"], row["dimensions"], row["alpha"]) == (tokens, dimensions, settings.pictured_alpha)
        ]
        step_sizes, wrong = [row["step_size"] for row in shown], [row["wrong"] for row in shown]
        axis.plot(step_sizes, wrong, "o-", label=f"grid, M = {tokens}, d = {dimensions}")
    axis.axhline(0, color="#0b6e4f", linewidth=2, label="exact")
    axis.set(xlabel=f"step size ε (α = {settings.pictured_alpha})", ylabel="share of wrong trajectories")
    axis.legend(frameon=False, fontsize=8)
    return figure
