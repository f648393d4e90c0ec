"""Tables of controlled generation: a grid search for each method, then every method on every target, side by side."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from structured_voronoi.experiments.chains import side_by_side
from structured_voronoi.experiments.control_cells import Cell, Task, draw_cell
from structured_voronoi.experiments.report import new_figure, table
from structured_voronoi.experiments.text_models import LENGTH
from structured_voronoi.metrics.text import bootstrap_mean, distinct, perplexity, wilson

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PUBLISHED = tomllib.loads((Path(__file__).parent / "published.toml").read_text(encoding="utf-8"))
GRID_SECONDS, SECONDS = 6.0, 25.0
"""Time of one core that a chain-based method has for a batch: in the grid search, and in the table."""
GRID_TEXTS, TEXTS = 8, 20
WEIGHTS = (1.5, 2.5, 4.0)
"""γ of rejection and of SVS with open walls, in the grid search."""
COLOURS = {
    "ancestral": "#555555", "fudge": "#b07aa1", "mucola": "#4a6fa5", "langevin": "#c8553d", "svs-paper": "#8fbf6a",
    "svs": "#76b7b2", "svs+refresh": "#0b6e4f", "pncg": "#e0a030", "rejection": "#000000",
}  # fmt: skip
AXES = ("success", "-ppl mean", "-ppl sd", "dist-1", "dist-2", "dist-3")


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
    cells = [
        replace(cell, target=target, count=GRID_TEXTS, seconds=GRID_SECONDS, seed=seed + 100)
        for method in COLOURS
        for cell in settings(method)
        for target in targets
    ]
    drawn = side_by_side(partial(draw_cell, task=task), cells, "grid search", progress)
    base = float(np.mean([_perplexity(one).mean() for one in drawn if one["method"] == "ancestral"]))
    found = {}
    for method in COLOURS:
        rows = []
        for place, cell in enumerate(settings(method)):
            mine = [
                one
                for one, asked in zip(drawn, cells, strict=True)
                if replace(asked, target="", count=0, seconds=None, seed=0) == cell
            ]
            success = float(np.mean([np.mean(np.array(one["guide"]) > 0.5) for one in mine]))
            ppl = float(np.mean([_perplexity(one).mean() for one in mine]))
            score = success - float(np.log10(ppl / base))
            rows.append({"place": place, "success": success, "perplexity": ppl, "score": score})
        best = max(rows, key=lambda row: row["score"])
        found[method] = {"grid": rows, "winner": best["place"]}
    return found


def tabulated(
    task: Task,
    targets: tuple[str, ...],
    winners: dict[str, dict[str, Any]],
    seed: int,
    progress: bool,
    count: int = TEXTS,
) -> list[dict[str, Any]]:
    """Every method at its winning setting on every target."""
    cells = [
        replace(settings(method)[winners[method]["winner"]], target=target, count=count, seconds=SECONDS, seed=seed)
        for method in COLOURS
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
        "energy": float(np.mean(one["energy"])),
        "distinct": [distinct(one["tokens"], n) for n in (1, 2, 3)],
        "example": one["texts"][0].strip().replace("\n", " ").replace("|", "/"),
    }


def averages(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a method: success with its Wilson interval, perplexity with its bootstrap interval, Dist-n, cost."""
    found = []
    for method in COLOURS:
        mine = [row for row in rows if row["method"] == method]
        if not mine:
            continue
        ppl = np.concatenate([row["perplexities"] for row in mine])
        found.append(
            {
                "method": method,
                "success": wilson(sum(row["successes"] for row in mine), sum(row["count"] for row in mine)),
                "perplexity": bootstrap_mean(ppl),
                "distinct": np.mean([row["distinct"] for row in mine], axis=0).tolist(),
                "energy": float(np.mean([row["energy"] for row in mine])),
                "evaluations": float(np.mean([row["evaluations"] for row in mine])),
                "control_evaluations": float(np.mean([row["control_evaluations"] for row in mine])),
                "seconds": float(np.mean([row["seconds_taken"] for row in mine])),
            }
        )
    return found


