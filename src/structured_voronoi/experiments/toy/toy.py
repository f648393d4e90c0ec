"""The paper's toy: four square cells in the plane (figures 1, 2, 5 and 6), at its settings and at equal cost."""

from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from structured_voronoi.base import Sampler
from structured_voronoi.experiments.chains import (
    Runs,
    divergence,
    independent_runs,
    run_chains,
    run_iterations,
)
from structured_voronoi.experiments.report import table, write_report
from structured_voronoi.experiments.toy_pictures import (
    elements_picture,
    iterations_picture,
    js_picture,
    trajectory_picture,
)
from structured_voronoi.experiments.workers import side_by_side
from structured_voronoi.samplers.hmc import HMC
from structured_voronoi.samplers.mucola import MuCoLa
from structured_voronoi.samplers.svs import SVS
from structured_voronoi.targets.categorical import toy

TEMPERATURES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
BURN_IN, DRAWS = 500, 200
ITERATIONS = (100, 500, 1000)
SHORT_BURN_IN = 100
BUDGET = SHORT_BURN_IN + DRAWS
"""Energy evaluations, or proposals, of a run at equal cost: one for each step of burn-in and each draw."""
ONE, FEW, MANY = (1,), (1, 2, 3, 4, 5), (1, 2, 4, 8)
"""Steps a draw that are tried."""


def voronoi(length: float) -> SVS:
    return SVS(base="uniform", walls="closed", length=length)


def hmc(step_size: float) -> HMC:
    return HMC(step_size, base="uniform")


def mucola(step_size: float) -> MuCoLa:
    return MuCoLa(step_size, final_step_size=None, metropolis=True)


PAPER_SETTINGS: dict[str, Sampler] = {
    "vs": voronoi(0.1),
    "vs_paper": SVS.paper(0.1, 0.1, base="uniform"),
    "hmc": hmc(0.1),
    "mucola": mucola(0.1),
}
STEP_SIZES = (0.5, 1.0, 2.0, 4.0, 16.0)
GRIDS: dict[str, list[tuple[Sampler, tuple[int, ...]]]] = {
    "vs": [(voronoi(2.0), ONE), (voronoi(2.5), ONE), (voronoi(4.0), MANY)],
    "vs_paper": [(SVS.paper(1.0, 0.1, base="uniform"), ONE)],
    "hmc": [(hmc(step), FEW) for step in STEP_SIZES],
    "mucola": [(mucola(step), FEW) for step in STEP_SIZES],
}


def run(out: Path, runs: int = 256, seed: int = 0, progress: bool = True) -> list[Path]:
    """All figures of the toy; ``runs`` independent runs of one chain each."""
    parts = side_by_side(partial(_at_temperature, runs=runs, seed=seed), TEMPERATURES, "toy", progress)
    rows, iterations, elements = (list(chain.from_iterable(part)) for part in zip(*parts, strict=True))
    figures = {
        "toy_trajectory": trajectory_picture(),
        "toy": js_picture(rows),
        "toy_iterations": iterations_picture(iterations, ITERATIONS),
        "toy_elements": elements_picture(elements, ITERATIONS),
    }
    results = {"runs": runs, "seed": seed, "rows": rows, "iterations": iterations, "elements": elements}
    return write_report(out, "toy", results, _markdown(rows, iterations, runs, seed), figures)


Rows = list[dict[str, Any]]


def _at_temperature(temperature: float, runs: int, seed: int) -> tuple[Rows, Rows, Rows]:
    rows = _at_paper_settings(temperature, runs, seed) + _at_equal_cost(temperature, runs, seed)
    return rows, *_by_iterations(temperature, runs, seed)


def _row(temperature: float, name: str, setting: str, runs: Runs, tuning: str = "") -> dict[str, Any]:
    js = divergence(toy(temperature), runs)
    return {
        "temperature": temperature,
        "sampler": name,
        "setting": setting,
        "js_mean": js.mean,
        "js_low": js.low,
        "js_high": js.high,
        "energy_evaluations": runs.evaluations,
        "proposals": runs.events,
        "tuning": tuning,
    }


def _at_paper_settings(temperature: float, runs: int, seed: int) -> Rows:
    """ε = α = 0.1, one leapfrog step a draw, 500 iterations of burn-in."""
    target = toy(temperature)
    rows = [_row(temperature, "independent", "paper", independent_runs(target, runs, DRAWS, seed))]
    for name, sampler in PAPER_SETTINGS.items():
        done = run_chains(target, sampler, runs, BURN_IN, DRAWS, [1], seed)[1]
        rows.append(_row(temperature, name, "paper", done, _tuning(sampler, 1)))
    return rows


