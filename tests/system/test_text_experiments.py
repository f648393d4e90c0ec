"""The experiments on text, made small: they write what they promise, and go on where they were stopped."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from structured_voronoi.experiments import (
    combined,
    control_cells,
    control_runs,
    control_task,
    control_truth,
    efficiency,
    lm,
    mixing,
    sentiment,
    text_models,
    topic,
    truth,
)
from structured_voronoi.models.classifiers import ClassifierRecipe
from structured_voronoi.models.prefix_classifier import PrefixRecipe
from structured_voronoi.models.restaurants import descriptions
from structured_voronoi.models.training import Recipe
from structured_voronoi.samplers.refresh import Refresh
from structured_voronoi.samplers.svs import SVS

METHODS = ("ancestral", "fudge", "mucola", "svs-paper", "svs+refresh", "pncg", "rejection")
SPLITS = (("trainset", 1, 200), ("devset", 2, 30), ("testset_w_refs", 3, 60))
TINY = Recipe(vocabulary=300, width=32, layers=1, heads=2, context=64, batch=16)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything in this process, with few steps and few texts."""

    def in_turn(work: Any, tasks: Any, what: str, progress: bool) -> list[Any]:
        return [work(task) for task in tasks]

    for module in (lm, mixing, efficiency, truth, combined, control_runs, control_truth):
        monkeypatch.setattr(module, "side_by_side", in_turn)
    for module, name, value in (
        (lm, "ANCESTRAL", 20), (lm, "BURN_IN", {"ancestral": 1, "svs+refresh": 1}), (lm, "FROM_RANDOM", {"mucola": 1}),
        (mixing, "ANCESTRAL", 20), (mixing, "ALONE_STEPS", 2), (mixing, "MOST_STEPS", 2), (mixing, "RANDOM_CHAINS", 2),
        (mixing, "RANDOM_COST", 3), (efficiency, "BUDGET", 3), (efficiency, "DIMENSIONS", (8,)),
        (efficiency, "GRID", {"svs": [SVS(0.3, dimensions=8)], "refresh": [Refresh()]}), (truth, "STEPS", 1),
        (truth, "SAMPLERS", {"refresh": truth.BLOCKS}), (truth, "UNDER_CONTROL", {"refresh": truth.BLOCKS}),
        (combined, "STEPS", dict.fromkeys(combined.CASES, 2)), (combined, "BASE_TEXTS", 20),
        (control_runs, "GRID_SECONDS", 0.0),
        (control_runs, "WEIGHTS", (0.1,)), (control_runs, "METHODS", METHODS),
        (control_runs, "SECONDS", 0.0), (control_runs, "GRID_TEXTS", 2),
        (topic, "TEXTS", 2), (topic, "WEIGHT", 0.1), (topic, "STRONG", 0.2),
        (control_truth, "STEPS", 1), (topic, "FOODS", ("Italian", "French")), (topic, "GRID_TARGETS", ("Italian",)),
        (text_models, "RECIPE", TINY),
        (control_task, "LIGHT", ClassifierRecipe(hidden=8, epochs=1.0)),
        (control_task, "PROBE", ClassifierRecipe(kind="probe", hidden=4, epochs=0.2)),
        (control_task, "PREFIX", PrefixRecipe(embedding=8, hidden=8, epochs=0.5)),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts in the form of the E2E files, by the built-in generator."""
    folder = tmp_path_factory.mktemp("reviews")
    for name, seed, count in SPLITS:
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            rows = [
                (f"name[A], food[{one.labels['food']}]" if "food" in one.labels else "name[A]", one.text)
                for one in descriptions(count, seed)
            ]
            csv.writer(file).writerows([("mr", "ref"), *rows])
    return folder


def read(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return found


def test_lm_on_the_bundled_model_and_on_data(tmp_path: Path, reviews: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for data, stem in ((None, "lm"), (str(reviews), f"lm_{reviews.name}")):
        files = lm.run(tmp_path, runs=4, progress=False, data=data)
        assert {file.name for file in files} == {f"{stem}.json", f"{stem}.md", f"{stem}.png"}
        rows = read(tmp_path, stem)["rows"]
        assert {row["sampler"]: len(row["perplexity"]) for row in rows} == {
            "ancestral": 20,
            "svs+refresh": 4,
            "mucola": 4,
        }
    assert len(list((tmp_path / "cache" / "structured-voronoi").glob("lm-*"))) == 1


def test_mixing_and_efficiency(tmp_path: Path) -> None:
    mixing.run(tmp_path, runs=4, progress=False)
    assert set(read(tmp_path, "mixing")["random"]) == set(mixing.PARTS[2:])
    efficiency.run(tmp_path, runs=4, progress=False)
    found = read(tmp_path, "efficiency")
    assert set(found["best"]) == {"svs", "refresh"}
    assert all(row["cost"] >= 3 for row in found["rows"])


def test_truth_covers_plain_and_controlled_targets(tmp_path: Path) -> None:
    truth.run(tmp_path, runs=1000, progress=False)
    rows = read(tmp_path, "truth")["rows"]
    assert {row["control"] for row in rows} == {"none", "classifier", "black box"}
    assert all(row["p"] >= 1e-4 for row in rows)


def test_combined_on_the_bundled_model(tmp_path: Path) -> None:
    combined.run(tmp_path, runs=4, progress=False)
    assert [row["case"] for row in read(tmp_path, "combined")["rows"]] == list(combined.CASES)


def test_sentiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(control_runs, "METHODS", ("ancestral", "fudge", "svs+refresh"))
    for (_, seed, count), name in zip(SPLITS, ("train", "dev", "test"), strict=True):
        some = [one for one in descriptions(count, seed) if "family" in one.labels]
        lines = [f"{one.text}\t{int(one.labels['family'] == 'yes')}" for one in some]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines]), encoding="utf-8")
    files = sentiment.run(tmp_path, runs=2, progress=False, data=str(tmp_path))
    assert {file.name for file in files} == {f"sentiment{end}" for end in (".json", ".md", ".png", "_axes.png")}
    assert [row["count"] for row in read(tmp_path, "sentiment")["rows"]] == [2, 2, 2]


def test_topic_goes_on_where_it_was(tmp_path: Path, reviews: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = topic.run(tmp_path, runs=2, progress=False, data=str(reviews))
    assert {file.name for file in files} == {"topic.json", "topic.md", "topic.png", "topic_axes.png"}
    found = read(tmp_path, "topic")
    assert {(row["method"], row["target"]) for row in found["rows"]} == {
        (method, target) for method in control_runs.METHODS for target in ("Italian", "French")
    }
    assert "0.92, 13.90" in (tmp_path / "topic.md").read_text(encoding="utf-8")  # the paper's SVS

    def nothing_left_to_do(*_: object) -> None:
        raise AssertionError("a finished cell was drawn again")

    monkeypatch.setattr(control_cells, "_run", nothing_left_to_do)
    topic.run(tmp_path, runs=2, progress=False, data=str(reviews))
    assert read(tmp_path, "topic") == found
