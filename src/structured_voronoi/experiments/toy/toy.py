"""The paper's toy target, four square cells in the plane (figures 1, 2, 5, 6), at its settings and at equal cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from structured_voronoi.experiments.report import table, write_report
from structured_voronoi.experiments.toy.pictures import (
    elements_picture,
    iterations_picture,
    js_picture,
    trajectory_picture,
)
from structured_voronoi.experiments.toy.runs import (
    Runs,
    divergence,
    independent_runs,
    run_chains,
    run_iterations,
)
from structured_voronoi.experiments.toy.samplers import (
    ToySampler,
    describe_setting,
    hmc,
    mucola,
    voronoi,
    voronoi_as_printed,
)
from structured_voronoi.targets.categorical import toy
from structured_voronoi.workers.parallel import map_tasks

Rows = list[dict[str, Any]]
Grid = list[tuple[ToySampler, tuple[int, ...]]]
"""Samplers, each with the numbers of steps per draw to try."""


def _long_trajectories() -> ToySampler:
    return voronoi(4.0)


def _paper_samplers() -> dict[str, ToySampler]:
    return {"vs": voronoi(0.1), "vs_paper": voronoi_as_printed(0.1), "hmc": hmc(0.1), "mucola": mucola(0.1)}


def _grids() -> dict[str, Grid]:
    step_sizes, few = (0.5, 1.0, 2.0, 4.0, 16.0), (1, 2, 3, 4, 5)
    return {
        "vs": [(voronoi(2.0), (1,)), (voronoi(2.5), (1,)), (_long_trajectories(), (1, 2, 4, 8))],
        "vs_paper": [(voronoi_as_printed(1.0), (1,))],
        "hmc": [(hmc(step), few) for step in step_sizes],
        "mucola": [(mucola(step), few) for step in step_sizes],
    }


@dataclass(frozen=True)
class Settings:
    runs: int = 256
    """Independent runs, one chain each."""
    seed: int = 0
    progress: bool = True
    workers: int | None = None
    temperatures: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
    draws: int = 200
    burn_in: int = 500
    """Burn-in steps at the paper's settings."""
    short_burn_in: int = 100
    """Burn-in steps at equal cost."""
    iterations: tuple[int, ...] = (100, 500, 1000)
    """Numbers of steps in the figures without burn-in."""
    paper_samplers: dict[str, ToySampler] = field(default_factory=_paper_samplers)
    grids: dict[str, Grid] = field(default_factory=_grids)
    """Settings of which the best within the budget is reported, by sampler."""
    long_trajectories: ToySampler = field(default_factory=_long_trajectories)
    """Sampler of the grid that is also reported for every number of trajectories per draw, whatever the cost."""

    @property
    def budget(self) -> int:
        """Energy evaluations, or proposals, per run at equal cost: one per burn-in step and draw."""
        return self.short_burn_in + self.draws


def run(settings: Settings, out: Path) -> list[Path]:
    """Compute all figures of the toy experiment."""
    work = partial(_run_temperature, settings=settings)
    parts = map_tasks(work, settings.temperatures, "toy", settings.progress, settings.workers)
    rows, iterations, elements = (list(chain.from_iterable(part)) for part in zip(*parts, strict=True))
    figures = {
        "toy_trajectory": trajectory_picture(),
        "toy": js_picture(rows, settings.budget),
        "toy_iterations": iterations_picture(iterations, settings.iterations),
        "toy_elements": elements_picture(elements, settings.iterations),
    }
    results: dict[str, Any] = {"runs": settings.runs, "seed": settings.seed}
    results |= {"rows": rows, "iterations": iterations, "elements": elements}
    return write_report(out, "toy", results, _markdown(rows, iterations, settings), figures)


def _run_temperature(temperature: float, settings: Settings) -> tuple[Rows, Rows, Rows]:
    rows = _run_paper_settings(temperature, settings) + _run_equal_cost(temperature, settings)
    return rows, *_run_without_burn_in(temperature, settings)


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


