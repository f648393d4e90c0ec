"""The classifiers of a task of controlled generation, trained once and cached: guide, FUDGE's prefix classifier, judge.

The guide and the prefix classifier are trained on one half of the texts and read the language model's tokens. The judge
is trained on the other half; it reads words, or is an encoder with its own tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.progress import progress_bar
from structured_voronoi.experiments.control.draws import TaskFolders
from structured_voronoi.metrics.classification import classification_report
from structured_voronoi.models.cache import cached_judge
from structured_voronoi.models.classifier_reading import predicted_labels
from structured_voronoi.models.classifier_training import train_classifier
from structured_voronoi.models.classifiers import ClassifierSettings
from structured_voronoi.models.corpora import Labelled
from structured_voronoi.models.encoder_judge import EncoderSettings, load_judge
from structured_voronoi.models.folders import cache_folder
from structured_voronoi.models.judge import Judge
from structured_voronoi.models.loading import load_model
from structured_voronoi.models.prefix_classifier import PrefixSettings, train_prefix_classifier

Splits = dict[str, Labelled]
"""Labelled texts for training ("train") and testing ("test")."""


@dataclass(frozen=True)
class ClassifierRecipes:
    """Training settings of the classifiers of a task."""

    guide: ClassifierSettings = field(default_factory=lambda: ClassifierSettings(kind="light", epochs=3.0))
    probe: ClassifierSettings | None = field(default_factory=lambda: ClassifierSettings(kind="probe", epochs=5.0))
    """A classifier of the language model's hidden states, only for the report; None to skip it."""
    prefix: PrefixSettings = field(default_factory=lambda: PrefixSettings(epochs=1.0))
    probe_texts: int = 8_000
    """Training texts of the probe."""
    prefix_texts: int = 12_000
    """Training texts of FUDGE's prefix classifier."""


def require_data(data: str | None, experiment: str, file: str) -> str:
    """Raise an error if an experiment has no data."""
    if data is None:
        raise SamplingError(
            f"{experiment} needs labelled texts", remedy=f"give a folder that contains {file}", argument="data"
        )
    return data


def prepare_task(
    name: str,
    model: str,
    splits: Splits,
    no_label: str | None,
    recipes: ClassifierRecipes,
    length: int,
    progress: bool,
    encoder: EncoderSettings | None = None,
) -> tuple[TaskFolders, dict[str, Any]]:
    """Train the classifiers of a task and test them on whole texts and on texts cut to ``length`` tokens.

    With ``encoder`` settings, the judge is a fine-tuned encoder; otherwise it reads words.
    """
    guide, guide_report = train_guide(name, model, splits, no_label, recipes, length, progress)
    folder, reports = guide.parent, {"guide": guide_report}
    guiding, test = _guiding_texts(splits, no_label)
    judging, labels = splits["train"].part(slice(1, None, 2)), sorted(set(guiding.labels))
    probe, prefix = recipes.probe, folder / "prefix"
    if probe is not None:
        texts = _subsample(guiding, recipes.probe_texts)
        reports["probe"] = _train_once(
            folder, "probe", lambda: _train_classifier(texts, test, model, folder / "probe", probe, length, progress)
        )
    prefix_texts = _subsample(guiding, recipes.prefix_texts)
    reports["prefix"] = _train_once(
        folder, "prefix", lambda: _train_prefix(prefix_texts, test, model, prefix, recipes.prefix, length, progress)
    )
    judge = folder / "judge" if encoder is None else _fine_tuned_judge(name, judging, encoder, progress)

    def train_judge() -> dict[str, Any]:
        if encoder is None:
            Judge.train(judging.texts, judging.labels, seed=1).save(judge)
        return {"texts": len(judging.texts), **_test_judge(judge, splits["test"], model, labels, length)}

    reports["judge"] = _train_once(folder, judge.name, train_judge)
    return TaskFolders(model, str(guide), str(prefix), str(judge), str(folder / "draws")), reports


def train_guide(
    name: str,
    model: str,
    splits: Splits,
    no_label: str | None,
    recipes: ClassifierRecipes,
    length: int,
    progress: bool,
) -> tuple[Path, dict[str, Any]]:
    """The folder of the guide and its test report."""
    folder = _task_folder(name, model, splits, recipes, length)
    guiding, test = _guiding_texts(splits, no_label)

    def train() -> dict[str, Any]:
        return _train_classifier(guiding, test, model, folder / name, recipes.guide, length, progress)

    return folder / name, _train_once(folder, "guide", train)


