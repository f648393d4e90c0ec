"""The toy target in k dimensions: 2^k cubic cells in R^k (the paper's figure 7)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from structured_voronoi.experiments.report import COLOURS, new_figure, table, write_report
from structured_voronoi.experiments.toy.runs import divergence, independent_runs, run_iterations
from structured_voronoi.experiments.toy.samplers import ToySampler, hmc, mucola, voronoi
from structured_voronoi.metrics.divergence import Interval
from structured_voronoi.targets.categorical import hypercube
from structured_voronoi.workers.parallel import map_tasks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _grids() -> dict[str, dict[str, list[ToySampler]]]:
    return {
        "paper": {"vs": [voronoi(0.1)], "hmc": [hmc(0.1)], "mucola": [mucola(0.1)]},
        "best": {
            "vs": [voronoi(length) for length in (2.0, 4.0)],
            "hmc": [hmc(step) for step in (0.25, 0.5, 1.0, 2.0)],
            "mucola": [mucola(step) for step in (0.5, 1.0, 2.0, 4.0, 16.0)],
        },
    }


@dataclass(frozen=True)
class Settings:
    runs: int = 256
    """Independent runs, one chain each."""
    seed: int = 0
    progress: bool = True
    workers: int | None = None
    dimensions: tuple[int, ...] = tuple(range(1, 9))
    iterations: int = 100
    temperature: float = 0.5
    grids: dict[str, dict[str, list[ToySampler]]] = field(default_factory=_grids)
    """Samplers to try for each sampler name, with the paper's step size and for the best step size."""


def run(settings: Settings, out: Path) -> list[Path]:
    """Compute the JS divergence of each sampler, at the paper's step size and at its best one."""
    work = partial(_run_dimension, settings=settings)
    parts = map_tasks(work, settings.dimensions, "hypercube", settings.progress, settings.workers)
    rows: list[dict[str, Any]] = list(chain.from_iterable(parts))
    results = {
        "runs": settings.runs,
        "seed": settings.seed,
        "temperature": settings.temperature,
        "iterations": settings.iterations,
        "rows": rows,
    }
    return write_report(out, "hypercube", results, _markdown(results), {"hypercube": _picture(results)})


def _run_dimension(k: int, settings: Settings) -> list[dict[str, Any]]:
    target, iterations = hypercube(k, settings.temperature), settings.iterations
    rows = []
    for setting, grids in settings.grids.items():
        for name, samplers in grids.items():
            tried = []
            for sampler in samplers:
                finished = run_iterations(target, sampler, settings.runs, [iterations], settings.seed)[iterations]
                js = divergence(target, finished)
                tried.append(_row(k, name, setting, js, finished.evaluations, finished.events))
            rows.append(min(tried, key=lambda row: float(row["js_mean"])))
    floor = divergence(target, independent_runs(target, settings.runs, iterations, settings.seed))
    return [*rows, _row(k, "independent", "best", floor, 0.0, 0.0)]


def _row(k: int, name: str, setting: str, js: Interval, evaluations: float, proposals: float) -> dict[str, Any]:
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


def _markdown(results: dict[str, Any]) -> str:
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
        for row in results["rows"]
    ]
    intro = (
        f"Mean JS divergence in nats with 95 % intervals over {results['runs']} independent runs of "
        f"{results['iterations']} iterations from a random start, T = {results['temperature']}, "
        f"p ∝ (1, 2, 3, …)^(1/T); seed {results['seed']}. Evaluations and proposals are per run."
    )
    return "\n\n".join(["# Hypercube: 2^k cells in R^k", intro, table(header, body), "![hypercube](hypercube.png)"])


def _picture(results: dict[str, Any]) -> Figure:
    figure, axes = new_figure(10, 4, ncols=2, sharey=True)
    for axis, setting in zip(axes, ("paper", "best"), strict=True):
        for name in ("vs", "hmc", "mucola", "independent"):
            shown = [row for row in results["rows"] if row["sampler"] == name and row["setting"] == setting]
            mean = np.array([row["js_mean"] for row in shown])
            axis.plot([row["k"] for row in shown], mean, "o-", color=COLOURS[name], label=name, markersize=4)
        axis.set(xlabel="k: 2^k cells in R^k", yscale="log")
    ylabel = f"JS divergence after {results['iterations']} iterations (nats)"
    axes[0].set(ylabel=ylabel, title="the paper's step size, ε = 0.1")
    axes[1].set(title="best step size of each sampler")
    axes[1].legend(frameon=False)
    return figure
