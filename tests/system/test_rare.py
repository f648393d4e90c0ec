"""The experiment on rare controls, made small: every method has a row, with its cost or the reason why not."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import structured_voronoi as sv
from structured_voronoi.experiments.control import rare
from structured_voronoi.experiments.control.peers import Peer, is_installed
from structured_voronoi.experiments.control.rare_cases import Budget, Case, Models, Truth
from structured_voronoi.experiments.control.rare_costs import measure_costs, weighted_energy
from structured_voronoi.experiments.control.rare_race import RACERS, race
from structured_voronoi.experiments.control.task import ClassifierRecipes
from structured_voronoi.experiments.text.models import TextSettings
from structured_voronoi.models.classifiers import ClassifierSettings
from structured_voronoi.models.restaurants import descriptions
from structured_voronoi.models.training import TrainingSettings

SMALL = Budget(
    pilot=64, tries=64, chains=2, chain_seconds=0.0, particles=8, systems=3, slow_systems=1, race_seconds=0.0
)
RARE = Budget(length=14, pilot=128, weighted=256, tries=64, particles=8, systems=3, chain_rate=0.1)
METHODS = ["guided", "rejection", "svs+refresh", "smc", "bootstrap smc", "genlm-control", "fudge"]
BUNDLED = Models("bundled", "food", None)


def test_rare_on_the_bundled_model(tmp_path: Path) -> None:
    settings = rare.Settings(
        runs=128,
        progress=False,
        workers=1,
        text=TextSettings(length=8),
        cases=(
            Case("words", ("the",)),
            Case("black box", ("the", "a", "is", "it", "near")),
            Case("black box", ("zebra",)),
            Case("three at once", ("the", "near"), weight=0.5),
        ),
        race_rates=(0.9, 0.1),
        budget=SMALL,
    )
    files = rare.run(settings, tmp_path)
    assert {file.name for file in files} == {"rare.json", "rare.md", "rare.png"}
    report = json.loads((tmp_path / "rare.json").read_text(encoding="utf-8"))
    *measured, lost, last = report["cases"]
    for found in [*measured, last]:
        assert [row["method"] for row in found["rows"]] == METHODS
        rows = {row["method"]: row for row in found["rows"]}
        assert rows["guided"]["evaluations"] >= 1
        assert rows["guided"]["pilot"] == rows["smc"]["pilot"] > 0
        assert rows["rejection"]["evaluations"] == pytest.approx(1 / found["probability"]["value"], rel=0.5)
        assert "predictor" in rows["fudge"]["note"]
    assert "none of 64 texts of the model satisfied" in lost["failed"]
    assert [row["method"] for row in report["race"]] == [*RACERS]  # only one case is of words
    text = (tmp_path / "rare.md").read_text(encoding="utf-8")
    assert "three of the, a, is, it, near" in text
    assert is_installed() or "not installed" in text


def test_rare_on_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The classifier is trained on the same texts as the model; FUDGE has a row of numbers if it has a predictor."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, seed, count in (("trainset", 1, 200), ("devset", 2, 30), ("testset_w_refs", 3, 60)):
        with (tmp_path / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            rows = [(f"food[{one.labels.get('food', 'Thai')}]", one.text) for one in descriptions(count, seed)]
            csv.writer(file).writerows([("mr", "ref"), *rows])
    recipe = TrainingSettings(vocabulary=300, width=32, layers=1, heads=2, context=64, batch_size=16, epochs=1.0)
    settings = rare.Settings(
        runs=64,
        data=str(tmp_path),
        progress=False,
        workers=1,
        text=TextSettings(length=6, recipe=recipe),
        classifiers=ClassifierRecipes(guide=ClassifierSettings(hidden=8, epochs=1.0)),
        cases=(Case("classifier", weight=0.5),),
        budget=SMALL,
    )
    rare.run(settings, tmp_path)
    report: dict[str, Any] = json.loads((tmp_path / f"rare_{tmp_path.name}.json").read_text(encoding="utf-8"))
    assert report["race"] == []
    assert report["model"] == f"trained on {tmp_path.name}"


def test_the_rarest_cases_have_honest_rows() -> None:
    """What is too rare for tries, chains and plain particles is extrapolated or left out, and says so."""
    found = measure_costs(Case("words", ("Italian", "river")), BUNDLED, replace(RARE, particles=16))
    rows = {row["method"]: row for row in found["rows"]}
    assert rows["rejection"]["note"] == "extrapolated"
    assert rows["rejection"]["evaluations"] == 1 / found["probability"]["value"] > 100
    assert rows["svs+refresh"]["note"].startswith("left out below")
    assert rows["bootstrap smc"]["note"] == "none of 48 particles had a weight"
    assert rows["smc"]["distinct"] <= rows["smc"]["texts"] <= 48


def test_texts_of_the_race_follow_the_control() -> None:
    """Rejection's batches are waves of tries; every method's texts satisfy the word that is asked for."""
    task = Case("words", ("the",)), Truth(10.0, 0.0)
    for method in ("guided", "rejection", "smc", "bootstrap smc"):
        row = race((*task, method), BUNDLED, Budget(length=8, pilot=64, particles=8, chains=2, race_seconds=0.3))
        assert row["met"] == 1.0
        assert 0 < row["distinct"] <= row["texts"]
        assert len(row["gap"]) == 2


def test_the_weighted_energy_and_its_error() -> None:
    energy = torch.tensor([1.0, 3.0, torch.inf], dtype=torch.float64)
    truth = weighted_energy(energy, torch.tensor([0.0, 0.0, -torch.inf], dtype=torch.float64))
    assert truth.energy == 2.0
    assert truth.error == pytest.approx(0.5**0.5)


@pytest.mark.skipif(not is_installed(), reason="genlm-control is not installed")
@pytest.mark.filterwarnings("default")
def test_genlm_control_draws_from_the_same_target() -> None:
    """Its estimates of Z agree with the share of plain texts; its energies are ours."""
    model = sv.load("bundled").target(max_tokens=8)
    target = model.under([sv.keyword("near")])
    found = Peer(target, 32, 0.5).run(12, seed=0)
    assert found.tokens.shape == (12, 32, 8)
    assert model.allowed[found.tokens].all()
    z = found.log_z.exp()
    share = sv.Rejection().acceptance(target, seed=0, count=1024)
    error = (float(z.std() / 12**0.5) ** 2 + share / 1024) ** 0.5
    assert abs(float(z.mean()) - share) < 4 * error
