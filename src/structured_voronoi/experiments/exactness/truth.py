"""Truth at the scale of a language model: the bundled model over eight tokens and four positions, all texts listed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from structured_voronoi.contracts import Control, Sampler, is_independent
from structured_voronoi.controls.classifier import Classifier
from structured_voronoi.controls.predicate import Predicate
from structured_voronoi.experiments.report import table, write_report
from structured_voronoi.run.workers import side_by_side
from structured_voronoi.samplers.cycle import Cycle
from structured_voronoi.samplers.gwg import GibbsWithGradients
from structured_voronoi.samplers.pncg import PNCG
from structured_voronoi.samplers.refresh import Refresh
from structured_voronoi.samplers.rejection import Rejection
from structured_voronoi.samplers.svs import SVS
from structured_voronoi.targets.controlled import Controlled
from structured_voronoi.targets.language_model import LanguageModel
from structured_voronoi.targets.tabular import AutoregressiveTable
from structured_voronoi.verify.stationary import stationarity
from structured_voronoi.verify.twins import OutwardOnly

PROMPT, LENGTH = "The Old Mill is a", 4
WORDS = (" cheap", " expensive", " pub", " restaurant", " diner", " place", " and", " a")
DIMENSIONS = len(WORDS) - 1
"""Eight points span seven dimensions: nothing is lost."""
NO_CONTROL = "none"


def _samplers() -> dict[str, Sampler]:
    svs, refresh = SVS(0.5, dimensions=DIMENSIONS), Refresh(block=2, suffix=False)
    return {
        "svs": svs,
        "pncg": PNCG(4.0),
        "gwg": GibbsWithGradients(),
        "refresh": refresh,
        "svs+refresh": Cycle(svs, refresh),
        "twin: outward only": OutwardOnly(0.5, dimensions=DIMENSIONS),
    }


def _controlled_samplers() -> dict[str, Sampler]:
    plain = _samplers()
    names = ("svs", "refresh", "svs+refresh", "twin: outward only")
    return {name: plain[name] for name in names} | {"rejection": Rejection(wave=4096)}


@dataclass(frozen=True)
class Settings:
    runs: int = 20_000
    """Chains of each sampler, started at the truth."""
    seed: int = 4
    progress: bool = True
    workers: int | None = None
    steps: int = 12
    words: tuple[str, ...] = WORDS
    samplers: dict[str, Sampler] = field(default_factory=_samplers)
    controlled_samplers: dict[str, Sampler] = field(default_factory=_controlled_samplers)


def score_pubs(text: str) -> float:
    """A black box: a probability, and no gradient."""
    return 0.9 if "pub" in text else 0.3


def controls() -> dict[str, Control]:
    return {"classifier": Classifier.load("price", "expensive"), "black box": Predicate(score_pubs, "pubs")}


@cache
def tabulated(control: str = NO_CONTROL, words: tuple[str, ...] = WORDS) -> AutoregressiveTable:
    """All texts of the words, scored once by the model and a control, with its own guidance; float64 from here on."""
    loaded, chosen = LanguageModel.load("bundled", length=LENGTH), controls().get(control)
    tokens = torch.tensor([loaded.tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in words])
    model = LanguageModel(loaded.model, loaded.tokenizer, PROMPT, LENGTH, allowed=tokens.tolist())
    texts = tokens[torch.cartesian_prod(*[torch.arange(len(words))] * LENGTH)]
    target = model if chosen is None else Controlled(model, {chosen: 1.0})
    log_prob, (total, guide) = model.log_prob(texts).double(), target.log_prob_and_guide(texts)
    shape = (len(words),) * LENGTH
    return AutoregressiveTable(
        model.embeddings[tokens].double(),
        (log_prob - log_prob.logsumexp(0)).view(shape),
        guide.view(*shape, LENGTH, -1).double(),
        None if chosen is None else (total.double() - log_prob).view(shape),
    )


def run(settings: Settings, out: Path) -> list[Path]:
    """Every sampler on the model alone and under each control."""
    tasks = [(NO_CONTROL, sampler) for sampler in settings.samplers.items()]
    tasks += [(control, sampler) for control in controls() for sampler in settings.controlled_samplers.items()]
    work = partial(_check, settings=settings)
    rows = side_by_side(work, tasks, "truth", settings.progress, settings.workers)
    results: dict[str, Any] = {"runs": settings.runs, "seed": settings.seed, "steps": settings.steps}
    results |= {"prompt": PROMPT, "words": settings.words, "rows": rows}
    return write_report(out, "truth", results, _markdown(results), {})


def _check(task: tuple[str, tuple[str, Sampler]], settings: Settings) -> dict[str, Any]:
    control, (name, sampler) = task
    target, steps = tabulated(control, settings.words), 1 if is_independent(sampler) else settings.steps
    result = stationarity(sampler, target, settings.runs, steps, settings.seed)
    row = {"control": control, "sampler": name, "moved": result.moved}
    return row | {"p": result.p_value, "tv": result.tv, "z": result.z}


def _markdown(results: dict[str, Any]) -> str:
    words = results["words"]
    intro = (
        f"All {len(words)}^{LENGTH} texts of the tokens {', '.join(map(repr, words))} after “{PROMPT}”, by the bundled "
        f"model; {results['runs']:,} chains started at the truth, {results['steps']} steps, seed {results['seed']}. "
        "z is (TV − mean)/sd against 200 sets of as many independent draws; p is of the chi-square test, states pooled "
        "to expected counts of at least 5."
    )
    body = [
        [row["control"], row["sampler"], f"{row['moved']:.0%}", row["p"], row["tv"], row["z"]]
        for row in results["rows"]
    ]
    header = ["control", "sampler", "moved", "p", "TV", "z"]
    return "\n\n".join(["# Truth over listed texts", intro, table(header, body)])
