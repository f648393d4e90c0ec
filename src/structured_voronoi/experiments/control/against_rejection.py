"""Comparison of a sampler with exact rejection: equally many texts of each, at one weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from structured_voronoi.experiments.control.draws import DrawAll, Draws, DrawTask
from structured_voronoi.experiments.report import format_interval, table
from structured_voronoi.metrics.divergence import difference
from structured_voronoi.metrics.text import bootstrap_ratio, distinct, perplexity


def compare_with_rejection(draw: DrawAll, first: DrawTask, targets: tuple[str, ...]) -> dict[str, Any]:
    """Draw the task's texts and as many by rejection, for every target, and compare them."""
    methods, weight = (first.method, "rejection"), first.setting.weight
    tasks = [replace(first, method=method, target=target) for target in targets for method in methods]
    batches = draw(tasks, f"{first.method} against rejection, γ = {weight:g}")
    by_method = {method: [batch for batch in batches if batch["method"] == method] for method in methods}
    return {"weight": weight, **compare_draws(by_method, first.length)}


def compare_draws(by_method: dict[str, list[Draws]], length: int, set_size: int = 20) -> dict[str, Any]:
    """Success, energy, perplexity and Dist-1 (over sets of ``set_size`` texts) with intervals of the differences."""
    success, energy, ppl, dist = {}, {}, {}, {}
    tried, exact = by_method
    for method, batches in by_method.items():
        success[method] = np.concatenate([np.array(batch["judged"]) == batch["target"] for batch in batches]).astype(
            float
        )
        energy[method] = np.concatenate([batch["energy"] for batch in batches])
        ppl[method] = np.concatenate([perplexity(np.array(batch["log_prob"]), length) for batch in batches])
        dist[method] = np.array(
            [
                distinct(batch["tokens"][i : i + set_size], 1)
                for batch in batches
                for i in range(0, len(batch["tokens"]), set_size)
            ]
        )
    gap, error = difference(success[tried], success[exact])
    energy_difference, energy_error = difference(energy[tried], energy[exact])
    shares = [batch["share"] for batch in by_method[tried] if batch["share"]]
    return {
        "methods": list(by_method),
        "share": float(np.mean(shares)) if shares else None,
        "pilot_seconds": float(np.sum([batch["pilot_seconds"] for batch in by_method[tried]])),
        "count": len(success[tried]),
        "steps": by_method[tried][0]["steps_taken"],
        "success": {method: float(success[method].mean()) for method in by_method},
        "success_difference": [gap, gap - 1.96 * error, gap + 1.96 * error],
        "energy": {method: float(energy[method].mean()) for method in by_method},
        "energy_difference": [energy_difference, 1.96 * energy_error],
        "perplexity": {method: float(ppl[method].mean()) for method in by_method},
        "perplexity_ratio": list(bootstrap_ratio(ppl[tried], ppl[exact])),
        "distinct": {method: float(dist[method].mean()) for method in by_method},
        "distinct_ratio": list(bootstrap_ratio(dist[tried], dist[exact])),
        "evaluations": {
            method: float(np.mean([batch["evaluations"] for batch in batches])) for method, batches in by_method.items()
        },
        "seconds": {
            method: float(np.sum([batch["seconds_taken"] for batch in by_method[method]])) for method in by_method
        },
    }


def rejection_markdown(results: dict[str, Any]) -> str:
    success, energy = results["success_difference"], results["energy_difference"]
    ratio, dist = results["perplexity_ratio"], results["distinct_ratio"]
    columns = ("success", "energy", "perplexity", "distinct", "evaluations", "seconds")
    body = [[method, *(results[column][method] for column in columns)] for method in results["methods"]]
    header = ["", "success", "energy", "perplexity", "Dist-1", "LM evaluations per text", "seconds of one core"]
    return "\n\n".join(
        [
            f"{results['count']} texts per method, γ = {results['weight']:g}; {results['steps']} steps of "
            f"{results['methods'][0]}{_describe_pilots(results)}.",
            table(header, body),
            f"Differences from rejection (95 % intervals): success {success[0]:+.3f} ({success[1]:+.3f} to "
            f"{success[2]:+.3f}); energy {energy[0]:+.2f} ± {energy[1]:.2f}. Ratios: perplexity "
            f"{format_interval(ratio, '.3f')}, Dist-1 {format_interval(dist, '.3f')}.",
        ]
    )


def _describe_pilots(results: dict[str, Any]) -> str:
    """Cost of the pilots and the evaluations per effective text, if there were pilots."""
    if results["share"] is None:
        return ""
    return f"; pilots {results['pilot_seconds']:.0f} s; {1 / results['share']:.1f} evaluations per effective text"
