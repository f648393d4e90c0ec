"""Controls that are met by one text in ten to one in ten million: what a text costs by every method, and a race."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from structured_voronoi.experiments.control.foods import train_food_guide
from structured_voronoi.experiments.control.rare_cases import (
    BOOTSTRAP,
    CHAINS,
    GENLM,
    GUIDED,
    REJECTION,
    SMC,
    Budget,
    Case,
    Models,
    Truth,
)
from structured_voronoi.experiments.control.rare_costs import measure_costs
from structured_voronoi.experiments.control.rare_race import RACERS, race
from structured_voronoi.experiments.control.task import ClassifierRecipes
from structured_voronoi.experiments.report import COLOURS, new_figure, table, write_report
from structured_voronoi.experiments.text.models import TextSettings, model_name, prepare_model, report_name
from structured_voronoi.workers.parallel import map_tasks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CASES = (
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
PICTURED = {method: COLOURS[method] for method in (REJECTION, CHAINS, GUIDED)}
PICTURED |= {SMC: "#4a6fa5", BOOTSTRAP: "#b07aa1", GENLM: "#e0a030"}
"""The methods in the picture and their colours."""
INEXACT = (SMC, BOOTSTRAP, GENLM)
SPREAD = (100, 1000)
"""Texts over which the seconds of a pilot are spread."""


@dataclass(frozen=True)
class Settings:
    runs: int = 2048
    """Weighted texts of each case, from which the probability and the effective share come."""
    seed: int = 0
    data: str | None = None
    progress: bool = True
    workers: int | None = None
    text: TextSettings = field(default_factory=TextSettings)
    classifiers: ClassifierRecipes = field(default_factory=ClassifierRecipes)
    cases: tuple[Case, ...] = CASES
    race_rates: tuple[float, ...] = (0.05, 0.004, 0.0003)
    """The race is run on the words whose probabilities are nearest to these."""
    budget: Budget = field(default_factory=Budget)


def run(settings: Settings, out: Path) -> list[Path]:
    """The cost of every method in every case, then the race."""
    data, progress = settings.data, settings.progress
    budget = replace(settings.budget, length=settings.text.length, weighted=settings.runs, seed=settings.seed)
    models = _prepare_models(settings)
    work = partial(measure_costs, models=models, budget=budget)
    measured = map_tasks(work, settings.cases, "costs", progress, settings.workers)
    tasks = [
        (case, Truth(*found["truth"]), method) for case, found in _race_cases(settings, measured) for method in RACERS
    ]
    raced = map_tasks(partial(race, models=models, budget=budget), tasks, "race", progress, settings.workers)
    results = {"runs": settings.runs, "seed": settings.seed, "model": model_name(data), "cases": measured}
    results |= {"race": raced, "race_seconds": budget.race_seconds}
    name = report_name("rare", data)
    return write_report(out, name, results, _markdown(results, budget), {name: _picture(measured)})


def _prepare_models(settings: Settings) -> Models:
    """FUDGE's predictor is there if `topic` has been run on the same data."""
    data = settings.data
    model = prepare_model(data, settings.text.recipe, settings.progress)
    if data is None:
        return Models(model, "food", None)
    guide = train_food_guide(data, model, settings.classifiers, settings.text.length, settings.progress)
    prefix = Path(guide).parent / "prefix"
    return Models(model, guide, str(prefix) if prefix.is_dir() else None)


