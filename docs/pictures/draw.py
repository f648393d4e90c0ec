"""Draw the pictures of docs/method.md with the package's own code: `python docs/pictures/draw.py [NAME …]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor

import structured_voronoi as sv
from structured_voronoi.core.streams import Rng
from structured_voronoi.experiments.report import new_figure
from structured_voronoi.geometry.cells import cells_of
from structured_voronoi.geometry.flows import CLOSED_WALLS, OPEN_WALLS, Particle, Rotation, Straight, Walls
from structured_voronoi.geometry.memo import Proposal
from structured_voronoi.geometry.motion import Trajectory, simulate
from structured_voronoi.lookahead.lookahead import Lookahead, Weighed
from structured_voronoi.problem.drawing import ancestral_draw
from structured_voronoi.problem.problem import Problem, bind

WORDS = ("cheap", "moderate", "dear", "pub", "restaurant", "diner", "bistro")
PROBABILITIES = torch.tensor([0.20, 0.10, 0.05, 0.25, 0.20, 0.08, 0.12], dtype=torch.float64)
PLACES = torch.tensor(
    [[-1.5, 0.95], [-0.1, 1.35], [1.35, 1.05], [-1.35, -0.75], [0.05, -0.1], [1.5, -0.35], [0.35, -1.4]],
    dtype=torch.float64,
)
PLACES = PLACES - PLACES.mean(0)
SIGMA, EDGE = 0.6, 2.25
INK, GREEN, RED, GREY = "#333333", "#0b6e4f", "#c8553d", "#9aa5a0"
HUES = ("#0b6e4f", "#4a6fa5", "#8c564b", "#e0a030", "#c8553d", "#59a1c9", "#b07aa1")
GREENS = LinearSegmentedColormap.from_list("greens", ["#ffffff", "#8cc5ae", GREEN, "#063d2c"])
OUTWARD_ONLY = Walls(inward=False, reflect=False)
START = ((-1.65, 0.76), (1.43, 1.94))
"""Point and momentum at the start of the long trajectories, in the cell of the first token."""


class Trail(NamedTuple):
    """Position, momentum and token of one trajectory at many times."""

    x: Tensor
    r: Tensor
    token: Tensor

    def swaps(self) -> Tensor:
        """Indices of the last times before the token changes."""
        return (self.token[1:] != self.token[:-1]).nonzero().squeeze(-1)

    def passes(self, places: Tensor) -> Tensor:
        """Indices of the last times before a bisector of the token is crossed and the token stays."""
        a = places - places[self.token][:, None]  # (time, token, 2)
        side = ((self.x[:, None] - (places + places[self.token][:, None]) / 2) * a).sum(-1) > 0
        crossed = (side[1:] != side[:-1]).any(-1) & (self.token[1:] == self.token[:-1])
        return crossed.nonzero().squeeze(-1)


def follow(
    places: Tensor,
    log_prob: Tensor,
    x: Sequence[float],
    r: Sequence[float],
    times: Tensor,
    flow: Rotation | Straight,
    walls: Walls,
    token: int | None = None,
) -> Trail:
    """The trajectory from x with momentum r, computed as one chain for each time, all from the same start."""
    cells, count = cells_of(places), len(times)
    point = torch.tensor(x, dtype=places.dtype).expand(count, 1, 2) - cells.origin
    momentum = torch.tensor(r, dtype=places.dtype).expand(count, 1, 2)
    cell = cells.nearest(point) if token is None else torch.full((count, 1), token)

    def evaluate(cell: Tensor) -> Proposal:
        energy = -log_prob[cell[:, 0]]
        return Proposal(energy, cells.points(cell), energy.isfinite())

    start = Particle(cell, point, momentum, -log_prob[cell[:, 0]], cells.points(cell))
    if isinstance(flow, Straight):
        flow = Straight(flow.low - cells.origin, flow.high - cells.origin)
    end, _, _ = simulate(Trajectory(cells, start, times, flow, walls, evaluate))
    return Trail(end.x[:, 0] + cells.origin, end.r[:, 0], end.cell[:, 0])


def draw_cells() -> Figure:
    """Voronoi cells of tokens, and the two densities over points that have the tokens' probabilities."""
    figure, axes = new_figure(12.6, 4.5, ncols=3)
    grid, nearest, extent = _grid()
    gaussians = torch.exp(-((grid[..., None, :] - PLACES) ** 2).sum(-1) / (2 * SIGMA**2))
    inside = torch.nn.functional.one_hot(nearest, len(WORDS)) * gaussians
    closed = (PROBABILITIES * inside / inside.sum((0, 1))).sum(-1)
    opened = (PROBABILITIES * gaussians / gaussians.sum((0, 1))).sum(-1)
    shades = (PROBABILITIES[nearest], closed, opened)
    titles = (
        "one cell per token",
        "closed walls: Gaussians truncated to their cells",
        "open walls: overlapping Gaussians",
    )
    for axis, shade, title in zip(axes, shades, titles, strict=True):
        top = float(shade.max()) * (2.4 if shade is shades[0] else 1.0)
        axis.imshow(shade, origin="lower", extent=extent, cmap=GREENS, vmin=0, vmax=top)
        _draw_walls(axis, nearest, extent, "white" if shade is shades[0] else GREY)
        axis.plot(*PLACES.T, "o", color=INK, markersize=3.5)
        axis.set_title(title, fontsize=11)
        _hide_frame(axis)
    for word, place, probability in zip(WORDS, PLACES.tolist(), PROBABILITIES.tolist(), strict=True):
        axes[0].annotate(f"{word}\n{probability:g}", place, (0, 5), textcoords="offset points", ha="center", fontsize=9)
    return figure


