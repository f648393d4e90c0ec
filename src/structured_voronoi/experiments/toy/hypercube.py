"""The toy in more dimensions: 2^k cubic cells in R^k (the paper's figure 7), T = 0.5, 100 iterations."""

from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from structured_voronoi.base import Sampler
from structured_voronoi.experiments.chains import divergence, independent_runs, run_iterations
from structured_voronoi.experiments.report import COLOURS, new_figure, table, write_report
from structured_voronoi.experiments.toy import hmc, mucola, voronoi
from structured_voronoi.experiments.workers import side_by_side
from structured_voronoi.targets.categorical import hypercube

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIMENSIONS = range(1, 9)
ITERATIONS, TEMPERATURE = 100, 0.5
GRIDS: dict[str, list[Sampler]] = {
    "vs": [voronoi(length) for length in (2.0, 4.0)],
    "hmc": [hmc(step) for step in (0.25, 0.5, 1.0, 2.0)],
    "mucola": [mucola(step) for step in (0.5, 1.0, 2.0, 4.0, 16.0)],
}


def run(out: Path, runs: int = 256, seed: int = 0, progress: bool = True) -> list[Path]:
    """JS divergence after 100 iterations, each sampler at its paper setting and at its best step."""
    parts = side_by_side(partial(_at, runs=runs, seed=seed), DIMENSIONS, "hypercube", progress)
    rows: list[dict[str, Any]] = list(chain.from_iterable(parts))
    header = ["k", "sampler", "setting", "JS", "95 %", "evaluations", "proposals"]
    body = [
        [
            row["k"],
            row["sampler"],
            row["setting"],
            row["js_mean"],
            f"{row['js_low']:.3g} – {row['js_high']:.3g}",
            row["energy_evaluations"],
            row["proposals"],
        ]
        for row in rows
    ]
    intro = (
        f"Mean JS divergence in nats with 95 % intervals over {runs} independent runs of {ITERATIONS} iterations "
        f"from a random start, T = {TEMPERATURE}, p ∝ (1, 2, 3, …)^(1/T); seed {seed}. "
        "Evaluations and proposals are per run."
    )
    markdown = "\n\n".join(["# Hypercube: 2^k cells in R^k", intro, table(header, body), "![hypercube](hypercube.png)"])
    results = {"runs": runs, "seed": seed, "temperature": TEMPERATURE, "iterations": ITERATIONS, "rows": rows}
    return write_report(out, "hypercube", results, markdown, {"hypercube": _picture(rows)})


def _at(k: int, runs: int, seed: int) -> list[dict[str, Any]]:
    target = hypercube(k, TEMPERATURE)
    paper: dict[str, list[Sampler]] = {"vs": [voronoi(0.1)], "hmc": [hmc(0.1)], "mucola": [mucola(0.1)]}
    rows = []
    for setting, grids in (("paper", paper), ("best", GRIDS)):
        for name, grid in grids.items():
            found = []
            for sampler in grid:
                done = run_iterations(target, sampler, runs, [ITERATIONS], seed)[ITERATIONS]
                found.append(_row(k, name, setting, divergence(target, done), done.evaluations, done.events))
            rows.append(min(found, key=lambda row: float(row["js_mean"])))
    floor = divergence(target, independent_runs(target, runs, ITERATIONS, seed))
    return [*rows, _row(k, "independent", "best", floor, 0.0, 0.0)]


def _row(k: int, name: str, setting: str, js: Any, evaluations: float, proposals: float) -> dict[str, Any]:
    return {
        "k": k,
        "sampler": name,
        "setting": setting,
        "js_mean": js.mean,
        "js_low": js.low,
        "js_high": js.high,
        "energy_evaluations": evaluations,
        "proposals": proposals,
    }


def _picture(rows: list[dict[str, Any]]) -> Figure:
    figure, axes = new_figure(10, 4, ncols=2, sharey=True)
    for axis, setting in zip(axes, ("paper", "best"), strict=True):
        for name in ("vs", "hmc", "mucola", "independent"):
            chosen = [row for row in rows if row["sampler"] == name and row["setting"] == setting]
            mean = np.array([row["js_mean"] for row in chosen])
            axis.plot([row["k"] for row in chosen], mean, "o-", color=COLOURS[name], label=name, markersize=4)
        axis.set(xlabel="k: 2^k cells in R^k", yscale="log")
    axes[0].set(ylabel="JS divergence after 100 iterations (nats)", title="the paper's step: ε = 0.1")
    axes[1].set(title="each at its best step")
    axes[1].legend(frameon=False)
    return figure
