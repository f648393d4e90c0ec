"""The experiments on text with small settings: their reports are complete, and interrupted runs resume."""

from __future__ import annotations

import csv
import json
import os
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from exact.test_judges import tiny_encoder
from structured_voronoi.experiments.control import combined, sentiment, topic
from structured_voronoi.experiments.control.foods import train_food_guide
from structured_voronoi.experiments.control.methods import ComparisonSettings
from structured_voronoi.experiments.control.pretrained import PretrainedSettings
from structured_voronoi.experiments.control.task import ClassifierRecipes
from structured_voronoi.experiments.exactness import truth
from structured_voronoi.experiments.text import efficiency, lm, mixing
from structured_voronoi.experiments.text.models import TextSettings
from structured_voronoi.models.classifiers import ClassifierSettings
from structured_voronoi.models.encoder_judge import EncoderSettings
from structured_voronoi.models.loading import BUNDLED
from structured_voronoi.models.prefix_classifier import PrefixSettings
from structured_voronoi.models.restaurants import descriptions
from structured_voronoi.models.training import TrainingSettings
from structured_voronoi.samplers.refresh import Refresh
from structured_voronoi.samplers.svs import SVS

METHODS = ("ancestral", "fudge", "mucola", "cold", "svs-paper", "svs+refresh", "pncg", "guided", "rejection")
SPLITS = (("trainset", 1, 200), ("devset", 2, 30), ("testset_w_refs", 3, 60))
TEXT = TextSettings(
    length=10,
    recipe=TrainingSettings(vocabulary=300, width=32, layers=1, heads=2, context=64, batch_size=16, epochs=1.0),
)
CLASSIFIERS = ClassifierRecipes(
    guide=ClassifierSettings(hidden=8, epochs=1.0),
    probe=ClassifierSettings(kind="probe", hidden=4, epochs=0.2),
    prefix=PrefixSettings(embedding=8, hidden=8, epochs=0.5),
)