def draw_refraction() -> Figure:
    """Refraction and reflection of rays at a wall, by their angle of incidence, in both directions."""
    places = torch.tensor([[-1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    log_prob = torch.tensor([0.7, 0.3], dtype=torch.float64).log()
    jump = float(log_prob[0] - log_prob[1])
    box = Straight(torch.full((2,), -9.0, dtype=torch.float64), torch.full((2,), 9.0, dtype=torch.float64))
    figure, axes = new_figure(9.4, 4.6, ncols=2, sharey=True)
    for axis, start, title in (
        (axes[0], -1.0, f"uphill, ΔΦ = {jump:.2f}: refracted if $r_⊥^2 > 2ΔΦ$, else reflected"),
        (axes[1], 1.0, f"downhill, ΔΦ = −{jump:.2f}: always refracted"),
    ):
        axis.axvspan(-2, 0, color=GREEN, alpha=0.30, linewidth=0)
        axis.axvspan(0, 2, color=GREEN, alpha=0.12, linewidth=0)
        axis.axvline(0, color="white", linewidth=2.5)
        for degrees in range(-72, 73, 12):
            angle = np.deg2rad(degrees)
            r = (-np.sign(start) * 1.8 * np.cos(angle), 1.8 * np.sin(angle))
            trail = follow(places, log_prob, (start, 0.0), r, torch.linspace(0, 3.2, 400).double(), box, CLOSED_WALLS)
            refracted = bool((trail.token != trail.token[0]).any())
            axis.plot(*trail.x.T, color=GREEN if refracted else RED, linewidth=1.4)
        axis.plot(start, 0, "o", color=INK, markersize=6)
        axis.annotate("p = 0.7", (-1.9, -1.85), fontsize=11, color=INK)
        axis.annotate("p = 0.3", (1.9, -1.85), fontsize=11, color=INK, ha="right")
        axis.set(xlim=(-2, 2), ylim=(-2, 2), aspect="equal")
        axis.set_title(title, fontsize=10)
        _hide_frame(axis)
    return figure


def draw_gates() -> Figure:
    """One trajectory with open walls: arcs about the token's embedding, and gates that change or keep the token."""
    figure, axis = new_figure(6.4, 6.0)
    _draw_coloured_cells(axis, is_large=True)
    times = torch.linspace(0, 7.2, 6000, dtype=torch.float64)
    trail = follow(PLACES, PROBABILITIES.log(), *START, times, Rotation(SIGMA), OPEN_WALLS)
    _draw_trail(axis, trail)
    passes = trail.passes(PLACES)
    axis.plot(
        *trail.x[passes].T, "o", color="white", markeredgecolor=INK, markersize=6, label="gate that kept the token"
    )
    axis.plot(*trail.x[trail.swaps()].T, "D", color=INK, markersize=6, label="gate that changed the token")
    axis.plot(*trail.x[0], "^", color=INK, markersize=10, label="start")
    axis.set_title("one trajectory, coloured by its current token", fontsize=11)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_two_way() -> Figure:
    """A trajectory and its reversal, with two-way and with outward gates, and the bias of outward gates."""
    figure, axes = new_figure(13.2, 4.6, ncols=3, width_ratios=(1, 1, 0.55))
    times = torch.linspace(0, 4.5, 3000, dtype=torch.float64)
    for axis, walls, title in (
        (axes[0], OPEN_WALLS, "gates in both directions: the reversed trajectory returns"),
        (axes[1], OUTWARD_ONLY, "outward gates only: it does not return"),
    ):
        _draw_coloured_cells(axis)
        out = follow(PLACES, PROBABILITIES.log(), *START, times, Rotation(SIGMA), walls)
        last = (out.x[-1].tolist(), (-out.r[-1]).tolist())
        back = follow(PLACES, PROBABILITIES.log(), *last, times, Rotation(SIGMA), walls, int(out.token[-1]))
        axis.plot(*out.x.T, color=INK, linewidth=4.5, alpha=0.25, label="forward")
        axis.plot(*back.x.T, color=RED, linewidth=1.5, linestyle="--", label="reversed")
        axis.plot(*out.x[0], "^", color=INK, markersize=10, label="start")
        axis.plot(*out.x[-1], "s", color=INK, markersize=7, label="momentum negated")
        axis.plot(*back.x[-1], "o", color=RED, markersize=7, label="end")
        axis.set_title(title, fontsize=10)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=5, frameon=False)
    target = sv.verify.random_target(seed=0)
    samplers = {"both\ndirections": sv.SVS(1.0), "outward\nonly": sv.verify.twins.OutwardOnly(1.0)}
    fits = [sv.verify.stationarity(sampler, target, chains=20_000, steps=12, seed=1) for sampler in samplers.values()]
    axes[2].bar(list(samplers), [fit.tv / fit.floor for fit in fits], color=(GREEN, RED), width=0.6)
    for place, fit in enumerate(fits):
        axes[2].annotate(f"{fit.tv / fit.floor:.1f}", (place, fit.tv / fit.floor), ha="center", va="bottom")
    axes[2].axhline(1, color=INK, linewidth=1, linestyle=":")
    axes[2].set_ylabel("total variation distance / noise floor")
    axes[2].set_title("20,000 chains started in the target,\n12 steps", fontsize=10)
    return figure


@dataclass(frozen=True, eq=False)
class RecordingLookahead(Lookahead):
    """A lookahead that records its token distribution at every position."""

    weighed: list[Weighed] = field(default_factory=list)

    def weigh(
        self, problem: Problem, states: dict[str, Tensor], n: int, log_probs: Tensor, hidden: Tensor | None
    ) -> Weighed:
        self.weighed.append(super().weigh(problem, states, n, log_probs, hidden))
        return self.weighed[-1]


def draw_lookahead() -> Figure:
    """The lookahead's distribution of the next token, and its estimate of the probability of success along texts."""
    target = sv.load("bundled").target("The Golden Lantern is", max_tokens=14)
    problem = bind(target.under([sv.keyword("river")]))
    lookahead = Lookahead.fit(problem, texts=256, seed=0)
    levels = Rng(5, 8).uniform(problem.length)
    guided = RecordingLookahead(lookahead.heads, lookahead.settings, lookahead.identity)
    texts = guided.draw(problem, levels).tokens
    # with exponent 1, the mean value of the next token is the estimated probability
    estimates = replace(lookahead.settings, pattern_power=1.0)
    along_guided = RecordingLookahead(lookahead.heads, estimates, lookahead.identity)
    along_guided.score(problem, texts)
    plain = RecordingLookahead(lookahead.heads, estimates, lookahead.identity)
    plain.score(problem, ancestral_draw(bind(target), Rng(6, 64)).tokens)
    figure, axes = new_figure(12.6, 4.4, ncols=2, width_ratios=(0.8, 1))
    shown = _most_changed_position(guided.weighed)
    weighed, row = guided.weighed[shown], 0
    p = weighed.log_p[row].exp().double()
    q = (weighed.mass[row] / weighed.mass[row].sum()).double()
    top = torch.cat([p.topk(5).indices, q.topk(5).indices]).unique()
    top = top[p[top].argsort(descending=True)]
    places = np.arange(len(top))
    axes[0].barh(places - 0.2, p[top], height=0.38, color=GREY, label="p: language model")
    axes[0].barh(places + 0.2, q[top], height=0.38, color=GREEN, label="q: lookahead's proposal")
    axes[0].set_yticks(places, [repr(target.decode(token[None])) for token in top], fontsize=9)
    axes[0].invert_yaxis()
    before = target.prompt + target.decode(texts[row, :shown])
    axes[0].set_title(f"next token after “{before}”,\nwith the control keyword=river", fontsize=10)
    axes[0].legend(frameon=False)
    scale = 1 + lookahead.settings.delta
    for number in range(64):
        chances = [float(weighed.log_expected[number].exp()) / scale for weighed in plain.weighed]
        axes[1].plot(chances, color=GREY, linewidth=0.8, alpha=0.6, label="texts of the model" if number == 0 else None)
    chances = [float(weighed.log_expected[row].exp()) / scale for weighed in along_guided.weighed]
    axes[1].plot(chances, "o-", color=GREEN, linewidth=2, label="a guided text")
    words = [target.decode(token[None]) for token in texts[row]]
    axes[1].set_xticks(range(len(words)), words, rotation=45, ha="right", fontsize=9)
    axes[1].set(ylabel="estimated probability of “river”", yscale="log", ylim=(1e-4, 2))
    axes[1].set_title("lookahead's estimate before each token", fontsize=10)
    axes[1].legend(frameon=False, loc="center right")
    return figure


def _most_changed_position(distributions: list[Weighed]) -> int:
    """The position at which the first text's proposal differs most from the model."""
    shifts = []
    for weighed in distributions:
        p, q = weighed.log_p[0].exp(), weighed.mass[0] / weighed.mass[0].sum()
        shifts.append(float((q - p).abs().sum()))
    return int(np.argmax(shifts))


def _grid(count: int = 500) -> tuple[Tensor, Tensor, tuple[float, float, float, float]]:
    """Grid points of the picture, the nearest token of each, and the edges of the picture."""
    line = torch.linspace(-EDGE, EDGE, count, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=-1)
    return grid, cells_of(PLACES).nearest(grid), (-EDGE, EDGE, -EDGE, EDGE)


def _draw_walls(axis: Any, nearest: Tensor, extent: tuple[float, ...], colour: str) -> None:
    for token in range(len(WORDS)):
        axis.contour((nearest == token).double(), [0.5], extent=extent, colors=colour, linewidths=1.2)


def _draw_coloured_cells(axis: Any, is_large: bool = False) -> None:
    """Draw the cells, with the names of the tokens below them, or beside them in a large picture."""
    offset, side = ((7, -3), "left") if is_large else ((0, -14), "center")
    _, nearest, extent = _grid()
    colours = LinearSegmentedColormap.from_list("tokens", HUES, N=len(HUES))
    axis.imshow(nearest, origin="lower", extent=extent, cmap=colours, alpha=0.14, vmin=-0.5, vmax=len(HUES) - 0.5)
    _draw_walls(axis, nearest, extent, "white")
    for word, place, probability, hue in zip(WORDS, PLACES.tolist(), PROBABILITIES.tolist(), HUES, strict=True):
        axis.plot(*place, "o", color=hue, markersize=5)
        words = f"{word} {probability:g}"
        axis.annotate(words, place, offset, textcoords="offset points", ha=side, fontsize=9, color=hue)
    _hide_frame(axis)


def _draw_trail(axis: Any, trail: Trail) -> None:
    """Draw each segment in the colour of its token."""
    ends = [0, *(trail.swaps() + 1).tolist(), len(trail.x)]
    for begin, end in pairwise(ends):
        axis.plot(*trail.x[begin : end + 1].T, color=HUES[int(trail.token[begin])], linewidth=2.2)


def _hide_frame(axis: Any) -> None:
    axis.set(xticks=[], yticks=[])
    for spine in axis.spines.values():
        spine.set_visible(False)


PICTURES = {
    "cells": draw_cells,
    "refraction": draw_refraction,
    "gates": draw_gates,
    "two_way": draw_two_way,
    "lookahead": draw_lookahead,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        path = Path(__file__).with_name(f"{name}.png")
        PICTURES[name]().savefig(path, dpi=130, bbox_inches="tight")
        print(path)
