"""Cost per text of every method under controls with probabilities from 1e-1 to 1e-7, and a race between methods."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from structured_voronoi.experiments.control.foods import food_guide
from structured_voronoi.experiments.control.rare_cases import (
    Budget,
    Case,
    Models,
    Reference,
)
from structured_voronoi.experiments.control.rare_costs import measure_costs
from structured_voronoi.experiments.control.rare_race import RACE_METHODS, race
from structured_voronoi.experiments.control.task import ClassifierRecipes
from structured_voronoi.experiments.report import COLOURS, new_figure, table, write_report
from structured_voronoi.experiments.text.models import TextSettings, model_name, prepare_model, report_name
from structured_voronoi.workers.parallel import map_tasks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _cases() -> tuple[Case, ...]:
    return (
        Case("words", ("Italian",)),
        Case("words", ("Italian", "river")),
        Case("words", ("Italian", "riverside", "family")),
        Case("words", ("Italian", "river", "family")),
        Case("words", ("Italian", "river", "family", "pub")),
        Case("words", ("Italian", "river", "family", "pub", "cheap")),
        Case("pattern", (r"(?i)\b(pub|coffee shop)\b",)),
        Case("pattern", (r"(?i)^\w+ is .*(cheap|family).*river",)),
        Case("pattern", (r"^The .* (bridge|river)\b.*\bpub\b",)),
        Case("classifier", weight=1.5),
        Case("classifier", weight=4.0),
        Case("black box", ("family", "riverside", "city", "rating", "pub")),
        Case("three at once", ("family", "riverside"), weight=1.5),
    )


@dataclass(frozen=True)
class Settings:
    runs: int = 2048
    """Weighted texts per case, from which probability and effective share are computed."""
    seed: int = 0
    data: str | None = None
    progress: bool = True
    workers: int | None = None
    text: TextSettings = field(default_factory=TextSettings)
    classifiers: ClassifierRecipes = field(default_factory=ClassifierRecipes)
    cases: tuple[Case, ...] = field(default_factory=_cases)
    race_rates: tuple[float, ...] = (0.05, 0.004, 0.0003)
    """The race uses the keyword cases with the probabilities closest to these."""
    budget: Budget = field(default_factory=Budget)


def run(settings: Settings, out: Path) -> list[Path]:
    """Measure the cost of every method in every case, then run the race."""
    data, progress = settings.data, settings.progress
    budget = replace(settings.budget, length=settings.text.length, weighted=settings.runs, seed=settings.seed)
    models = _prepare_models(settings)
    work = partial(measure_costs, models=models, budget=budget)
    measured = map_tasks(work, settings.cases, "costs", progress, settings.workers)
    tasks = [
        (case, Reference(*result["truth"]), method)
        for case, result in _race_cases(settings, measured)
        for method in RACE_METHODS
    ]
    raced = map_tasks(partial(race, models=models, budget=budget), tasks, "race", progress, settings.workers)
    results = {"runs": settings.runs, "seed": settings.seed, "model": model_name(data), "cases": measured}
    results |= {"race": raced, "race_seconds": budget.race_seconds}
    name = report_name("rare", data)
    return write_report(out, name, results, _markdown(results, budget), {name: _picture(measured, budget)})


def _prepare_models(settings: Settings) -> Models:
    """The models; FUDGE's prefix classifier exists if `topic` was run on the same data."""
    data = settings.data
    model = prepare_model(data, settings.text.recipe, settings.progress)
    guide = food_guide(data, model, settings.classifiers, settings.text.length, settings.progress)
    if data is None:
        return Models(model, guide, None)
    prefix = Path(guide).parent / "prefix"
    return Models(model, guide, str(prefix) if prefix.is_dir() else None)


def _race_cases(settings: Settings, measured: list[dict[str, Any]]) -> list[tuple[Case, dict[str, Any]]]:
    """For each rate the keyword case with the closest log-probability, each case at most once."""
    words = [
        (case, result)
        for case, result in zip(settings.cases, measured, strict=True)
        if case.kind == "words" and "probability" in result
    ]
    chosen = []
    for rate in settings.race_rates:
        words.sort(key=lambda pair: abs(math.log(pair[1]["probability"]["value"] / rate)))
        chosen += words[:1]
        words = words[1:]
    return chosen