def compare(*methods: str) -> ComparisonSettings:
    """Settings with one step per method and a small grid search."""
    return ComparisonSettings(methods, seconds=0.0, grid_seconds=0.0, grid_texts=2, weights=(0.1,), pilot=64)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generated texts in the format of the E2E files."""
    folder = tmp_path_factory.mktemp("reviews")
    for name, seed, count in SPLITS:
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            rows = [
                (f"name[A], food[{one.labels['food']}]" if "food" in one.labels else "name[A]", one.text)
                for one in descriptions(count, seed)
            ]
            csv.writer(file).writerows([("mr", "ref"), *rows])
    return folder


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of models and draws."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "structured-voronoi"


def read_report(folder: Path, name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return report


def test_lm_report_on_the_bundled_model_and_on_data(tmp_path: Path, reviews: Path, cache: Path) -> None:
    for data, stem in ((None, "lm"), (str(reviews), f"lm_{reviews.name}")):
        settings = lm.Settings(
            runs=4,
            data=data,
            progress=False,
            workers=1,
            text=TEXT,
            ancestral_texts=20,
            steps={"svs+refresh": 1},
            steps_from_random={"mucola": 1},
        )
        files = lm.run(settings, tmp_path)
        assert {file.name for file in files} == {f"{stem}.json", f"{stem}.md", f"{stem}.png"}
        rows = read_report(tmp_path, stem)["rows"]
        counts = {row["sampler"]: len(row["perplexity"]) for row in rows}
        assert counts == {"ancestral": 20, "svs+refresh": 4, "mucola": 4}
    assert len(list(cache.glob("lm-*"))) == 1


def test_mixing_report(tmp_path: Path) -> None:
    settings = mixing.Settings(
        runs=4,
        progress=False,
        workers=1,
        text=TEXT,
        ancestral_texts=20,
        max_steps=2,
        alone_steps=2,
        random_chains=2,
        random_cost=3,
    )
    mixing.run(settings, tmp_path)
    assert set(read_report(tmp_path, "mixing")["random"]) == set(mixing.FROM_RANDOM)


def test_efficiency_report(tmp_path: Path) -> None:
    settings = efficiency.Settings(
        runs=4,
        progress=False,
        workers=1,
        text=TEXT,
        budget=3,
        svs_grid=[SVS(0.3, dimensions=8)],
        other_grids={"refresh": [Refresh()]},
        dimensions=(8,),
    )
    efficiency.run(settings, tmp_path)
    report = read_report(tmp_path, "efficiency")
    assert set(report["best"]) == {"svs", "refresh"}
    assert all(row["cost"] >= 3 for row in report["rows"])


def test_truth_covers_all_controls(tmp_path: Path) -> None:
    refresh = {"refresh": Refresh(block=2, suffix=False)}
    settings = truth.Settings(
        runs=1000,
        progress=False,
        workers=1,
        steps=1,
        words=(" cheap", " pub", " and", " a"),
        samplers=refresh,
        controlled_samplers=refresh,
        guided=("guided, trained",),
    )
    truth.run(settings, tmp_path)
    rows = read_report(tmp_path, "truth")["rows"]
    assert {row["control"] for row in rows} == {"none", *truth.controls()}
    assert all(row["p"] >= 1e-4 for row in rows)


def test_combined_report_on_the_bundled_model(tmp_path: Path) -> None:
    settings = combined.Settings(
        runs=4,
        progress=False,
        workers=1,
        steps=2,
        regex_steps=2,
        base_texts=20,
        words=("The", "a"),
        places=("is",),
        pilot=128,
    )
    combined.run(settings, tmp_path)
    rows = read_report(tmp_path, "combined")["rows"]
    assert [(row["case"], row["sampler"]) for row in rows] == list(product(combined.CASES, ("guided", "svs+refresh")))
    assert all(row["evaluations"] >= 1 for row in rows if row["sampler"] == "guided")


def write_phrases(folder: Path) -> None:
    """Generated texts in the format of the SST-2 files; label 1 for family-friendly places."""
    for (_, seed, count), name in zip(SPLITS, ("train", "dev", "test"), strict=True):
        labelled = [one for one in descriptions(count, seed) if "family" in one.labels]
        lines = [f"{one.text}\t{int(one.labels['family'] == 'yes')}" for one in labelled]
        (folder / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines]), encoding="utf-8")


def test_sentiment_report(tmp_path: Path, cache: Path) -> None:
    write_phrases(tmp_path)
    settings = sentiment.Settings(
        runs=2,
        data=str(tmp_path),
        progress=False,
        workers=1,
        text=TEXT,
        classifiers=CLASSIFIERS,
        comparison=compare("ancestral", "fudge", "svs+refresh"),
    )
    files = sentiment.run(settings, tmp_path)
    assert {file.name for file in files} == {f"sentiment{end}" for end in (".json", ".md", ".png", "_axes.png")}
    assert [row["count"] for row in read_report(tmp_path, "sentiment")["rows"]] == [2, 2, 2]


def test_sentiment_on_a_pretrained_model(tmp_path: Path, cache: Path) -> None:
    """Texts continue prompts, an encoder judges, and a second run reuses all draws."""
    write_phrases(tmp_path)
    settings = sentiment.Settings(
        runs=5,
        data=str(tmp_path),
        model="bundled",
        progress=False,
        workers=1,
        text=TEXT,
        pretrained=PretrainedSettings(
            replace(CLASSIFIERS, probe=None), compare("ancestral", "svs+refresh", "guided", "rejection")
        ),
        prompts=("The", "Near the river", "This"),
        min_texts_per_prompt=1,
        encoder=EncoderSettings(str(tiny_encoder(tmp_path / "encoder")), epochs=0.2),
    )
    files = sentiment.run(settings, tmp_path)
    assert {file.name for file in files} == {f"sentiment_bundled{end}" for end in (".json", ".md", ".png", "_axes.png")}
    report = read_report(tmp_path, "sentiment_bundled")
    assert [row["count"] for row in report["rows"]] == [6, 6, 6, 6]  # 5 texts over 3 prompts
    assert all(row["example"].startswith("The") for row in report["rows"])
    assert set(report["classifiers"]) == {"guide", "prefix", "judge"}
    assert 0 <= report["judge_on_dev"]["accuracy"] <= 1
    assert "(sentiment_bundled.png)" in (tmp_path / "sentiment_bundled.md").read_text(encoding="utf-8")
    (folder,) = cache.glob("sentiment-bundled-*")
    shutil.rmtree(folder / "sentiment")  # without the guide, drawing new texts would fail
    sentiment.run(settings, tmp_path)
    assert read_report(tmp_path, "sentiment_bundled") == report


def test_topic_on_a_local_model(tmp_path: Path, reviews: Path, cache: Path) -> None:
    """New weights in the same folder get a new cache folder."""
    model = Path(shutil.copytree(BUNDLED, tmp_path / "mine"))
    settings = topic.Settings(
        data=str(reviews),
        model=str(model),
        progress=False,
        workers=1,
        text=TEXT,
        pretrained=PretrainedSettings(replace(CLASSIFIERS, probe=None), compare("ancestral", "guided", "rejection")),
        foods=("Italian", "French"),
        grid_foods=("Italian",),
        texts=2,
        weight=0.1,
        strong_weight=0.2,
    )
    topic.run(settings, tmp_path)
    report = read_report(tmp_path, "topic_mine")
    assert [truth["methods"] for truth in report["truth"]] == [["guided", "rejection"]] * 2
    assert [truth["count"] for truth in report["truth"]] == [4, 4]  # 2 texts per food, not 100
    (folder,) = cache.glob("topic-mine-*")
    os.utime(model / "model.safetensors", (1.0, 1.0))
    guide = train_food_guide(str(reviews), str(model), settings.pretrained.classifiers, TEXT.length, progress=False)
    assert Path(guide).parent != folder


def test_topic_reuses_cached_draws(tmp_path: Path, reviews: Path, cache: Path) -> None:
    settings = topic.Settings(
        runs=2,
        data=str(reviews),
        progress=False,
        workers=1,
        text=TEXT,
        classifiers=CLASSIFIERS,
        comparison=compare(*METHODS),
        foods=("Italian", "French"),
        grid_foods=("Italian",),
        texts=2,
        weight=0.1,
        strong_weight=0.2,
        steps=1,
    )
    files = topic.run(settings, tmp_path)
    assert {file.name for file in files} == {"topic.json", "topic.md", "topic.png", "topic_axes.png"}
    report = read_report(tmp_path, "topic")
    pairs = {(row["method"], row["target"]) for row in report["rows"]}
    assert pairs == {(method, food) for method in METHODS for food in ("Italian", "French")}
    assert "0.92, 13.90" in (tmp_path / "topic.md").read_text(encoding="utf-8")  # the published values of SVS

    (folder,) = cache.glob("topic-*")
    shutil.rmtree(folder / "topic")  # without the guide, drawing new texts would fail
    topic.run(settings, tmp_path)
    assert read_report(tmp_path, "topic") == report
