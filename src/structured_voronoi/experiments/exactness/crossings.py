"""The exact crossing finder against the paper's α grid, on the same straight trajectories through the same cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structured_voronoi.experiments.report import new_figure, table, write_report
from structured_voronoi.geometry.cells import Cells, cells_of
from structured_voronoi.geometry.memo import Proposal
from structured_voronoi.geometry.motion import CLOSED, Particle, Straight, travel
from structured_voronoi.run.progress import progress_bar

SETTINGS = ((6, 2), (20, 3), (100, 4), (100, 8))
"""(tokens, dimensions) of random embeddings."""
STEPS, ALPHAS = (0.5, 1.0, 1.5), (0.1, 0.3, 0.4)
FINE = 5_000
"""Points on a trajectory that the reference looks at."""


def run(out: Path, runs: int = 400, seed: int = 0, progress: bool = True) -> list[Path]:
    """``runs`` trajectories of one drift ε r for every setting; walls without energy, so that paths are the same."""
    rows: list[dict[str, Any]] = []
    with progress_bar(len(SETTINGS) * len(STEPS), progress, "crossings") as tick:
        for tokens, dimensions in SETTINGS:
            for step in STEPS:
                rows += _compare(tokens, dimensions, step, runs, seed)
                tick()
    header = ["M", "d", "ε", "α", "finder", "trajectories wrong", "of them with crossings", "evaluations", "as printed"]
    body = [
        [
            r["tokens"],
            r["dimensions"],
            r["step_size"],
            r["alpha"],
            r["finder"],
            r["wrong"],
            r["crossing"],
            r["evaluations"],
            r["evaluations_as_printed"],
        ]
        for r in rows
    ]
    intro = (
        f"{runs} straight trajectories ε r, r ~ N(0, I), from a point in a random cell. A trajectory is wrong if the "
        f"sequence of cells differs from that of {FINE:,} points along the path. Evaluations: one for each crossing "
        "that the exact finder meets; for the grid one for each change of cell it notices and, as the paper's "
        f"algorithm is printed, one at the end of each fraction. Seed {seed}."
    )
    markdown = "\n\n".join(
        ["# Crossings: exact or on a grid", intro, table(header, body), "![crossings](crossings.png)"]
    )
    figure, axis = new_figure(5.5, 3.8)
    for tokens, dimensions in SETTINGS:
        chosen = [r for r in rows if (r["tokens"], r["dimensions"], r["alpha"]) == (tokens, dimensions, 0.3)]
        axis.plot(
            [r["step_size"] for r in chosen],
            [r["wrong"] for r in chosen],
            "o-",
            label=f"grid, M = {tokens}, d = {dimensions}",
        )
    axis.axhline(0, color="#0b6e4f", linewidth=2, label="exact")
    axis.set(xlabel="step size ε (α = 0.3)", ylabel="share of trajectories with a wrong sequence")
    axis.legend(frameon=False, fontsize=8)
    return write_report(out, "crossings", {"runs": runs, "seed": seed, "rows": rows}, markdown, {"crossings": figure})


def _compare(tokens: int, dimensions: int, step: float, runs: int, seed: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    cells = cells_of(torch.randn(tokens, dimensions, generator=generator, dtype=torch.float64))
    x = cells.table[torch.randint(tokens, (runs,), generator=generator)]
    x = x + 0.2 * torch.randn(runs, dimensions, generator=generator, dtype=torch.float64)
    velocity = step * torch.randn(runs, dimensions, generator=generator, dtype=torch.float64)
    truth = [_visited(cells, x[i], velocity[i], FINE) for i in range(runs)]
    exact = _exact(cells, x, velocity)
    crossing = float(np.mean([len(path) > 1 for path in truth]))
    base = {"tokens": tokens, "dimensions": dimensions, "step_size": step, "crossing": crossing}
    met = sum(len(path) - 1 for path in exact) / runs
    rows = [
        {
            **base,
            "alpha": 0.0,
            "finder": "exact",
            "wrong": _share_wrong(exact, truth),
            "evaluations": met,
            "evaluations_as_printed": met,
        }
    ]
    for alpha in ALPHAS:
        fractions = int(np.ceil(1 / alpha - 1e-9))
        ends = torch.clamp(torch.arange(fractions + 1, dtype=torch.float64) * alpha, max=1)
        grid = [_sequence(cells.nearest((x[i] + ends[:, None] * velocity[i])[:, None])[:, 0]) for i in range(runs)]
        noticed = sum(len(path) - 1 for path in grid) / runs
        rows.append(
            {
                **base,
                "alpha": alpha,
                "finder": "grid",
                "wrong": _share_wrong(grid, truth),
                "evaluations": noticed,
                "evaluations_as_printed": float(fractions),
            }
        )
    return rows


def _exact(cells: Cells, x: Tensor, velocity: Tensor) -> list[list[int]]:
    """The cells that `travel` visits when every crossing is free of charge."""
    cell = cells.nearest(x[:, None])
    paths = [[int(start)] for start in cell[:, 0]]
    asked: list[Tensor] = []

    def free(proposed: Tensor) -> Proposal:
        asked.append(proposed)
        return Proposal(x.new_zeros(len(proposed)), cells.points(proposed), torch.ones(len(proposed), dtype=torch.bool))

    far = torch.full((x.shape[1],), 1e6, dtype=x.dtype)
    for i in range(len(x)):
        asked.clear()
        start = Particle(cell[i : i + 1], x[i, None, None], velocity[i, None, None], x.new_zeros(1), x[i, None, None])
        travel(cells, start, x.new_ones(1), Straight(-far, far), CLOSED, free)
        paths[i] += [int(proposed[0, 0]) for proposed in asked]
    return paths


def _visited(cells: Cells, x: Tensor, velocity: Tensor, points: int) -> list[int]:
    """The sequence of cells along the path, from many points and, where neighbours differ, from many more between."""
    times = torch.linspace(0, 1, points + 1, dtype=x.dtype)
    here = cells.nearest((x + times[:, None] * velocity)[:, None])[:, 0]
    sequence = [int(here[0])]
    for i in (here[1:] != here[:-1]).nonzero().squeeze(-1).tolist():
        between = torch.linspace(float(times[i]), float(times[i + 1]), 1001, dtype=x.dtype)
        sequence += _sequence(cells.nearest((x + between[:, None] * velocity)[:, None])[:, 0])[1:]
    return sequence


def _sequence(cells: Tensor) -> list[int]:
    """A list of cells without immediate repetitions."""
    return [int(cell) for cell in torch.unique_consecutive(cells)]


def _share_wrong(paths: list[list[int]], truth: list[list[int]]) -> float:
    return float(np.mean([path != right for path, right in zip(paths, truth, strict=True)]))
