"""The paper's sentiment control: positive texts by every method.

With a pretrained model, texts continue neutral prompts, as in the paper. Without one, they are phrases of a small
language model trained on SST-2, whose texts are poor; this only tests the pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from structured_voronoi.experiments.control.draws import draw_all
from structured_voronoi.experiments.control.methods import ComparisonSettings, compare_methods
from structured_voronoi.experiments.control.pretrained import PretrainedSettings
from structured_voronoi.experiments.control.tables import pictures, sections
from structured_voronoi.experiments.control.task import ClassifierRecipes, prepare_task, require_data
from structured_voronoi.experiments.report import write_report
from structured_voronoi.experiments.text.models import TextSettings, model_name, prepare_model, report_name
from structured_voronoi.metrics.classification import classification_report
from structured_voronoi.models.corpora import Labelled, labelled_texts
from structured_voronoi.models.encoder_judge import EncoderSettings, load_judge


def _prompts() -> tuple[str, ...]:
    """Neutral prompts."""
    return (
        "The weather this morning", "My neighbour says that", "After the meeting we", "The coffee in this place",
        "On the train to work", "When we came to the hotel", "The new phone", "Last week my sister",
        "The soup that day", "Our trip to the coast", "The teacher of this class", "In the second half",
        "The house at the corner", "That evening the band", "The letter from the bank",
    )  # fmt: skip


@dataclass(frozen=True)
class Settings:
    runs: int = 20
    """Positive texts per method; with a pretrained model at least ``min_texts_per_prompt`` for each prompt."""
    seed: int = 0
    data: str | None = None
    """A folder with the SST-2 files."""
    model: str | None = None
    """A pretrained language model, by name or folder."""
    progress: bool = True
    workers: int | None = None
    text: TextSettings = field(default_factory=TextSettings)
    classifiers: ClassifierRecipes = field(default_factory=ClassifierRecipes)
    comparison: ComparisonSettings = field(default_factory=ComparisonSettings)
    pretrained: PretrainedSettings = field(default_factory=PretrainedSettings)
    """Replaces ``classifiers`` and ``comparison`` if ``model`` is given."""
    prompts: tuple[str, ...] = field(default_factory=_prompts)
    min_texts_per_prompt: int = 4
    encoder: EncoderSettings = field(default_factory=EncoderSettings)
    """The judge if ``model`` is given."""


def run(settings: Settings, out: Path) -> list[Path]:
    """Compare all methods, each at the best setting of its grid search."""
    data, positive = require_data(settings.data, "sentiment", "train.tsv"), ("1",)
    length, progress, count, encoder = settings.text.length, settings.progress, settings.runs, None
    if settings.model is not None:
        comparison = replace(settings.pretrained.comparison, prompts=settings.prompts)
        settings = replace(settings, classifiers=settings.pretrained.classifiers, comparison=comparison)
        encoder, count = settings.encoder, settings.min_texts_per_prompt
        count = max(count, -(-settings.runs // len(settings.prompts)))
    splits = {name: _read_phrases(data, name) for name in ("train", "test")}
    model = settings.model or prepare_model(data, settings.text.recipe, progress)
    folders, reports = prepare_task("sentiment", model, splits, None, settings.classifiers, length, progress, encoder)
    draw = partial(draw_all, folders=folders, progress=progress, workers=settings.workers)
    results: dict[str, Any] = {"classifiers": reports, "model": settings.model or model_name(data)}
    results |= compare_methods(draw, positive, positive, count, length, settings.seed, settings.comparison)
    if encoder is not None:
        dev, judge = _read_phrases(data, "dev"), load_judge(Path(folders.judge))
        results["judge_on_dev"] = classification_report(dev.labels, judge.predict(dev.texts), judge.labels)
    stem = report_name("sentiment", settings.model)
    return write_report(out, stem, results, _markdown(results, stem, settings), pictures(results, stem))


def _read_phrases(data: str, split: str) -> Labelled:
    return labelled_texts(str(Path(data) / f"{split}.tsv"), "sentence", "label")


def _markdown(results: dict[str, Any], stem: str, settings: Settings) -> str:
    budget = f"{settings.comparison.seconds:g} seconds of one core per batch"
    if settings.model is None:
        intro = (
            f"{settings.runs} positive texts of {settings.text.length} tokens, seed {results['seed']}, from a language "
            f"model of 1.1 M parameters trained on SST-2; {budget}. "
            "Success is by the judge; perplexity is of the drawn tokens under the sampled model. The paper's values "
            "are for GPT-2."
        )
    else:
        prompts, count, dev = len(settings.prompts), results["rows"][0]["count"], results["judge_on_dev"]
        intro = (
            f"{count} positive texts per method: {settings.text.length} tokens after each of {prompts} neutral "
            f"prompts, {count // prompts} per prompt, seed {results['seed']}, from {results['model']}; {budget}. "
            f"Success is by the judge, {settings.encoder.base} fine-tuned on SST-2, which also reads the prompt; its "
            f"accuracy on the {dev['count']} sentences of dev.tsv is {dev['accuracy']:.4f}. Perplexity is of the "
            "drawn tokens under the sampled model; Dist-n is over all texts of a method. The grid search uses the "
            f"first prompt, with weights γ of exact methods among {', '.join(map(str, settings.comparison.weights))}. "
            f"The pilot of guided sampling, {settings.comparison.pilot} texts after the first prompt, is used for all "
            "prompts and not included in its seconds. The paper's values are for GPT-2 and other prompts."
        )
    shown = sections(results, "sentiment", stem, settings.comparison, settings.text.length)
    return "\n\n".join(["# Sentiment control", intro, *shown])