def _race_cases(settings: Settings, measured: list[dict[str, Any]]) -> list[tuple[Case, dict[str, Any]]]:
    """For each rate the words whose probability is nearest, on the scale of logarithms; none twice."""
    words = [
        (case, found)
        for case, found in zip(settings.cases, measured, strict=True)
        if case.kind == "words" and "probability" in found
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
        f"{results['runs']:,} weighted guided texts, with its 95 % interval; the pilot of guided and smc is the fit of "
        f"a lookahead on {budget.pilot:,} texts. Energy: the difference of its mean from that of the weighted texts, ± "
        "standard error. What counts as an effective text:"
    )
    effective = [
        "* guided: 1/share weighted texts, share being (Σw)² / (n Σw²);",
        "* rejection: an accepted text; where it says extrapolated, from P and the time of a try;",
        f"* svs+refresh: an effective sample of the energy, in the second half of {budget.chains} chains that ran for "
        f"{budget.chain_seconds:g} s; the search for a start and the first half are its pilot;",
        f"* particles ({budget.particles} a system, resampled below an effective share of {budget.threshold:g}) and "
        "FUDGE, which are not exact: a distinct text among those that they end with. Relatives that differ by a token "
        "count in full, so that this cost is a lower bound, and no match for the others.",
    ]
    parts = ["# Rare controls", intro, "\n".join(effective)]
    for found in results["cases"]:
        parts += [f"## {found['case']}", *_case_parts(found)]
    parts += ["## Race", _race_intro(results, budget), _race_table(results)]
    return "\n\n".join(parts)


def _case_parts(found: dict[str, Any]) -> list[str]:
    if "failed" in found:
        return [f"Not measured: {found['failed']}."]
    p = found["probability"]
    said = (
        f"P = {p['value']:.2g} ({p['low']:.2g} – {p['high']:.2g}); effective share {p['effective_share']:.2g}, largest "
        f"weight {p['largest_share']:.1%}, {'reliable' if p['reliable'] else 'unreliable'}."
    )
    header = ["method", "evaluations", "seconds", "pilot, s"]
    header += [f"seconds with pilot, {texts:,} texts" for texts in SPREAD]
    header += ["satisfied", "energy", "distinct", "note"]
    body = [
        [
            row["method"],
            row.get("evaluations", ""),
            row.get("seconds", ""),
            row.get("pilot", ""),
            *(row["seconds"] + row["pilot"] / texts if "seconds" in row else "" for texts in SPREAD),
            row.get("met", ""),
            _format_gap(row),
            f"{row['distinct']} of {row['texts']}" if "distinct" in row else "",
            row.get("note", ""),
        ]
        for row in found["rows"]
    ]
    return [said, table(header, body)]


def _race_intro(results: dict[str, Any], budget: Budget) -> str:
    return (
        f"Every method draws for {results['race_seconds']:g} seconds of one core, its pilot included. Energy: the "
        "difference of its mean from that of the weighted guided texts above, ± standard error (over chains of guided, "
        f"systems of particles, texts of rejection). Guided has {budget.chains} chains; the systems of particles have "
        f"{budget.particles}."
    )


def _race_table(results: dict[str, Any]) -> str:
    probabilities = {found["case"]: found["probability"]["value"] for found in results["cases"] if "rows" in found}
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


def _picture(measured: list[dict[str, Any]]) -> Figure:
    """Cost against base rate: a line through the words, dashed if not exact; hollow points are extrapolated."""
    figure, axes = new_figure(10, 4.2, ncols=2)
    labels = ("evaluations per effective text", f"seconds per effective text, pilot over {SPREAD[0]} texts")
    for axis, label in zip(axes, labels, strict=True):
        for method, colour in PICTURED.items():
            points = sorted(
                (
                    found["probability"]["value"],
                    row["evaluations"] if axis is axes[0] else row["seconds"] + row["pilot"] / SPREAD[0],
                    found["kind"] == "words",
                    "note" in row,
                )
                for found in measured
                for row in found.get("rows", ())
                if row["method"] == method and "seconds" in row
            )
            if not points:
                continue
            line = [point[:2] for point in points if point[2]]
            style = "--" if method in INEXACT else "-"
            axis.plot([rate for rate, _ in line], [cost for _, cost in line], style, color=colour, label=method)
            for rate, cost, is_words, is_extrapolated in points:
                face, marker = "white" if is_extrapolated else colour, "o" if is_words else "D"
                axis.plot(rate, cost, marker, markersize=5, markerfacecolor=face, markeredgecolor=colour)
        axis.set(xscale="log", yscale="log", xlabel="probability of the control", ylabel=label)
        axis.invert_xaxis()
    axes[0].legend(fontsize=8, frameon=False)
    return figure
