"""Several controls at once, and a regular expression alone: SVS with refresh moves beside exact rejection."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from structured_voronoi.base import Control, Sampler, is_independent
from structured_voronoi.controls.classifier import Classifier
from structured_voronoi.controls.predicate import Predicate
from structured_voronoi.experiments.report import table, write_report
from structured_voronoi.experiments.text_models import LENGTH, experiment_model, model_name, named
from structured_voronoi.experiments.topic import topic_guide
from structured_voronoi.experiments.workers import side_by_side
from structured_voronoi.metrics.divergence import difference
from structured_voronoi.run.sampling import steps
from structured_voronoi.samplers.ancestral import Ancestral
from structured_voronoi.samplers.choices import text_sampler
from structured_voronoi.targets.controlled import Controlled
from structured_voronoi.targets.language_model import LanguageModel

CASES = ("three controls", "a regular expression")
STEPS = {CASES[0]: 120, CASES[1]: 40}
"""Of SVS and Refresh: where two words must be there, few redraws are accepted."""
BASE_TEXTS = 4000


def controls(case: str, guide: str | None) -> dict[Control, float]:
    """The food is by the bundled classifier, or by one trained for the user's model."""
    if case == CASES[1]:
        return {Predicate.regex(r"(?i)\b(pub|coffee shop)\b"): 1.0}
    food = Classifier.load("food" if guide is None else guide, "Italian")
    return {food: 1.5, Predicate.keyword("family"): 1.0, Predicate.regex(r"(?i)\briverside\b"): 1.0}


def run(out: Path, runs: int = 400, seed: int = 0, progress: bool = True, data: str | None = None) -> list[Path]:
    """``runs`` texts of both samplers in both cases."""
    model, guide = experiment_model(data, progress), None
    if data is not None:
        guide = topic_guide(data, progress)
    tasks = [(case, name) for case in CASES for name in ("rejection", "svs+refresh", "ancestral")]
    work = partial(_draw, model=model, guide=guide, runs=runs, seed=seed)
    found = dict(zip(tasks, side_by_side(work, tasks, "combined", progress), strict=True))
    rows = [
        _compared(case, {name: found[case, name] for name in ("rejection", "svs+refresh", "ancestral")})
        for case in CASES
    ]
    results = {"runs": runs, "seed": seed, "rows": rows, "model": model_name(data)}
    stem = named("combined", data)
    return write_report(out, stem, results, _markdown(results), {})


def _draw(task: tuple[str, str], model: str, guide: str | None, runs: int, seed: int) -> dict[str, Any]:
    """Energies of the draws, and which of them satisfy every control."""
    case, name = task
    lm = LanguageModel.load(model, length=LENGTH)
    target = Controlled(lm, controls(case, guide))
    if name == "ancestral":
        tokens, info = next(steps(lm, Ancestral(), BASE_TEXTS, seed + 1))
    else:
        sampler: Sampler = text_sampler(name)
        begun = process_time()
        *_, (tokens, info) = islice(steps(target, sampler, runs, seed), 1 if is_independent(sampler) else STEPS[case])
    scores = target.control_log_probs(tokens)
    met = np.all([score.exp().numpy() > 0.5 for score in scores.values()], axis=0)
    return {
        "energies": info.energy.double().tolist(),
        "met": met.tolist(),
        "seconds": 0.0 if name == "ancestral" else process_time() - begun,
        "tries": float(info.evaluations.double().mean()),
        "example": lm.decode(tokens[int(met.argmax())]),
    }


def _compared(case: str, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    from scipy import stats

    mine, truth = found["svs+refresh"], found["rejection"]
    energies = [np.array(one["energies"]) for one in (mine, truth)]
    met = [np.array(one["met"], dtype=float) for one in (mine, truth)]
    return {
        "case": case,
        "base_rate": float(np.mean(found["ancestral"]["met"])),
        "met": [float(one.mean()) for one in met],
        "met_difference": difference(*met),
        "energy": [float(one.mean()) for one in energies],
        "energy_difference": difference(*energies),
        "ks_p": float(stats.ks_2samp(*energies).pvalue),
        "seconds": [mine["seconds"], truth["seconds"]],
        "tries": truth["tries"],
        "example": mine["example"],
    }


def _markdown(results: dict[str, Any]) -> str:
    intro = (
        f"Model: {results['model']}, N = {LENGTH}, seed {results['seed']}; {results['runs']} texts of each, "
        f"{STEPS[CASES[0]]} and {STEPS[CASES[1]]} steps of SVS and Refresh. A text succeeds if every "
        "control gives it more than ½; the base rate is that of "
        f"{BASE_TEXTS:,} ancestral texts. Three controls: food = Italian (weight 1.5), the word family, the "
        "word riverside. The regular expression asks for a pub or a coffee shop. Differences are SVS minus rejection, "
        "± standard error; seconds are of one core."
    )
    body = [
        [
            row["case"],
            f"{row['base_rate']:.2%}",
            _both(row["met"], row["met_difference"]),
            _both(row["energy"], row["energy_difference"]),
            row["ks_p"],
            f"{row['seconds'][0]:.0f} / {row['seconds'][1]:.0f}",
            row["tries"],
        ]
        for row in results["rows"]
    ]
    header = [
        "case",
        "base rate",
        "success: SVS / rejection",
        "energy: SVS / rejection",
        "KS p",
        "seconds",
        "tries a text",
    ]
    return "\n\n".join(["# Controls together", intro, table(header, body)])


def _both(values: list[float], apart: tuple[float, float]) -> str:
    return f"{values[0]:.3f} / {values[1]:.3f} ({apart[0]:+.3f} ± {apart[1]:.3f})"
