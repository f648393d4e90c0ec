"""The judge of texts and the classifier of prefixes learn what they should and come back from their files."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import structured_voronoi as sv
from structured_voronoi.metrics.classification import classification_report
from structured_voronoi.models.judge import Judge
from structured_voronoi.models.prefix_classifier import (
    PrefixClassifier,
    PrefixRecipe,
    train_prefix_classifier,
)
from structured_voronoi.models.restaurants import FOODS, descriptions

SMALL = PrefixRecipe(embedding=16, hidden=16, layers=2, dropout=0.0, epochs=12.0, batch=32, learning_rate=1e-2)


def labelled(count: int, seed: int) -> tuple[list[str], list[str]]:
    some = [one for one in descriptions(count, seed) if "food" in one.labels]
    return [one.text for one in some], [one.labels["food"] for one in some]


def test_the_judge_tells_foods_apart(tmp_path: Path) -> None:
    judge = Judge.train(*labelled(3000, seed=5), seed=0)
    texts, labels = labelled(500, seed=6)
    report = classification_report(labels, judge.predict(texts), judge.labels)
    assert set(report["classes"]) == set(FOODS)
    assert report["macro_f1"] > 0.95
    judge.save(tmp_path)
    assert Judge.load(tmp_path).predict([*texts, "", "SUSHI!"]) == judge.predict([*texts, "", "sushi"])
    assert judge.predict([]) == []
    with pytest.raises(sv.SamplingError, match="2 texts with 1 labels"):
        Judge.train(["a", "b"], ["x"])


def test_the_prefix_classifier_reads_prefixes(tmp_path: Path) -> None:
    """The label is said by the third token: before it nothing is known, after it everything."""
    generator = torch.Generator().manual_seed(3)
    texts = torch.randint(0, 6, (600, 5), generator=generator)
    labels = ["low" if text[2] < 3 else "high" for text in texts]
    lists = [text[: 3 + i % 3].tolist() for i, text in enumerate(texts)]
    steps = []
    model = train_prefix_classifier(lists[:500], labels[:500], 6, SMALL, lambda note, count: steps.append(count))
    assert sum(steps) == SMALL.steps(500)
    assert classification_report(labels[500:], model.predict(lists[500:]), model.labels)["macro_f1"] > 0.95
    known, unknown = (model.log_prob(texts[:, :n], "low").exp() for n in (4, 2))
    assert (known - (texts[:, 2] < 3).float()).abs().mean() < 0.1
    assert (unknown - 0.5).abs().mean() < 0.2
    model.save(tmp_path)
    predictor = partial(PrefixClassifier.load(tmp_path).log_prob, label="low")
    assert torch.equal(predictor(texts[:, :4]), model.log_prob(texts[:, :4], "low"))
    with pytest.raises(sv.SamplingError, match="no label 'lo'; did you mean 'low'"):
        model.log_prob(texts, "lo")
    sv.Fudge(predictor)