def average_table(rows: list[dict[str, Any]], task_name: str) -> str:
    """Ours beside the paper's."""
    published = PUBLISHED[task_name]["average"]
    body = []
    for row in averages(rows):
        success, ppl, paper = row["success"], row["perplexity"], published.get(row["method"])
        body.append(
            [
                row["method"],
                f"{success.mean:.2f} ({success.low:.2f} – {success.high:.2f})",
                f"{ppl.mean:.2f} ({ppl.low:.2f} – {ppl.high:.2f})",
                " / ".join(f"{value:.2f}" for value in row["distinct"]),
                row["energy"],
                row["evaluations"],
                row["control_evaluations"],
                row["seconds"],
                "–" if paper is None else ", ".join(f"{value:.2f}" for value in paper),
            ]
        )
    header = ["method", "success", "perplexity", "Dist-1/2/3", "energy", "LM evaluations a text"]
    return table([*header, "control evaluations", "seconds a batch", "the paper: success, perplexity, Dist"], body)


def target_table(rows: list[dict[str, Any]]) -> str:
    """Success and perplexity of every method on every target."""
    targets = list(dict.fromkeys(row["target"] for row in rows))
    body = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = {row["target"]: row for row in rows if row["method"] == method}
        body.append(
            [method]
            + [
                f"{mine[t]['successes'] / mine[t]['count']:.2f}, {np.mean(mine[t]['perplexities']):.1f}"
                for t in targets
            ]
        )
    return table(["success, perplexity", *targets], body)


def grid_table(winners: dict[str, dict[str, Any]]) -> str:
    body = []
    for method, found in winners.items():
        for row in found["grid"]:
            cell = settings(method)[row["place"]]
            mark = "**winner**" if row["place"] == found["winner"] else ""
            setting = f"γ = {cell.weight:g}, ε = {cell.step_size:g}, {cell.start} start"
            body.append([method, setting, row["success"], row["perplexity"], row["score"], mark])
    return table(["method", "setting", "guide's success", "perplexity", "score", ""], body)


def sample_table(rows: list[dict[str, Any]]) -> str:
    target = rows[0]["target"]
    return table(
        ["method", f"a text, target {target}"], [[r["method"], r["example"]] for r in rows if r["target"] == target]
    )


def scatter(rows: list[dict[str, Any]]) -> Figure:
    """Success against perplexity: the upper left is where to be."""
    figure, axis = new_figure(6, 4)
    for row in averages(rows):
        success, ppl = row["success"], row["perplexity"]
        bars = {"xerr": [[ppl.mean - ppl.low], [ppl.high - ppl.mean]]}
        bars["yerr"] = [[success.mean - success.low], [success.high - success.mean]]
        axis.errorbar(ppl.mean, success.mean, fmt="o", color=COLOURS[row["method"]], label=row["method"], **bars)
    axis.set(xscale="log", xlabel="perplexity", ylabel="success by the judge", ylim=(-0.02, 1.02))
    axis.legend(frameon=False, fontsize=8)
    return figure


def six_axes(rows: list[dict[str, Any]]) -> Figure:
    """The paper's comparison along six axes, one picture a target; each axis runs from the worst to the best method."""
    targets = list(dict.fromkeys(row["target"] for row in rows))
    columns = min(4, len(targets))
    lines = -(-len(targets) // columns)
    figure, axes = new_figure(
        3.2 * columns, 3.2 * lines, nrows=lines, ncols=columns, subplot_kw={"polar": True}, squeeze=False
    )
    angles = np.linspace(0, 2 * np.pi, len(AXES), endpoint=False)
    for axis in axes.flat[len(targets) :]:
        axis.set_visible(False)
    for axis, target in zip(axes.flat, targets, strict=False):
        mine = [row for row in rows if row["target"] == target]
        values = np.array(
            [
                [row["successes"] / row["count"], -np.log(np.mean(row["perplexities"])),
                 -np.log(np.std(row["perplexities"]) + 1e-9), *row["distinct"]]
                for row in mine
            ]
        )  # fmt: skip
        scaled = (values - values.min(0)) / np.maximum(np.ptp(values, axis=0), 1e-9)
        for row, line in zip(mine, scaled, strict=True):
            closed = np.append(line, line[0])
            axis.plot(np.append(angles, 0), closed, color=COLOURS[row["method"]], linewidth=1.2, label=row["method"])
        axis.set(xticks=angles, xticklabels=AXES, yticks=[], title=target)
        axis.tick_params(labelsize=6)
    axes.flat[0].legend(frameon=False, fontsize=6, bbox_to_anchor=(0.1, 0.1))
    return figure
