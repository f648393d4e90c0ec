"""Three controls together, and a regular expression alone: guided and svs+refresh compared with exact rejection."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from structured_voronoi.controls.texts import regex
from structured_voronoi.core.contracts import Control, is_independent
from structured_voronoi.engine.sampling import start_chains
from structured_voronoi.experiments.control.foods import food_guide, three_controls
from structured_voronoi.experiments.control.guiding import fit_guided, satisfies_all
from structured_voronoi.experiments.control.task import ClassifierRecipes
from structured_voronoi.experiments.report import table, write_report
from structured_voronoi.experiments.text.models import TextSettings, model_name, prepare_model, report_name
from structured_voronoi.metrics.divergence import difference
from structured_voronoi.samplers.registry import text_sampler
from structured_voronoi.targets.language_model import load
from structured_voronoi.targets.text import TextTarget
from structured_voronoi.workers.parallel import map_tasks

CASES = ("three controls", "a regular expression")


@dataclass(frozen=True)
class Settings:
    runs: int = 400
    """Texts per sampler and case."""
    seed: int = 0
    data: str | None = None
    progress: bool = True
    workers: int | None = None
    text: TextSettings = field(default_factory=TextSettings)
    classifiers: ClassifierRecipes = field(default_factory=ClassifierRecipes)
    steps: int = 120
    """Steps of svs+refresh under three controls, of which few redraws satisfy all."""
    regex_steps: int = 40
    """Steps of svs+refresh under the regular expression."""
    pilot: int = 4096
    """Texts on which the lookahead of guided sampling is fitted."""
    base_texts: int = 4000
    """Ancestral texts for the base rate."""
    words: tuple[str, str] = ("family", "riverside")
    """The keyword and the word of the regular expression among the three controls."""
    places: tuple[str, ...] = ("pub", "coffee shop")
    """Alternatives of the regular expression that is used alone."""


def make_controls(case: str, guide: str, settings: Settings) -> list[Control]:
    """The controls of a case; ``guide`` is the classifier of food, by name or folder."""
    if case == CASES[1]:
        return [regex(rf"(?i)\b({'|'.join(settings.places)})\b")]
    return three_controls(guide, settings.words)


def run(settings: Settings, out: Path) -> list[Path]:
    """Run every sampler in both cases and compare with rejection."""
    data, progress = settings.data, settings.progress
    model = prepare_model(data, settings.text.recipe, progress)
    guide = food_guide(data, model, settings.classifiers, settings.text.length, progress)
    tasks = [(case, name) for case in CASES for name in ("rejection", "guided", "svs+refresh", "ancestral")]
    work = partial(_draw, model=model, guide=guide, settings=settings)
    drawn = dict(zip(tasks, map_tasks(work, tasks, "combined", progress, settings.workers), strict=True))
    rows = [
        _compare(case, name, drawn[case, name], drawn[case, "rejection"], drawn[case, "ancestral"])
        for case in CASES
        for name in ("guided", "svs+refresh")
    ]
    results = {"runs": settings.runs, "seed": settings.seed, "rows": rows, "model": model_name(data)}
    return write_report(out, report_name("combined", data), results, _markdown(results, settings), {})


def _draw(task: tuple[str, str], model: str, guide: str, settings: Settings) -> dict[str, Any]:
    """Energies of the draws, and which of them satisfy all controls."""
    case, name = task
    text = TextTarget(load(model), max_tokens=settings.text.length)
    target, sampler = text.under(make_controls(case, guide, settings)), text_sampler(name)
    began, share = process_time(), None
    if name == "guided":
        sampler, share = fit_guided(target, settings.pilot, settings.seed)
    pilot, began = process_time() - began, process_time()
    if name == "ancestral":
        chains = start_chains(text, sampler, settings.base_texts, settings.seed + 1)
    else:
        chains = start_chains(target, sampler, settings.runs, settings.seed)
    steps = 1 if is_independent(sampler) else settings.regex_steps if case == CASES[1] else settings.steps
    *_, (state, info) = islice(chains, steps)
    seconds = process_time() - began
    met = satisfies_all(target, state.tokens)
    return {
        "energies": info.energy.double().tolist(),
        "met": met.tolist(),
        "seconds": seconds,
        "pilot": pilot,
        "share": share,
        "tries": float(info.evaluations.double().mean()),
        "example": text.decode(state.tokens[int(met.long().argmax())]),
    }


def _compare(
    case: str, name: str, drawn: dict[str, Any], rejection: dict[str, Any], ancestral: dict[str, Any]
) -> dict[str, Any]:
    from scipy import stats

    energies = [np.array(draws["energies"]) for draws in (drawn, rejection)]
    met = [np.array(draws["met"], dtype=float) for draws in (drawn, rejection)]
    return {
        "case": case,
        "sampler": name,
        "base_rate": float(np.mean(ancestral["met"])),
        "met": [float(values.mean()) for values in met],
        "met_difference": difference(*met),
        "energy": [float(values.mean()) for values in energies],
        "energy_difference": difference(*energies),
        "ks_p": float(stats.ks_2samp(*energies).pvalue),
        "seconds": [drawn["seconds"], rejection["seconds"]],
        "pilot": drawn["pilot"],
        "evaluations": 1 / drawn["share"] if drawn["share"] else None,
        "tries": rejection["tries"],
        "example": drawn["example"],
    }


def _markdown(results: dict[str, Any], settings: Settings) -> str:
    intro = (
        f"Model: {results['model']}, N = {settings.text.length}, seed {results['seed']}; {results['runs']} texts per "
        f"sampler, {settings.steps} and {settings.regex_steps} steps of svs+refresh, a pilot of {settings.pilot:,} "
        f"texts for guided. Success: every control gives the text a probability above ½. Base rate: success of "
        f"{settings.base_texts:,} ancestral texts. Three controls: food = Italian (weight 1.5), the word "
        f"{settings.words[0]}, the word {settings.words[1]}. The regular expression matches "
        f"{' or '.join(settings.places)}. Differences are from rejection, ± standard error. Seconds are of one core; "
        "pilots are listed separately. An effective guided text takes 1/(effective share) evaluations."
    )
    body = [
        [
            row["case"],
            row["sampler"],
            f"{row['base_rate']:.2%}",
            _format_pair(row["met"], row["met_difference"]),
            _format_pair(row["energy"], row["energy_difference"]),
            row["ks_p"],
            f"{row['seconds'][0]:.0f} (+ {row['pilot']:.0f}) / {row['seconds'][1]:.0f}",
            f"{row['evaluations']:.1f}" if row["evaluations"] else "",
            row["tries"],
        ]
        for row in results["rows"]
    ]
    header = [
        "case",
        "sampler",
        "base rate",
        "success: sampler / rejection",
        "energy: sampler / rejection",
        "KS p",
        "seconds: sampler (+ pilot) / rejection",
        "evaluations per effective text",
        "tries per text of rejection",
    ]
    return "\n\n".join(["# Combined controls", intro, table(header, body)])


def _format_pair(values: list[float], difference_and_error: tuple[float, float]) -> str:
    """Two values, their difference and its standard error."""
    gap, error = difference_and_error
    return f"{values[0]:.3f} / {values[1]:.3f} ({gap:+.3f} ± {error:.3f})"
