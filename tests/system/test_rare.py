"""The experiment on rare controls with small settings: every method has a cost, or a reason why it has none."""

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
from structured_voronoi.experiments.control.peers import GenlmSMC, is_installed
from structured_voronoi.experiments.control.rare_cases import Budget, Case, Method, Models, Reference
from structured_voronoi.experiments.control.rare_costs import measure_costs, weighted_energy
from structured_voronoi.experiments.control.rare_race import RACE_METHODS, race
from structured_voronoi.experiments.control.task import ClassifierRecipes
from structured_voronoi.experiments.text.models import TextSettings
from structured_voronoi.models.classifiers import ClassifierSettings
from structured_voronoi.models.restaurants import descriptions
from structured_voronoi.models.training import TrainingSettings

SMALL = Budget(
    pilot=64, tries=64, chains=2, chain_seconds=0.0, particles=8, systems=3, slow_systems=1, race_seconds=0.0
)
RARE = Budget(length=14, pilot=128, weighted=256, tries=64, particles=8, systems=3, min_chain_probability=0.1)
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
    *measured, impossible, last = report["cases"]
    for result in [*measured, last]:
        assert [row["method"] for row in result["rows"]] == METHODS
        rows = {row["method"]: row for row in result["rows"]}
        assert rows["guided"]["evaluations"] >= 1
        assert rows["guided"]["pilot"] == rows["smc"]["pilot"] > 0
        assert rows["rejection"]["evaluations"] == pytest.approx(1 / result["probability"]["value"], rel=0.5)
        assert "prefix classifier" in rows["fudge"]["note"]
    assert "none of 64 texts of the model satisfied" in impossible["failed"]
    assert [row["method"] for row in report["race"]] == [*RACE_METHODS]  # there is only one case of keywords
    text = (tmp_path / "rare.md").read_text(encoding="utf-8")
    assert "three of the, a, is, it, near" in text
    assert is_installed() or "not installed" in text


def test_rare_on_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The classifier is trained on the same texts as the model."""
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


def test_costs_are_extrapolated_or_omitted_for_rare_controls() -> None:
    """Rejection is extrapolated, chains and plain particles have no cost, and a note says why."""
    result = measure_costs(Case("words", ("Italian", "river")), BUNDLED, replace(RARE, particles=16))
    rows = {row["method"]: row for row in result["rows"]}
    assert rows["rejection"]["note"] == "extrapolated"
    assert rows["rejection"]["evaluations"] == 1 / result["probability"]["value"] > 100
    assert rows["svs+refresh"]["note"].startswith("not run below")
    assert rows["bootstrap smc"]["note"] == "none of 48 particles had a positive weight"
    assert rows["smc"]["distinct"] <= rows["smc"]["texts"] <= 48


def test_texts_of_the_race_satisfy_the_control() -> None:
    task = Case("words", ("the",)), Reference(10.0, 0.0)
    methods: tuple[Method, ...] = ("guided", "rejection", "smc", "bootstrap smc")
    for method in methods:
        row = race((*task, method), BUNDLED, Budget(length=8, pilot=64, particles=8, chains=2, race_seconds=0.3))
        assert row["met"] == 1.0
        assert 0 < row["distinct"] <= row["texts"]
        assert len(row["gap"]) == 2


def test_weighted_energy_and_its_standard_error() -> None:
    energy = torch.tensor([1.0, 3.0, torch.inf], dtype=torch.float64)
    reference = weighted_energy(energy, torch.tensor([0.0, 0.0, -torch.inf], dtype=torch.float64))
    assert reference.energy == 2.0
    assert reference.error == pytest.approx(0.5**0.5)


@pytest.mark.skipif(not is_installed(), reason="genlm-control is not installed")
@pytest.mark.filterwarnings("default")
def test_genlm_control_draws_from_the_same_target() -> None:
    """Its estimates of Z agree with the share of plain texts that satisfy the control."""
    text = sv.load("bundled").target(max_tokens=8)
    target = text.under([sv.keyword("near")])
    particles = GenlmSMC(target, 32, 0.5).run(12, seed=0)
    assert particles.tokens.shape == (12, 32, 8)
    assert text.allowed[particles.tokens].all()
    z = particles.log_z.exp()
    share = sv.Rejection().acceptance(target, seed=0, count=1024)
    error = (float(z.std() / 12**0.5) ** 2 + share / 1024) ** 0.5
    assert abs(float(z.mean()) - share) < 4 * error
