"""Truth at the scale of a language model: the bundled model over eight tokens and four positions, all texts listed."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from structured_voronoi.base import Control, Sampler, is_independent
from structured_voronoi.controls.classifier import Classifier
from structured_voronoi.controls.predicate import Predicate
from structured_voronoi.experiments.checks import stationarity
from structured_voronoi.experiments.report import table, write_report
from structured_voronoi.experiments.twins import OutwardOnly
from structured_voronoi.experiments.workers import side_by_side
from structured_voronoi.samplers.cycle import Cycle
from structured_voronoi.samplers.gwg import GibbsWithGradients
from structured_voronoi.samplers.pncg import PNCG
from structured_voronoi.samplers.refresh import Refresh
from structured_voronoi.samplers.rejection import Rejection
from structured_voronoi.samplers.svs import SVS
from structured_voronoi.targets.controlled import Controlled
from structured_voronoi.targets.language_model import LanguageModel
from structured_voronoi.targets.tabular import AutoregressiveTable

PROMPT, LENGTH = "The Old Mill is a", 4
WORDS = (" cheap", " expensive", " pub", " restaurant", " diner", " place", " and", " a")
STEPS, NONE = 12, "none"
DIMENSIONS = len(WORDS) - 1
"""Eight points span seven dimensions: nothing is lost."""

BLOCKS = Refresh(block=2, suffix=False)
SAMPLERS: dict[str, Sampler] = {
    "svs": SVS(0.5, dimensions=DIMENSIONS),
    "pncg": PNCG(4.0),
    "gwg": GibbsWithGradients(),
    "refresh": BLOCKS,
    "svs+refresh": Cycle(SVS(0.5, dimensions=DIMENSIONS), BLOCKS),
    "twin: outward only": OutwardOnly(0.5, dimensions=DIMENSIONS),
}
UNDER_CONTROL = {name: SAMPLERS[name] for name in ("svs", "refresh", "svs+refresh", "twin: outward only")}
UNDER_CONTROL |= {"rejection": Rejection(wave=4096)}


def likes_pubs(text: str) -> float:
    """A black box: a probability, and no gradient."""
    return 0.9 if "pub" in text else 0.3


def controls() -> dict[str, Control]:
    return {"classifier": Classifier.load("price", "expensive"), "black box": Predicate(likes_pubs, "pubs")}


@cache
def tabulated(name: str = NONE) -> AutoregressiveTable:
    """Scored once by the model and a control, with the target's own guidance; float64 from here on."""
    loaded, control = LanguageModel.load("bundled", length=LENGTH), controls().get(name)
    tokens = torch.tensor([loaded.tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in WORDS])
    model = LanguageModel(loaded.model, loaded.tokenizer, PROMPT, LENGTH, allowed=tokens.tolist())
    texts = tokens[torch.cartesian_prod(*[torch.arange(len(WORDS))] * LENGTH)]
    target = model if control is None else Controlled(model, {control: 1.0})
    log_prob, (total, guide) = model.log_prob(texts).double(), target.log_prob_and_guide(texts)
    shape = (len(WORDS),) * LENGTH
    return AutoregressiveTable(
        model.embeddings[tokens].double(),
        (log_prob - log_prob.logsumexp(0)).view(shape),
        guide.view(*shape, LENGTH, -1).double(),
        None if control is None else (total.double() - log_prob).view(shape),
    )


def run(out: Path, runs: int = 20_000, seed: int = 4, progress: bool = True) -> list[Path]:
    """``runs`` chains of each sampler, started at the truth."""
    tasks = [(NONE, name) for name in SAMPLERS]
    tasks += [(control, name) for control in controls() for name in UNDER_CONTROL]
    rows = side_by_side(partial(_check, runs=runs, seed=seed), tasks, "truth", progress)
    results = {"runs": runs, "seed": seed, "steps": STEPS, "prompt": PROMPT, "words": WORDS, "rows": rows}
    return write_report(out, "truth", results, _markdown(results), {})


def _check(task: tuple[str, str], runs: int, seed: int) -> dict[str, Any]:
    control, name = task
    sampler = (SAMPLERS | UNDER_CONTROL)[name]
    found = stationarity(tabulated(control), sampler, runs, 1 if is_independent(sampler) else STEPS, seed)
    fit = found.fit
    return {"control": control, "sampler": name, "moved": found.moved, "p": fit.p_value, "tv": fit.tv, "z": fit.z}


def _markdown(results: dict[str, Any]) -> str:
    intro = (
        f"All {len(WORDS)}^{LENGTH} texts of the tokens {', '.join(map(repr, WORDS))} after “{PROMPT}”, by the bundled "
        f"model; {results['runs']:,} chains started at the truth, {STEPS} steps, seed {results['seed']}. z is (TV − "
        "mean)/sd against 200 sets of as many independent draws; p is of the chi-square test, states pooled to "
        "expected counts of at least 5."
    )
    body = [
        [row["control"], row["sampler"], f"{row['moved']:.0%}", row["p"], row["tv"], row["z"]]
        for row in results["rows"]
    ]
    header = ["control", "sampler", "moved", "p", "TV", "z"]
    return "\n\n".join(["# Truth over listed texts", intro, table(header, body)])
