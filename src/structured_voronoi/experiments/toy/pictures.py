"""The pictures of the toy experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from structured_voronoi.experiments.report import COLOURS, new_figure
from structured_voronoi.geometry.cells import cells_of
from structured_voronoi.geometry.flows import CLOSED_WALLS, Particle, Straight
from structured_voronoi.geometry.memo import Proposal
from structured_voronoi.geometry.motion import Trajectory, simulate
from structured_voronoi.targets.categorical import CategoricalTarget, toy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def trajectory_picture(duration: float = 16.0, seed: int = 2) -> Figure:
    """One long exact trajectory through the cells, with its refractions and reflections."""
    target = toy(1.0)
    times = torch.linspace(0, duration, 2000, dtype=torch.float64)
    path = trajectory(target, times, seed)
    cells = cells_of(target.embeddings)
    visited = cells.nearest(path[:, None])[:, 0]
    figure, axis = new_figure(4.6, 4.6)
    for (x, y), probability in zip(target.embeddings.tolist(), target.probabilities().tolist(), strict=True):
        corner = (min(0.0, 2 * x), min(0.0, 2 * y))
        axis.add_patch(_make_square(corner, probability))
        axis.annotate(f"{probability:g}", (1.72 * x, 1.72 * y), ha="center", va="center", fontsize=13, color="#333333")
        axis.plot(x, y, "o", color="#333333", markersize=4)
    axis.plot(*path.T.tolist(), color=COLOURS["vs"], linewidth=1.4)
    changes = (visited[1:] != visited[:-1]).nonzero().squeeze(-1)
    axis.plot(
        *path[changes].T.tolist(), "o", color="white", markeredgecolor=COLOURS["vs"], markersize=6, label="refraction"
    )
    reflections = _turning_points(path)
    axis.plot(*path[reflections].T.tolist(), "s", color=COLOURS["hmc"], markersize=5, label="reflection")
    axis.plot(*path[0].tolist(), "k^", markersize=8, label="start")
    axis.set(xlim=(-2, 2), ylim=(-2, 2), aspect="equal", xlabel="$x_1$", ylabel="$x_2$")
    axis.set_title("Voronoi sampling: one trajectory", fontsize=11)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def trajectory(target: CategoricalTarget, times: torch.Tensor, seed: int) -> torch.Tensor:
    """The points of one trajectory at the given times, computed as one chain for each time from the same start."""
    cells = cells_of(target.embeddings)
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(1, 1, 2, generator=generator, dtype=torch.float64) + 0.5
    r = torch.randn(1, 1, 2, generator=generator, dtype=torch.float64)
    cell = cells.nearest(x)
    energy = -target.log_prob(cell)
    start = Particle(cell, x, r, energy, x)
    copies = Particle(*(part.expand(len(times), *part.shape[1:]) for part in start))

    def evaluate(cell: torch.Tensor) -> Proposal:
        energy = -target.log_prob(cell)
        return Proposal(energy, cells.points(cell), energy.isfinite())

    box = torch.full((2,), float(target.box or 0), dtype=torch.float64)
    end, _, _ = simulate(Trajectory(cells, copies, times, Straight(-box, box), CLOSED_WALLS, evaluate))
    return end.x[:, 0]


def _turning_points(path: torch.Tensor) -> torch.Tensor:
    """Indices at which a component of the velocity changes its sign."""
    velocity = path.diff(dim=0).sign()
    return (velocity[1:] != velocity[:-1]).any(-1).nonzero().squeeze(-1) + 1


def _make_square(corner: tuple[float, float], probability: float) -> Any:
    """A cell, darker if more probable."""
    from matplotlib.patches import Rectangle

    return Rectangle(
        corner, 2, 2, facecolor=(0.04, 0.43, 0.31, 0.06 + 0.5 * probability), edgecolor="white", linewidth=2
    )


def js_picture(rows: list[dict[str, Any]], budget: int) -> Figure:
    """JS divergence by temperature in three settings, and the target distributions."""
    figure, axes = new_figure(15, 4, ncols=4, width_ratios=(1, 1, 1, 0.8))
    titles = {
        "paper": "the paper's settings, ε = α = 0.1",
        "equal_evaluations": f"best step size, at most {budget} energy evaluations",
        "equal_proposals": f"best step size, {budget} proposals",
    }
    for axis, (setting, title) in zip(axes, titles.items(), strict=False):
        for name in ("independent", "mucola", "hmc", "vs_paper", "vs"):
            _draw_line(axis, [row for row in rows if row["setting"] == setting and row["sampler"] == name], name)
        axis.set(yscale="log", xlabel="temperature", ylabel="JS divergence (nats)")
        axis.set_title(title, fontsize=10)
    axes[0].legend(frameon=False, fontsize=8)
    for shift, temperature in ((-0.25, 0.25), (0, 1.0), (0.25, 2.0)):
        axes[3].bar(
            np.arange(4) + shift, toy(temperature).probabilities().numpy(), width=0.23, label=f"T = {temperature:g}"
        )
    axes[3].set(xlabel="element", ylabel="probability", xticks=range(4))
    axes[3].set_title("target distributions", fontsize=10)
    axes[3].legend(frameon=False, fontsize=8)
    return figure


def _draw_line(axis: Any, rows: list[dict[str, Any]], name: str) -> None:
    """Draw the JS divergence of a sampler by temperature, with its interval."""
    temperatures = [row["temperature"] for row in rows]
    axis.plot(temperatures, [row["js_mean"] for row in rows], "o-", color=COLOURS[name], label=name, markersize=4)
    low, high = [row["js_low"] for row in rows], [row["js_high"] for row in rows]
    axis.fill_between(temperatures, low, high, color=COLOURS[name], alpha=0.2)


def iterations_picture(rows: list[dict[str, Any]], counts: tuple[int, ...]) -> Figure:
    """JS divergence by temperature after each number of iterations."""
    figure, axes = new_figure(4 * len(counts), 3.6, ncols=len(counts), sharey=True, squeeze=False)
    for axis, iterations in zip(axes[0], counts, strict=True):
        for name in ("mucola", "hmc", "vs"):
            shown = [row for row in rows if row["iterations"] == iterations and row["sampler"] == name]
            _draw_line(axis, shown, name)
        axis.set(yscale="log", xlabel="temperature", title=f"{iterations} iterations")
    axes[0, 0].set_ylabel("JS divergence (nats)")
    axes[0, 0].legend(frameon=False)
    return figure


def elements_picture(elements: list[dict[str, Any]], counts: tuple[int, ...]) -> Figure:
    """The share of each element among the draws after each number of iterations, and its probability."""
    figure, axes = new_figure(4 * len(counts), 3.6, ncols=len(counts), sharey=True, squeeze=False)
    truth = next(row["share"] for row in elements if row["sampler"] == "truth")
    temperature = elements[0]["temperature"]
    for axis, iterations in zip(axes[0], counts, strict=True):
        axis.bar(np.arange(4) - 0.3, truth, width=0.18, color=COLOURS["independent"], label="truth")
        for shift, name in ((-0.1, "vs"), (0.1, "hmc"), (0.3, "mucola")):
            share = next(row["share"] for row in elements if row["sampler"] == name and row["iterations"] == iterations)
            axis.bar(np.arange(4) + shift, share, width=0.18, color=COLOURS[name], label=name)
        title = f"{iterations} iterations, T = {temperature:g}"
        axis.set(xlabel="element", xticks=range(4), title=title, yscale="log")
    axes[0, 0].set_ylabel("mean share of draws")
    axes[0, 0].legend(frameon=False, fontsize=8)
    return figure
