"""The paper's sentiment control: positive texts, by every method.

With a pretrained model they continue neutral prompts, as the paper's do. Without one they are phrases from a small
model trained on SST-2, a smoke test of the path: it does not write films up well, whatever steers it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.experiments.control.draws import draw_all
from structured_voronoi.experiments.control.methods import ComparisonSettings, compare_methods
from structured_voronoi.experiments.control.pretrained import PretrainedSettings
from structured_voronoi.experiments.control.tables import pictures, sections
from structured_voronoi.experiments.control.task import ClassifierRecipes, prepare_task
from structured_voronoi.experiments.report import write_report
from structured_voronoi.experiments.text.models import TextSettings, model_name, prepare_model, report_name
from structured_voronoi.metrics.classification import classification_report
from structured_voronoi.models.corpora import Labelled, labelled_texts
from structured_voronoi.models.encoder_judge import EncoderSettings, load_judge

POSITIVE = "1"
PROMPTS = (
    "The weather this morning", "My neighbour says that", "After the meeting we", "The coffee in this place",
    "On the train to work", "When we came to the hotel", "The new phone", "Last week my sister", "The soup that day",
    "Our trip to the coast", "The teacher of this class", "In the second half", "The house at the corner",
    "That evening the band", "The letter from the bank",
)  # fmt: skip
"""Neutral beginnings, of our own."""


@dataclass(frozen=True)
class Settings:
    runs: int = 20
    """Positive texts of every method; with a pretrained model, least_texts for each prompt if those are more."""
    seed: int = 0
    data: str | None = None
    """A folder with the SST-2 files."""
    model: str | None = None
    """A pretrained model, as `TextTarget.load` takes it."""
    progress: bool = True
    workers: int | None = None
    text: TextSettings = field(default_factory=TextSettings)
    classifiers: ClassifierRecipes = field(default_factory=ClassifierRecipes)
    comparison: ComparisonSettings = field(default_factory=ComparisonSettings)
    pretrained: PretrainedSettings = field(default_factory=PretrainedSettings)
    """In place of the last two, with a pretrained model."""
    prompts: tuple[str, ...] = PROMPTS
    least_texts: int = 4
    encoder: EncoderSettings = field(default_factory=EncoderSettings)
    """The judge of texts of a pretrained model."""


def run(settings: Settings, out: Path) -> list[Path]:
    """Every method at its best."""
    if settings.data is None:
        raise SamplingError(
            "sentiment needs the SST-2 phrases with their labels",
            remedy="give the folder of train.tsv as data",
        )
    length, progress, count, encoder = settings.text.length, settings.progress, settings.runs, None
    if settings.model is not None:
        comparison = replace(settings.pretrained.comparison, prompts=settings.prompts)
        settings = replace(settings, classifiers=settings.pretrained.classifiers, comparison=comparison)
        encoder, count = settings.encoder, max(settings.least_texts, -(-settings.runs // len(settings.prompts)))
    splits = {name: _read_phrases(settings, name) for name in ("train", "test")}
    model = settings.model or prepare_model(settings.data, settings.text.recipe, progress)
    folders, reports = prepare_task("sentiment", model, splits, None, settings.classifiers, length, progress, encoder)
    draw = partial(draw_all, folders=folders, progress=progress, workers=settings.workers)
    results: dict[str, Any] = {"classifiers": reports, "model": settings.model or model_name(settings.data)}
    results |= compare_methods(draw, (POSITIVE,), (POSITIVE,), count, length, settings.seed, settings.comparison)
    if encoder is not None:
        dev, judge = _read_phrases(settings, "dev"), load_judge(Path(folders.judge))
        results["judge_on_dev"] = classification_report(dev.labels, judge.predict(dev.texts), judge.labels)
    stem = report_name("sentiment", settings.model)
    return write_report(out, stem, results, _markdown(results, stem, settings), pictures(results, stem))


def _read_phrases(settings: Settings, split: str) -> Labelled:
    return labelled_texts(str(Path(settings.data or "") / f"{split}.tsv"), "sentence", "label")


def _markdown(results: dict[str, Any], stem: str, settings: Settings) -> str:
    budget = f"{settings.comparison.seconds:g} seconds of one core a batch"
    if settings.model is None:
        about = (
            f"{settings.runs} positive texts of {settings.text.length} tokens, seed {results['seed']}, from a language "
            f"model of 1.1 M parameters trained on SST-2; {budget}. "
            "Success is by the judge; perplexity is of the drawn tokens under the sampled model. The paper's numbers "
            "are of GPT-2."
        )
    else:
        prompts, count, dev = len(settings.prompts), results["rows"][0]["count"], results["judge_on_dev"]
        about = (
            f"{count} positive texts of every method: {settings.text.length} tokens after each of {prompts} neutral "
            f"prompts, {count // prompts} a prompt, seed {results['seed']}, from {results['model']}; {budget}. Success "
            f"is by the judge, {settings.encoder.base} fine-tuned on SST-2, who reads the prompt too; his accuracy on "
            f"the {dev['count']} sentences of dev.tsv is {dev['accuracy']:.4f}. Perplexity is of the drawn tokens "
            "under the sampled model; Dist-n is over all texts of a method. Settings were searched on the first prompt "
            f"alone, the weight γ of exact methods among {', '.join(map(str, settings.comparison.weights))}. The pilot "
            f"of guided sampling, {settings.comparison.pilot} texts after the first prompt, serves after all and is "
            "not in its seconds. The paper's numbers are of GPT-2 and its own prompts."
        )
    shown = sections(results, "sentiment", stem, settings.comparison, settings.text.length)
    return "\n\n".join(["# Sentiment control", about, *shown])
