"""How faithful SVS is, in numbers: stationarity on enumerated targets beside broken twins, energy, round trips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from structured_voronoi.experiments.checks import random_target, round_trip, stationarity
from structured_voronoi.experiments.report import new_figure, table, write_report
from structured_voronoi.experiments.twins import ColdMomentum, OutwardOnly, divided_by_square
from structured_voronoi.run.progress import progress_bar
from structured_voronoi.samplers.svs import SVS

OPEN_SETTINGS = (
    # tokens, positions, dimensions, sd of the field, scale
    (6, 2, 3, 0.2, 1.0),
    (6, 2, 3, 0.2, 0.5),
    (8, 2, 2, 0.3, 1.5),
    (5, 3, 4, 0.2, 1.0),
    (10, 2, 8, 0.1, 1.5),
    (4, 4, 2, 0.3, 0.7),
    (10, 3, 3, 0.2, 0.8),
    (30, 2, 5, 0.3, 1.2),
    (12, 1, 6, 0.3, 1.0),
)
OTHER_SETTINGS = ((6, 2, 3, 0.2, 0.1), (6, 2, 3, 2.0, 1.0), (10, 2, 8, 5.0, 1.0))
CLOSED_SETTINGS = (
    (6, 2, 3, 0.2, 0.1),
    (6, 2, 3, 0.2, 0.3),
    (6, 2, 3, 0.2, 0.5),
    (8, 2, 2, 0.3, 0.4),
    (5, 3, 4, 0.2, 0.5),
)
STEPS = 12


def run(out: Path, runs: int = 100_000, seed: int = 1, progress: bool = True) -> list[Path]:
    """``runs`` chains for each open setting, a fifth of it for closed ones."""
    total = len(OPEN_SETTINGS) + len(OTHER_SETTINGS) + len(CLOSED_SETTINGS) + 2
    with progress_bar(total, progress, "faithfulness") as tick:
        open_rows, closed_rows, motion_rows = [], [], []
        for number, setting in enumerate(OPEN_SETTINGS + OTHER_SETTINGS):
            open_rows.append(_open(number, setting, runs, seed))
            tick(None)
        for number, setting in enumerate(CLOSED_SETTINGS):
            closed_rows.append(_closed(number, setting, runs // 5, seed))
            tick(None)
        for dtype in (torch.float64, torch.float32):
            motion_rows.append(_motion(dtype, max(1000, runs // 10), seed))
            tick(None)
    results = {
        "chains": runs,
        "steps": STEPS,
        "seed": seed,
        "open": open_rows,
        "closed": closed_rows,
        "motion": motion_rows,
    }
    return write_report(out, "faithfulness", results, _markdown(results), {"faithfulness": _picture(open_rows)})


def _name(setting: tuple[int, int, int, float, float]) -> dict[str, Any]:
    return dict(zip(("tokens", "positions", "dimensions", "field_sd", "scale"), setting, strict=True))


def _open(number: int, setting: tuple[int, int, int, float, float], chains: int, seed: int) -> dict[str, Any]:
    """Open walls: the right sampler, its twins, and the round trips of all of them."""
    *shape, scale = setting
    target = random_target(number, *shape)  # type: ignore[arg-type]
    right = stationarity(target, SVS(scale), chains, STEPS, seed)
    twin = stationarity(target, OutwardOnly(scale), chains, STEPS, seed)
    cold = stationarity(target, ColdMomentum(scale), chains, STEPS, seed)
    trips = min(chains, 10_000)
    row = {
        **_name(setting),
        "tv": right.fit.tv,
        "floor": right.fit.floor,
        "ratio": right.fit.ratio,
        "p_value": right.fit.p_value,
        "moved": right.moved,
        "evaluations": right.evaluations,
        "outward_only_p": twin.fit.p_value,
        "outward_only_ratio": twin.fit.ratio,
        "cold_momentum_p": cold.fit.p_value,
        "round_trips_failed": round_trip(target, SVS(scale), trips, seed).failures(1e-6),
        "round_trips_failed_outward_only": round_trip(target, OutwardOnly(scale), trips, seed).failures(1e-6),
    }
    with divided_by_square():
        row["divided_by_square_p"] = stationarity(target, SVS(scale), chains, STEPS, seed).fit.p_value
        row["round_trips_failed_divided"] = round_trip(target, SVS(scale), trips, seed).failures(1e-6)
    return row


def _closed(number: int, setting: tuple[int, int, int, float, float], chains: int, seed: int) -> dict[str, Any]:
    """Closed walls with estimated and with equal masses."""
    *shape, scale = setting
    target = random_target(100 + number, *shape)  # type: ignore[arg-type]
    estimated = stationarity(target, SVS(scale, walls="closed", masses="estimated"), chains, STEPS, seed)
    equal = stationarity(target, SVS(scale, walls="closed"), chains, STEPS, seed)
    return {
        **_name(setting),
        "floor": estimated.fit.floor,
        "estimated_tv": estimated.fit.tv,
        "estimated_ratio": estimated.fit.ratio,
        "estimated_moved": estimated.moved,
        "equal_tv": equal.fit.tv,
        "equal_ratio": equal.fit.ratio,
    }


def _motion(dtype: torch.dtype, trips: int, seed: int) -> dict[str, Any]:
    """Energy error and way back over random trajectories of all open settings."""
    errors, distances = [], []
    for number, (*shape, scale) in enumerate(OPEN_SETTINGS):
        tokens, length, dimensions, field_sd = shape
        target = random_target(number, int(tokens), int(length), int(dimensions), field_sd, dtype)
        trip = round_trip(target, SVS(scale), 1 + trips // len(OPEN_SETTINGS), seed)
        errors.append(trip.energy_error.double())
        distances.append(trip.distance.double())
    error, distance = torch.cat(errors), torch.cat(distances)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "trajectories": len(error),
        "largest_energy_error": float(error.max()),
        "median_distance": float(distance.median()),
        "distance_99.9%": float(distance.quantile(0.999)),
        "largest_distance": float(distance.max()),
    }


def _markdown(results: dict[str, Any]) -> str:
    parts = [
        "# Faithfulness of SVS",
        f"{results['chains']:,} chains started at the truth, {results['steps']} steps, seed {results['seed']}; "
        "chi-square p-values with states pooled to expected counts of at least 5; the floor is the mean total "
        "variation of as many independent draws. Twins: gates that work outward only, r ~ N(0, ½I), refraction "
        "divided by ‖r⊥‖². Round trips: share of swapping trajectories that do not return within 1e-6 σ.",
    ]
    for name in ("open", "closed", "motion"):
        rows = results[name]
        parts += [f"## {name}", table(list(rows[0]), [list(row.values()) for row in rows])]
    return "\n\n".join([*parts, "![faithfulness](faithfulness.png)"])


def _picture(rows: list[dict[str, Any]]) -> Any:
    figure, axis = new_figure(8, 3.6)
    labels = [f"{r['tokens']}^{r['positions']} d{r['dimensions']}\n±{r['field_sd']:g} s{r['scale']:g}" for r in rows]
    axis.plot(range(len(rows)), [row["ratio"] for row in rows], "o", color="#0b6e4f", label="SVS, open walls")
    axis.plot(range(len(rows)), [row["outward_only_ratio"] for row in rows], "x", color="#c8553d", label="outward only")
    axis.axhline(1, color="#555555", linewidth=1, linestyle="--", label="independent draws")
    axis.set(yscale="log", ylabel="total variation / floor")
    axis.set_xticks(range(len(rows)), labels, fontsize=7)
    axis.legend(frameon=False)
    return figure