def _at_equal_cost(temperature: float, runs: int, seed: int) -> Rows:
    """Each sampler at its best step and steps a draw within the budget, counted in two ways; VS by trajectories."""
    target = toy(temperature)
    rows: Rows = []
    for name, grid in GRIDS.items():
        within: dict[str, Rows] = {"equal_evaluations": [], "equal_proposals": []}
        for sampler, steps_a_draw in grid:
            done = run_chains(target, sampler, runs, SHORT_BURN_IN, DRAWS, steps_a_draw, seed + 1)
            for every, found in done.items():
                # a proposal is an event of VS, a step of the others, whether or not it leaves the cell
                proposals = found.events if name == "vs" else float(SHORT_BURN_IN + DRAWS * every)
                found = found._replace(events=proposals)
                costs = {"equal_evaluations": found.evaluations, "equal_proposals": proposals}
                for setting, cost in costs.items():
                    if cost <= 1.05 * BUDGET:
                        within[setting].append(_row(temperature, name, setting, found, _tuning(sampler, every)))
                if sampler == voronoi(4.0):
                    rows.append(_row(temperature, "vs", f"trajectories_{every}", found, _tuning(sampler, every)))
        for found_rows in within.values():
            best = min(found_rows, key=lambda row: float(row["js_mean"]))
            tried = [[row["tuning"], row["js_mean"], row["energy_evaluations"]] for row in found_rows]
            rows.append({**best, "tried": tried})
    floor = independent_runs(target, runs, DRAWS, seed + 1)
    rows += [_row(temperature, "independent", setting, floor) for setting in ("equal_evaluations", "equal_proposals")]
    return rows


def _by_iterations(temperature: float, runs: int, seed: int) -> tuple[Rows, Rows]:
    """JS after so many iterations without burn-in, and the elements drawn at T = 0.25; steps of 1, length 2.5."""
    samplers: dict[str, Sampler] = {"vs": voronoi(2.5), "hmc": hmc(1.0), "mucola": mucola(1.0)}
    target = toy(temperature)
    rows: Rows = []
    elements: Rows = []
    for name, sampler in samplers.items():
        for iterations, done in run_iterations(target, sampler, runs, ITERATIONS, seed + 2).items():
            js = divergence(target, done)
            row = {"temperature": temperature, "sampler": name, "iterations": iterations}
            rows.append({**row, "js_mean": js.mean, "js_low": js.low, "js_high": js.high})
            elements.append({**row, "share": (done.counts / iterations).mean(0).tolist()})
    elements.append({"sampler": "truth", "share": target.probabilities().tolist()})
    return rows, elements if temperature == 0.25 else []


def _tuning(sampler: Sampler, thin: int) -> str:
    size = sampler.length if isinstance(sampler, SVS) else sampler.step_size  # type: ignore[attr-defined]
    return f"{'length' if isinstance(sampler, SVS) else 'step'} {size:g} × {thin} a draw"


def _markdown(rows: list[dict[str, Any]], iterations: list[dict[str, Any]], runs: int, seed: int) -> str:
    parts = [
        "# Toy: four cells in the plane",
        f"Mean JS divergence in nats with 95 % intervals over {runs} independent runs of {BURN_IN} burn-in iterations "
        f"({SHORT_BURN_IN} except at the paper's settings) and {DRAWS} draws; seed {seed}. Evaluations and proposals "
        "are per run, burn-in included. A proposal is an event of VS and a step of the others. VS remembers the last "
        f"eight states it has evaluated, here all there are. Budget at equal cost: {BUDGET}.",
    ]
    settings = dict.fromkeys(row["setting"] for row in rows)
    for setting in settings:
        body = [
            [
                row["temperature"],
                row["sampler"],
                row["js_mean"],
                f"{row['js_low']:.3g} – {row['js_high']:.3g}",
                row["energy_evaluations"],
                row["proposals"],
                row["tuning"],
            ]
            for row in rows
            if row["setting"] == setting
        ]
        header = ["T", "sampler", "JS", "95 %", "evaluations", "proposals", "tuning"]
        parts += [f"## {setting}", table(header, body)]
    body = [[r["temperature"], r["sampler"], r["iterations"], r["js_mean"]] for r in iterations]
    parts += ["## By iterations (no burn-in)", table(["T", "sampler", "iterations", "JS"], body)]
    pictures = ("toy_trajectory", "toy", "toy_iterations", "toy_elements")
    parts += [f"![{name}]({name}.png)" for name in pictures]
    return "\n\n".join(parts)