def _markdown(results: dict[str, Any], budget: Budget) -> str:
    intro = (
        f"Model: {results['model']}, N = {budget.length}, seed {results['seed']}; seconds are of one core. P is from "
        f"{results['runs']:,} weighted guided texts, with its 95 % interval. The pilot of guided and smc fits a "
        f"lookahead on {budget.pilot:,} texts. Energy: mean minus that of the weighted texts, ± standard error. "
        "Effective texts:"
    )
    effective = [
        "* guided: one in 1/share weighted texts, with share = (Σw)² / (n Σw²);",
        "* rejection: an accepted text; extrapolated costs are computed from P and the seconds of a try;",
        f"* svs+refresh: an effective sample of the energy in the second half of {budget.chains} chains of "
        f"{budget.chain_seconds:g} s; finding a start and the first half count as its pilot;",
        f"* particles ({budget.particles} per system, resampled below an effective share of {budget.threshold:g}) and "
        "FUDGE, which are not exact: a distinct final text. Texts that differ by one token count as distinct, so this "
        "cost is a lower bound and not comparable with the others.",
    ]
    parts = ["# Rare controls", intro, "\n".join(effective)]
    for result in results["cases"]:
        parts += [f"## {result['case']}", *_case_parts(result, budget.pilot_spread)]
    parts += ["## Race", _race_intro(results, budget), _race_table(results)]
    return "\n\n".join(parts)


def _case_parts(result: dict[str, Any], pilot_spread: tuple[int, int]) -> list[str]:
    if "failed" in result:
        return [f"Not measured: {result['failed']}."]
    p = result["probability"]
    summary = (
        f"P = {p['value']:.2g} ({p['low']:.2g} – {p['high']:.2g}); effective share {p['effective_share']:.2g}, largest "
        f"weight {p['largest_share']:.1%}, {'reliable' if p['reliable'] else 'unreliable'}."
    )
    header = ["method", "evaluations", "seconds", "pilot, s"]
    header += [f"seconds with pilot / {texts:,}" for texts in pilot_spread]
    header += ["satisfied", "energy", "distinct", "note"]
    body = [
        [
            row["method"],
            row.get("evaluations", ""),
            row.get("seconds", ""),
            row.get("pilot", ""),
            *(row["seconds"] + row["pilot"] / texts if "seconds" in row else "" for texts in pilot_spread),
            row.get("met", ""),
            _format_gap(row),
            f"{row['distinct']} of {row['texts']}" if "distinct" in row else "",
            row.get("note", ""),
        ]
        for row in result["rows"]
    ]
    return [summary, table(header, body)]


def _race_intro(results: dict[str, Any], budget: Budget) -> str:
    return (
        f"Each method draws texts for {results['race_seconds']:g} seconds of one core, including its pilot. Energy: "
        "mean minus that of the weighted guided texts above, ± standard error (over chains of guided, systems of "
        f"particles, texts of rejection). Guided has {budget.chains} chains; a system has {budget.particles} particles."
    )


def _race_table(results: dict[str, Any]) -> str:
    probabilities = {result["case"]: result["probability"]["value"] for result in results["cases"] if "rows" in result}
    body = [
        [
            f"{row['case']} ({probabilities[row['case']]:.2g})",
            row["method"],
            row.get("seconds", ""),
            row.get("texts", ""),
            row.get("distinct", ""),
            row.get("met", ""),
            _format_gap(row),
            row.get("note", ""),
        ]
        for row in results["race"]
    ]
    return table(["case (P)", "method", "seconds", "texts", "distinct", "satisfied", "energy", "note"], body)


def _format_gap(row: dict[str, Any]) -> str:
    return "{:+.2f} ± {:.2f}".format(*row["gap"]) if "gap" in row else ""


def _picture(measured: list[dict[str, Any]], budget: Budget) -> Figure:
    """Cost by probability: lines through keyword cases, dashed for inexact methods; extrapolated points are hollow."""
    colours = {method: COLOURS[method] for method in ("rejection", "svs+refresh", "guided")}
    colours |= {"smc": "#4a6fa5", "bootstrap smc": "#b07aa1", "genlm-control": "#e0a030"}
    texts = budget.pilot_spread[0]
    figure, axes = new_figure(10, 4.2, ncols=2)
    labels = ("evaluations per effective text", f"seconds per effective text, with pilot / {texts}")
    for axis, label in zip(axes, labels, strict=True):
        for method, colour in colours.items():
            points = sorted(
                (
                    result["probability"]["value"],
                    row["evaluations"] if axis is axes[0] else row["seconds"] + row["pilot"] / texts,
                    result["kind"] == "words",
                    "note" in row,
                )
                for result in measured
                for row in result.get("rows", ())
                if row["method"] == method and "seconds" in row
            )
            if not points:
                continue
            line = [point[:2] for point in points if point[2]]
            style = "--" if method in ("smc", "bootstrap smc", "genlm-control") else "-"
            axis.plot([rate for rate, _ in line], [cost for _, cost in line], style, color=colour, label=method)
            for rate, cost, is_words, is_extrapolated in points:
                face, marker = "white" if is_extrapolated else colour, "o" if is_words else "D"
                axis.plot(rate, cost, marker, markersize=5, markerfacecolor=face, markeredgecolor=colour)
        axis.set(xscale="log", yscale="log", xlabel="probability of the control", ylabel=label)
        axis.invert_xaxis()
    axes[0].legend(fontsize=8, frameon=False)
    return figure