def _run_paper_settings(temperature: float, settings: Settings) -> Rows:
    """ε = α = 0.1, one step per draw, long burn-in."""
    target, runs, draws, seed = toy(temperature), settings.runs, settings.draws, settings.seed
    rows = [_row(temperature, "independent", "paper", independent_runs(target, runs, draws, seed))]
    for name, sampler in settings.paper_samplers.items():
        finished = run_chains(target, sampler, runs, settings.burn_in, draws, [1], seed)[1]
        rows.append(_row(temperature, name, "paper", finished, _tuning(sampler, 1)))
    return rows


def _run_equal_cost(temperature: float, settings: Settings) -> Rows:
    """Each sampler at its best setting within the budget of evaluations or proposals, and VS by trajectories."""
    target, runs, draws, seed = toy(temperature), settings.runs, settings.draws, settings.seed + 1
    burn_in = settings.short_burn_in
    rows: Rows = []
    for name, grid in settings.grids.items():
        within_budget: dict[str, Rows] = {"equal_evaluations": [], "equal_proposals": []}
        for sampler, steps_per_draw in grid:
            for every, finished in run_chains(target, sampler, runs, burn_in, draws, steps_per_draw, seed).items():
                # a proposal is an event of VS and a step of the others
                proposals = finished.events if name == "vs" else float(burn_in + draws * every)
                counted, tuning = finished._replace(events=proposals), _tuning(sampler, every)
                costs = {"equal_evaluations": counted.evaluations, "equal_proposals": proposals}
                for setting, cost in costs.items():
                    if cost <= 1.05 * settings.budget:
                        within_budget[setting].append(_row(temperature, name, setting, counted, tuning))
                if sampler == settings.long_trajectories:
                    rows.append(_row(temperature, "vs", f"trajectories_{every}", counted, tuning))
        for affordable in within_budget.values():
            best = min(affordable, key=lambda row: float(row["js_mean"]))
            tried = [[row["tuning"], row["js_mean"], row["energy_evaluations"]] for row in affordable]
            rows.append({**best, "tried": tried})
    floor = independent_runs(target, runs, draws, seed)
    rows += [_row(temperature, "independent", setting, floor) for setting in ("equal_evaluations", "equal_proposals")]
    return rows


def _run_without_burn_in(temperature: float, settings: Settings) -> tuple[Rows, Rows]:
    """JS by iterations, and the elements drawn at the lowest temperature; step size 1, length 2.5."""
    samplers: dict[str, ToySampler] = {"vs": voronoi(2.5), "hmc": hmc(1.0), "mucola": mucola(1.0)}
    target = toy(temperature)
    rows: Rows = []
    elements: Rows = []
    for name, sampler in samplers.items():
        by_iterations = run_iterations(target, sampler, settings.runs, settings.iterations, settings.seed + 2)
        for iterations, finished in by_iterations.items():
            js = divergence(target, finished)
            row = {"temperature": temperature, "sampler": name, "iterations": iterations}
            rows.append({**row, "js_mean": js.mean, "js_low": js.low, "js_high": js.high})
            elements.append({**row, "share": (finished.counts / iterations).mean(0).tolist()})
    elements.append({"sampler": "truth", "share": target.probabilities().tolist()})
    return rows, elements if temperature == min(settings.temperatures) else []


def _tuning(sampler: ToySampler, steps_per_draw: int) -> str:
    return f"{describe_setting(sampler)} × {steps_per_draw} per draw"


def _markdown(rows: Rows, iterations: Rows, settings: Settings) -> str:
    parts = [
        "# Toy: four cells in the plane",
        f"Mean JS divergence in nats with 95 % intervals over {settings.runs} independent runs of {settings.burn_in} "
        f"burn-in iterations ({settings.short_burn_in} at equal cost) and {settings.draws} draws; "
        f"seed {settings.seed}. Evaluations and proposals are per run, including burn-in. A proposal is an event of VS "
        "and a step of the others. VS caches the energies of eight states, which is all of them here. Budget at "
        f"equal cost: {settings.budget}.",
    ]
    for setting in dict.fromkeys(row["setting"] for row in rows):
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
    body = [[row["temperature"], row["sampler"], row["iterations"], row["js_mean"]] for row in iterations]
    parts += ["## By iterations (no burn-in)", table(["T", "sampler", "iterations", "JS"], body)]
    pictures = ("toy_trajectory", "toy", "toy_iterations", "toy_elements")
    parts += [f"![{name}]({name}.png)" for name in pictures]
    return "\n\n".join(parts)
