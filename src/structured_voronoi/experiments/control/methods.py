"""Every method of controlled generation at the best setting of its grid, on every target, side by side."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from structured_voronoi.experiments.control_cells import Cell, Task, draw_cell
from structured_voronoi.experiments.text_models import LENGTH
from structured_voronoi.experiments.workers import side_by_side
from structured_voronoi.metrics.text import distinct, perplexity

METHODS = ("ancestral", "fudge", "mucola", "langevin", "svs-paper", "svs", "svs+refresh", "pncg", "rejection")
GRID_SECONDS, SECONDS = 6.0, 25.0
"""Time of one core that a chain-based method has for a batch: in the grid search, and in the table."""
GRID_TEXTS, TEXTS = 8, 20
ENERGY_WEIGHT = 1.5
"""γ at which the energies of all methods are compared, whatever γ they were drawn at."""
WEIGHTS = (1.5, 2.5, 4.0)
"""γ of rejection and of SVS with open walls, in the grid search."""


def every_method(
    task: Task, targets: tuple[str, ...], grid_targets: tuple[str, ...], count: int, seed: int, progress: bool
) -> dict[str, Any]:
    """What a report of controlled generation is made of: the grids, and the numbers of every cell."""
    winners = searched(task, grid_targets, seed, progress)
    return {"seed": seed, "grid": winners, "rows": drawn_at_winners(task, targets, winners, count, seed, progress)}


def settings(method: str) -> list[Cell]:
    """The grid of a method; a target and a number of texts are filled in later."""
    cell = Cell(method, "", 0)
    if method == "ancestral":
        return [cell]
    if method in ("rejection", "svs", "svs+refresh"):
        return [replace(cell, weight=weight) for weight in WEIGHTS]
    if method == "fudge":
        return [replace(cell, weight=weight) for weight in (1.0, 3.0)]
    if method == "pncg":
        return [replace(cell, step_size=step, weight=weight) for step in (0.02, 0.04) for weight in (1.5, 4.0)]
    own = {"mucola": (1.0, 2.0), "langevin": (1.5, 1.5), "svs-paper": (1.5, 1.5)}[method]  # the paper's ε and γ
    return [
        replace(cell, step_size=step, weight=own[1], start=start)
        for step in (own[0], own[0] / 5)
        for start in ("random", "ancestral")
    ]


def searched(task: Task, targets: tuple[str, ...], seed: int, progress: bool) -> dict[str, dict[str, Any]]:
    """The winner of each method's grid, on some targets, by the guide's own opinion and the perplexity."""
    grid = [(method, place) for method in METHODS for place in range(len(settings(method)))]
    cells = [
        replace(settings(method)[place], target=target, count=GRID_TEXTS, seconds=GRID_SECONDS, seed=seed + 100)
        for method, place in grid
        for target in targets
    ]
    drawn = side_by_side(partial(draw_cell, task=task), cells, "grid search", progress)
    of = {point: drawn[i * len(targets) : (i + 1) * len(targets)] for i, point in enumerate(grid)}
    base = float(np.mean([_perplexity(one).mean() for one in of["ancestral", 0]]))
    found = {}
    for method in METHODS:
        rows = []
        for place in range(len(settings(method))):
            mine = of[method, place]
            success = float(np.mean([np.mean(np.array(one["guide"]) > 0.5) for one in mine]))
            ppl = float(np.mean([_perplexity(one).mean() for one in mine]))
            score = success - float(np.log10(ppl / base))
            rows.append({"place": place, "success": success, "perplexity": ppl, "score": score})
        best = max(rows, key=lambda row: row["score"])
        found[method] = {"grid": rows, "winner": best["place"]}
    return found


def drawn_at_winners(
    task: Task,
    targets: tuple[str, ...],
    winners: dict[str, dict[str, Any]],
    count: int,
    seed: int,
    progress: bool,
) -> list[dict[str, Any]]:
    """Every method at its winning setting on every target."""
    cells = [
        replace(settings(method)[winners[method]["winner"]], target=target, count=count, seconds=SECONDS, seed=seed)
        for method in METHODS
        for target in targets
    ]
    drawn = side_by_side(partial(draw_cell, task=task), cells, "every method on every target", progress)
    return [_judged(one) for one in drawn]


def _perplexity(one: dict[str, Any]) -> np.ndarray:
    return perplexity(np.array(one["log_prob"]), LENGTH)


def _judged(one: dict[str, Any]) -> dict[str, Any]:
    """The numbers of one cell."""
    ppl = _perplexity(one)
    return {
        **{key: one[key] for key in ("method", "target", "weight", "step_size", "start", "steps_taken")},
        **{key: one[key] for key in ("evaluations", "control_evaluations", "seconds_taken")},
        "successes": sum(label == one["target"] for label in one["judged"]),
        "count": len(one["judged"]),
        "perplexities": ppl.tolist(),
        "energy": float(np.mean(-np.array(one["log_prob"]) - ENERGY_WEIGHT * np.log(np.maximum(one["guide"], 1e-300)))),
        "distinct": [distinct(one["tokens"], n) for n in (1, 2, 3)],
        "example": one["texts"][0],
    }
