"""Several controls at once, and a regular expression alone: guided and svs+refresh beside exact rejection."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from structured_voronoi.controls.labels import label
from structured_voronoi.controls.texts import keyword, regex
from structured_voronoi.core.contracts import Control, is_independent
from structured_voronoi.engine.sampling import start_chains
from structured_voronoi.experiments.control.foods import train_food_guide
from structured_voronoi.experiments.control.guiding import fit_guided
from structured_voronoi.experiments.control.task import ClassifierRecipes
from structured_voronoi.experiments.report import table, write_report
from structured_voronoi.experiments.text.models import TextSettings, model_name, prepare_model, report_name
from structured_voronoi.metrics.divergence import difference
from structured_voronoi.samplers.registry import text_sampler
from structured_voronoi.targets.language_model import load
from structured_voronoi.targets.text import TextTarget
from structured_voronoi.workers.parallel import map_tasks

ONE_REGEX = "a regular expression"
CASES = ("three controls", ONE_REGEX)
REJECTION, GUIDED, CHAINS, ANCESTRAL = SAMPLERS = ("rejection", "guided", "svs+refresh", "ancestral")


@dataclass(frozen=True)
class Settings:
    runs: int = 400
    """Texts of every sampler in both cases."""
    seed: int = 0
    data: str | None = None
    progress: bool = True
    workers: int | None = None
    text: TextSettings = field(default_factory=TextSettings)
    classifiers: ClassifierRecipes = field(default_factory=ClassifierRecipes)
    steps: int = 120
    """Of SVS and Refresh under three controls: where two words must be there, few redraws are accepted."""
    regex_steps: int = 40
    """The same under the regular expression."""
    pilot: int = 4096
    """Texts that the lookahead of guided sampling learns from."""
    base_texts: int = 4000
    """Ancestral ones, for the base rate."""
    words: tuple[str, str] = ("family", "riverside")
    """Two of the three controls: a keyword, and a word that a regular expression asks for."""
    places: tuple[str, ...] = ("pub", "coffee shop")
    """Of which the other regular expression asks for one."""


def make_controls(case: str, guide: str, settings: Settings) -> list[Control]:
    """The controls of a case; ``guide`` is the classifier of food, by name or folder."""
    if case == ONE_REGEX:
        return [regex(rf"(?i)\b({'|'.join(settings.places)})\b")]
    first, second = settings.words
    return [label(guide, "Italian", weight=1.5), keyword(first), regex(rf"(?i)\b{second}\b")]


def run(settings: Settings, out: Path) -> list[Path]:
    """Every sampler in both cases, and how they differ from rejection."""
    data, progress, length = settings.data, settings.progress, settings.text.length
    model, guide = prepare_model(data, settings.text.recipe, progress), "food"
    if data is not None:
        guide = train_food_guide(data, model, settings.classifiers, length, progress)
    tasks = [(case, name) for case in CASES for name in SAMPLERS]
    work = partial(_draw, model=model, guide=guide, settings=settings)
    drawn = dict(zip(tasks, map_tasks(work, tasks, "combined", progress, settings.workers), strict=True))
    rows = [
        _compare(case, name, drawn[case, name], drawn[case, REJECTION], drawn[case, ANCESTRAL])
        for case in CASES
        for name in (GUIDED, CHAINS)
    ]
    results = {"runs": settings.runs, "seed": settings.seed, "rows": rows, "model": model_name(data)}
    return write_report(out, report_name("combined", data), results, _markdown(results, settings), {})


def _draw(task: tuple[str, str], model: str, guide: str, settings: Settings) -> dict[str, Any]:
    """Energies of the draws, and which of them satisfy every control."""
    case, name = task
    lm = TextTarget(load(model), max_tokens=settings.text.length)
    target, sampler = lm.under(make_controls(case, guide, settings)), text_sampler(name)
    begun, steps = process_time(), settings.regex_steps if case == ONE_REGEX else settings.steps
    if name == GUIDED:
        (sampler, share), steps = fit_guided(target, settings.pilot, settings.seed), 1
    pilot, begun = process_time() - begun, process_time()
    if name == ANCESTRAL:
        chains = start_chains(lm, sampler, settings.base_texts, settings.seed + 1)
    else:
        chains = start_chains(target, sampler, settings.runs, settings.seed)
    *_, (state, info) = islice(chains, 1 if is_independent(sampler) else steps)
    seconds = process_time() - begun
    scores = target.control_log_probs(state.tokens)
    met = np.all([score.exp().numpy() > 0.5 for score in scores.values()], axis=0)
    return {
        "energies": info.energy.double().tolist(),
        "met": met.tolist(),
        "seconds": seconds,
        "pilot": pilot,
        "share": share if name == GUIDED else None,
        "tries": float(info.evaluations.double().mean()),
        "example": lm.decode(state.tokens[int(met.argmax())]),
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
        f"Model: {results['model']}, N = {settings.text.length}, seed {results['seed']}; {results['runs']} texts of "
        f"each, {settings.steps} and {settings.regex_steps} steps of SVS and Refresh, a pilot of {settings.pilot:,} "
        f"texts for guided. A text succeeds if every control gives it more than ½; the base rate is that of "
        f"{settings.base_texts:,} ancestral texts. Three controls: food = Italian (weight 1.5), the word "
        f"{settings.words[0]}, the word {settings.words[1]}. The regular expression asks for a "
        f"{' or a '.join(settings.places)}. Differences are from rejection, ± standard error; seconds are of one core, "
        "those of a pilot apart. An effective guided text takes 1/share evaluations, one of rejection as many as tries."
    )
    body = [
        [
            row["case"],
            row["sampler"],
            f"{row['base_rate']:.2%}",
            _format_both(row["met"], row["met_difference"]),
            _format_both(row["energy"], row["energy_difference"]),
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
        "success: its / rejection's",
        "energy: its / rejection's",
        "KS p",
        "seconds: its (+ pilot) / rejection's",
        "evaluations an effective text",
        "tries of rejection",
    ]
    return "\n\n".join(["# Controls together", intro, table(header, body)])


def _format_both(values: list[float], apart: tuple[float, float]) -> str:
    return f"{values[0]:.3f} / {values[1]:.3f} ({apart[0]:+.3f} ± {apart[1]:.3f})"
