"""SVS with refresh moves beside exact rejection, which draws the truth: at one weight, as many texts of each."""

from __future__ import annotations

from typing import Any

import numpy as np

from structured_voronoi.experiments.control.draws import DrawAll, Draws, DrawTask, MethodSetting
from structured_voronoi.experiments.report import table
from structured_voronoi.metrics.divergence import difference
from structured_voronoi.metrics.text import bootstrap_ratio, distinct, perplexity

SET = 20
"""Texts of one set for Dist-n."""
SVS_AND_REFRESH, REJECTION = BOTH = ("svs+refresh", "rejection")


def compare_with_rejection(
    draw: DrawAll, targets: tuple[str, ...], weight: float, count: int, length: int, steps: int, seed: int
) -> dict[str, Any]:
    """``count`` texts a target of both at one weight γ, and how they differ."""
    setting = MethodSetting(weight)
    tasks = [
        DrawTask(method, target, count, length, setting, steps=steps, seed=seed + 7)
        for target in targets
        for method in BOTH
    ]
    batches = draw(tasks, f"against rejection, γ = {weight:g}")
    by_method = {method: [batch for batch in batches if batch["method"] == method] for method in BOTH}
    return {"weight": weight, "steps": steps, **compare_draws(by_method, length)}


def compare_draws(by_method: dict[str, list[Draws]], length: int) -> dict[str, Any]:
    """Success, energy, perplexity and Dist-1 of both, with intervals of their differences and ratios."""
    success, energy, ppl, dist = {}, {}, {}, {}
    for method, batches in by_method.items():
        success[method] = np.concatenate([np.array(batch["judged"]) == batch["target"] for batch in batches]).astype(
            float
        )
        energy[method] = np.concatenate([batch["energy"] for batch in batches])
        ppl[method] = np.concatenate([perplexity(np.array(batch["log_prob"]), length) for batch in batches])
        dist[method] = np.array(
            [
                distinct(batch["tokens"][i : i + SET], 1)
                for batch in batches
                for i in range(0, len(batch["tokens"]), SET)
            ]
        )
    gap, error = difference(success[SVS_AND_REFRESH], success[REJECTION])
    energy_difference, energy_error = difference(energy[SVS_AND_REFRESH], energy[REJECTION])
    return {
        "count": len(success[SVS_AND_REFRESH]),
        "success": {method: float(success[method].mean()) for method in BOTH},
        "success_difference": [gap, gap - 1.96 * error, gap + 1.96 * error],
        "energy": {method: float(energy[method].mean()) for method in BOTH},
        "energy_difference": [energy_difference, 1.96 * energy_error],
        "perplexity": {method: float(ppl[method].mean()) for method in BOTH},
        "perplexity_ratio": list(bootstrap_ratio(ppl[SVS_AND_REFRESH], ppl[REJECTION])),
        "distinct": {method: float(dist[method].mean()) for method in BOTH},
        "distinct_ratio": list(bootstrap_ratio(dist[SVS_AND_REFRESH], dist[REJECTION])),
        "evaluations": {
            method: float(np.mean([batch["evaluations"] for batch in by_method[method]])) for method in BOTH
        },
        "seconds": {method: float(np.sum([batch["seconds_taken"] for batch in by_method[method]])) for method in BOTH},
    }


def rejection_markdown(results: dict[str, Any]) -> str:
    success, energy = results["success_difference"], results["energy_difference"]
    ratio, dist = results["perplexity_ratio"], results["distinct_ratio"]
    columns = ("success", "energy", "perplexity", "distinct", "evaluations", "seconds")
    body = [[method, *(results[column][method] for column in columns)] for method in BOTH]
    header = ["", "success", "energy", "perplexity", "Dist-1", "LM evaluations a text", "seconds of one core"]
    return "\n\n".join(
        [
            f"{results['count']} texts of each, γ = {results['weight']:g}; {results['steps']} steps of SVS and Refresh "
            "from ancestral texts.",
            table(header, body),
            f"Differences (SVS minus rejection, 95 % intervals): success {success[0]:+.3f} ({success[1]:+.3f} to "
            f"{success[2]:+.3f}); energy {energy[0]:+.2f} ± {energy[1]:.2f}. Ratios: perplexity {ratio[0]:.3f} "
            f"({ratio[1]:.3f} – {ratio[2]:.3f}), Dist-1 {dist[0]:.3f} ({dist[1]:.3f} – {dist[2]:.3f}).",
        ]
    )