def _task_folder(name: str, model: str, splits: Splits, recipes: ClassifierRecipes, length: int) -> Path:
    """A folder for this language model, these recipes and these texts, which are all that draws depend on."""
    key = repr((recipes, length, splits)) + _weights_stamp(Path(model))
    return cache_folder() / f"{name}-{Path(model).name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def _weights_stamp(folder: Path) -> str:
    """A key that changes with the weights in a folder; cached models already have distinct names."""
    if not folder.is_dir() or cache_folder() in folder.resolve().parents:
        return ""
    files = [(file.name, file.stat()) for file in sorted(folder.glob("*.safetensors"))]
    return repr([(str(folder.resolve()), name, stat.st_size, stat.st_mtime_ns) for name, stat in files])


def _guiding_texts(splits: Splits, no_label: str | None) -> tuple[Labelled, Labelled]:
    """Texts for training the guide and for testing, without those labelled ``no_label``."""
    train, test = splits["train"], splits["test"]
    return train.part(slice(0, None, 2), without=no_label), test.part(slice(None), without=no_label)


def _train_once(folder: Path, name: str, train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Train unless the folder has a report; return the report."""
    path = folder / f"{name}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(train(), indent=1) + "\n", encoding="utf-8")
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def _subsample(split: Labelled, count: int) -> Labelled:
    """About ``count`` evenly spaced texts of a split, which is sorted by topic."""
    return split.part(slice(0, None, -(-len(split.texts) // count)))


def _train_classifier(
    train: Labelled, test: Labelled, model: str, out: Path, recipe: ClassifierSettings, length: int, progress: bool
) -> dict[str, Any]:
    loaded = load_model(model)
    with progress_bar(
        recipe.steps(len(train.texts)), progress, f"training classifier {out.name} ({recipe.kind})", stage="training"
    ) as tick:
        trained = train_classifier(train.texts, train.labels, loaded, out, recipe, tick)
    labels = sorted(set(train.labels))
    report = {"parameters": trained["parameters"], "texts": len(train.texts)}
    for key, cut in (("whole", None), ("cut", length)):
        report[key] = classification_report(test.labels, predicted_labels(out, loaded, test.texts, cut), labels)
    return report


def _train_prefix(
    train: Labelled, test: Labelled, model: str, out: Path, recipe: PrefixSettings, length: int, progress: bool
) -> dict[str, Any]:
    loaded = load_model(model)

    def encode(split: Labelled) -> list[list[int]]:
        rows: list[list[int]] = loaded.tokenizer(split.texts, add_special_tokens=False)["input_ids"]
        return rows

    with progress_bar(
        recipe.steps(len(train.texts)), progress, "training FUDGE's prefix classifier", stage="training"
    ) as tick:
        classifier = train_prefix_classifier(encode(train), train.labels, len(loaded.tokenizer), recipe, tick)
    classifier.save(out)
    rows = encode(test)
    report: dict[str, Any] = {"parameters": sum(part.numel() for part in classifier.parameters())}
    report |= {"texts": len(train.texts)}
    for key, cut in (("whole", None), ("cut", length)):
        predicted = classifier.predict([row[:cut] for row in rows])
        report[key] = classification_report(test.labels, predicted, classifier.labels)
    return report


def _fine_tuned_judge(name: str, texts: Labelled, recipe: EncoderSettings, progress: bool) -> Path:
    """The folder of the encoder that judges, shared by all language models."""
    with progress_bar(
        recipe.steps(len(texts.texts)), progress, f"training the judge ({recipe.base})", stage="training"
    ) as tick:
        return cached_judge(name, texts, recipe, tick)


def _test_judge(folder: Path, test: Labelled, model: str, labels: list[str], length: int) -> dict[str, Any]:
    """Test the judge on texts with one of ``labels``; it may know other labels."""
    tokenizer, judge = load_model(model).tokenizer, load_judge(folder)
    rows = tokenizer(test.texts, add_special_tokens=False)["input_ids"]
    cut = [tokenizer.decode(row[:length]) for row in rows]
    rows_used = [row for row, label in enumerate(test.labels) if label in labels]
    report: dict[str, Any] = {"parameters": judge.parameters}
    for key, texts in (("whole", test.texts), ("cut", cut)):
        predicted = judge.predict([texts[row] for row in rows_used])
        report[key] = classification_report([test.labels[row] for row in rows_used], predicted, labels)
    return report
