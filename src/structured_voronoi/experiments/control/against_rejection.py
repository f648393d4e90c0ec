"""SVS with refresh moves beside exact rejection, which draws the truth: at one weight, as many texts of each."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from structured_voronoi.experiments.control_cells import Cell, Task, draw_cell
from structured_voronoi.experiments.report import table
from structured_voronoi.experiments.text_models import LENGTH
from structured_voronoi.experiments.workers import side_by_side
from structured_voronoi.metrics.divergence import difference
from structured_voronoi.metrics.text import bootstrap_ratio, distinct, perplexity

STEPS, SET = 60, 20
"""Steps of each chain; texts of one set for Dist-n."""
BOTH = ("svs+refresh", "rejection")


def against_rejection(
    task: Task, targets: tuple[str, ...], weight: float, count: int, seed: int, progress: bool
) -> dict[str, Any]:
    """``count`` texts a target of both at one weight γ, and how they differ."""
    cells = [Cell(method, target, count, weight, steps=STEPS, seed=seed + 7) for target in targets for method in BOTH]
    drawn = side_by_side(partial(draw_cell, task=task), cells, f"against rejection, γ = {weight:g}", progress)
    found = compared({method: [one for one in drawn if one["method"] == method] for method in BOTH})
    return {"weight": weight, **found}


def compared(drawn: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Success, energy, perplexity and Dist-1 of both, with intervals of their differences and ratios."""
    success, energy, ppl, dist = {}, {}, {}, {}
    for method, cells in drawn.items():
        success[method] = np.concatenate([np.array(one["judged"]) == one["target"] for one in cells])
        energy[method] = np.concatenate([one["energy"] for one in cells])
        ppl[method] = np.concatenate([perplexity(np.array(one["log_prob"]), LENGTH) for one in cells])
        dist[method] = np.array(
            [distinct(one["tokens"][i : i + SET], 1) for one in cells for i in range(0, len(one["tokens"]), SET)]
        )
    mine, truth = BOTH
    gap, error = difference(success[mine].astype(float), success[truth].astype(float))
    energy_difference, energy_error = difference(energy[mine], energy[truth])
    return {
        "count": len(success[mine]),
        "success": {method: float(success[method].mean()) for method in BOTH},
        "success_difference": [gap, gap - 1.96 * error, gap + 1.96 * error],
        "energy": {method: float(energy[method].mean()) for method in BOTH},
        "energy_difference": [energy_difference, 1.96 * energy_error],
        "perplexity": {method: float(ppl[method].mean()) for method in BOTH},
        "perplexity_ratio": list(bootstrap_ratio(ppl[mine], ppl[truth])),
        "distinct": {method: float(dist[method].mean()) for method in BOTH},
        "distinct_ratio": list(bootstrap_ratio(dist[mine], dist[truth])),
        "evaluations": {method: float(np.mean([one["evaluations"] for one in drawn[method]])) for method in BOTH},
        "seconds": {method: float(np.sum([one["seconds_taken"] for one in drawn[method]])) for method in BOTH},
    }


def rejection_markdown(found: dict[str, Any]) -> str:
    success, energy = found["success_difference"], found["energy_difference"]
    ratio, dist = found["perplexity_ratio"], found["distinct_ratio"]
    body = [
        [
            method,
            *(found[key][method] for key in ("success", "energy", "perplexity", "distinct", "evaluations", "seconds")),
        ]
        for method in BOTH
    ]
    header = ["", "success", "energy", "perplexity", "Dist-1", "LM evaluations a text", "seconds of one core"]
    return "\n\n".join(
        [
            f"{found['count']} texts of each, γ = {found['weight']:g}; {STEPS} steps of SVS and Refresh from ancestral "
            "texts.",
            table(header, body),
            f"Differences (SVS minus rejection, 95 % intervals): success {success[0]:+.3f} ({success[1]:+.3f} to "
            f"{success[2]:+.3f}); energy {energy[0]:+.2f} ± {energy[1]:.2f}. Ratios: perplexity {ratio[0]:.3f} "
            f"({ratio[1]:.3f} – {ratio[2]:.3f}), Dist-1 {dist[0]:.3f} ({dist[1]:.3f} – {dist[2]:.3f}).",
        ]
    )
