"""What a task of controlled generation needs, trained once and kept: who guides, FUDGE's predictor, who judges.

The guides learn from one half of the texts, the judge from the other; he reads words, they read the language model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from structured_voronoi.experiments.control_cells import Task
from structured_voronoi.experiments.text_models import LENGTH
from structured_voronoi.metrics.classification import classification_report
from structured_voronoi.models.cache import cache_folder
from structured_voronoi.models.classifier_training import train_classifier
from structured_voronoi.models.classifiers import ClassifierRecipe, predicted
from structured_voronoi.models.corpora import Labelled
from structured_voronoi.models.judge import Judge
from structured_voronoi.models.loading import load_model
from structured_voronoi.models.prefix_classifier import PrefixRecipe, train_prefix_classifier
from structured_voronoi.run.progress import progress_bar

LIGHT = ClassifierRecipe(kind="light", epochs=3.0)
PROBE = ClassifierRecipe(kind="probe", epochs=5.0)
PREFIX = PrefixRecipe(epochs=1.0)
PROBE_TEXTS, PREFIX_TEXTS = 8_000, 12_000
"""BiLSTMs are slow on a processor: they learn from so many texts."""


def prepared(
    name: str, model: str, splits: dict[str, Labelled], none: str | None, progress: bool
) -> tuple[Task, dict[str, Any]]:
    """The task, and how well its classifiers do on the test split, whole texts and cut ones."""
    guide, report = trained_guide(name, model, splits, none, progress)
    folder = guide.parent
    task = Task(model, str(guide), str(folder / "prefix"), str(folder / "judge"), str(folder / "cells"))
    guiding, test = _guiding(splits, none)
    few, more, labels = _some(guiding, PROBE_TEXTS), _some(guiding, PREFIX_TEXTS), sorted(set(guiding.labels))
    judging = splits["train"].part(slice(1, None, 2))
    reports = {
        "guide": report,
        "probe": _once(folder, "probe", lambda: _guide(few, test, model, folder / "probe", PROBE, progress)),
        "prefix": _once(folder, "prefix", lambda: _prefix(more, test, model, Path(task.prefix), progress)),
        "judge": _once(folder, "judge", lambda: _judge(judging, splits["test"], model, Path(task.judge), labels)),
    }
    return task, reports


def trained_guide(
    name: str, model: str, splits: dict[str, Labelled], none: str | None, progress: bool
) -> tuple[Path, dict[str, Any]]:
    """The folder of the classifier that guides, and how well it does."""
    folder = _folder(name, model, splits)
    guiding, test = _guiding(splits, none)
    return folder / name, _once(folder, "guide", lambda: _guide(guiding, test, model, folder / name, LIGHT, progress))


def _folder(name: str, model: str, splits: dict[str, Labelled]) -> Path:
    """One for each language model, recipe and set of texts: everything that a finished cell depends on."""
    whole = repr((LIGHT, PROBE, PROBE_TEXTS, PREFIX, PREFIX_TEXTS, splits))
    return cache_folder() / f"{name}-{Path(model).name}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def _guiding(splits: dict[str, Labelled], none: str | None) -> tuple[Labelled, Labelled]:
    """Texts to learn from and to test by, without those that no label fits."""
    return splits["train"].part(slice(0, None, 2), without=none), splits["test"].part(slice(None), without=none)


def _once(folder: Path, name: str, train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The report of a training that is done, or done now: a run that was stopped does not begin again."""
    path = folder / f"{name}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(train(), indent=1) + "\n", encoding="utf-8")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _some(split: Labelled, count: int) -> Labelled:
    """Texts from all over the split, which is sorted by what the texts are about."""
    return split.part(slice(0, None, -(-len(split.texts) // count)))


def _guide(
    train: Labelled, test: Labelled, model: str, out: Path, recipe: ClassifierRecipe, progress: bool
) -> dict[str, Any]:
    loaded = load_model(model)
    with progress_bar(recipe.steps(len(train.texts)), progress, f"training {out.name} ({recipe.kind})") as tick:
        report = train_classifier(train.texts, train.labels, loaded, out, recipe, tick)
    labels = sorted(set(train.labels))
    found = {"parameters": report["parameters"], "texts": len(train.texts)}
    for key, cut in (("whole", None), ("cut", LENGTH)):
        found[key] = classification_report(test.labels, predicted(out, loaded, test.texts, cut), labels)
    return found


def _prefix(train: Labelled, test: Labelled, model: str, out: Path, progress: bool) -> dict[str, Any]:
    loaded = load_model(model)

    def ids(split: Labelled) -> list[list[int]]:
        rows: list[list[int]] = loaded.tokenizer(split.texts, add_special_tokens=False)["input_ids"]
        return rows

    with progress_bar(PREFIX.steps(len(train.texts)), progress, "training FUDGE's predictor") as tick:
        classifier = train_prefix_classifier(ids(train), train.labels, len(loaded.tokenizer), PREFIX, tick)
    classifier.save(out)
    whole = ids(test)
    found: dict[str, Any] = {"parameters": sum(part.numel() for part in classifier.parameters())}
    found |= {"texts": len(train.texts)}
    for key, cut in (("whole", None), ("cut", LENGTH)):
        guesses = classifier.predict([row[:cut] for row in whole])
        found[key] = classification_report(test.labels, guesses, classifier.labels)
    return found


def _judge(train: Labelled, test: Labelled, model: str, out: Path, labels: list[str]) -> dict[str, Any]:
    """The judge also learns texts without a label; its scores are over the labels that count."""
    loaded, judge = load_model(model), Judge.train(train.texts, train.labels, seed=1)
    judge.save(out)
    rows = loaded.tokenizer(test.texts, add_special_tokens=False)["input_ids"]
    cut = [loaded.tokenizer.decode(row[:LENGTH]) for row in rows]
    named = [place for place, label in enumerate(test.labels) if label in labels]
    found: dict[str, Any] = {"parameters": judge.weights.weight.numel() + judge.bias.numel(), "texts": len(train.texts)}
    for key, texts in (("whole", test.texts), ("cut", cut)):
        guesses = judge.predict([texts[place] for place in named])
        found[key] = classification_report([test.labels[place] for place in named], guesses, labels)
    return found
