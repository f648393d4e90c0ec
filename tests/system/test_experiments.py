"""The experiments on enumerated targets with small settings."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.experiments import EXPERIMENTS
from structured_voronoi.experiments.exactness import crossings, faithfulness
from structured_voronoi.experiments.toy import hypercube, toy

SIGNIFICANCE = 1e-4
"""p-value below which a sampler counts as biased."""


def module_of(name: str) -> Any:
    return importlib.import_module(f"structured_voronoi.experiments.{EXPERIMENTS[name].module}")


def read_report(folder: Path, name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return report


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_frozen_settings_and_a_run(name: str) -> None:
    module = module_of(name)
    settings = module.Settings()
    assert settings.__dataclass_params__.frozen
    fields = {field.name for field in dataclasses.fields(settings)}
    assert {"runs", "seed", "progress"} <= fields
    assert ("data" in fields) == EXPERIMENTS[name].takes_data
    assert pickle.dumps(settings)  # settings are sent to workers
    assert copy.deepcopy(settings) == settings
    assert callable(module.run)


@pytest.mark.parametrize("name", [name for name, experiment in EXPERIMENTS.items() if experiment.needs_data])
def test_missing_data_is_an_error(name: str, tmp_path: Path) -> None:
    module = module_of(name)
    with pytest.raises(SamplingError) as caught:
        module.run(module.Settings(), tmp_path)
    assert caught.value.argument == "data"
    assert str(EXPERIMENTS[name].data_file) in caught.value.remedy
    assert not list(tmp_path.iterdir())


def test_hypercube_report_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    settings = hypercube.Settings(runs=8, progress=False, workers=1, dimensions=(1, 2), iterations=10)
    written = hypercube.run(settings, tmp_path)
    assert {path.name for path in written} == {"hypercube.json", "hypercube.md", "hypercube.png"}
    report = read_report(tmp_path, "hypercube")
    assert {row["k"] for row in report["rows"]} == {1, 2}
    hypercube.run(dataclasses.replace(settings, workers=2), tmp_path)
    assert read_report(tmp_path, "hypercube") == report


def test_toy_report_has_all_samplers_and_settings(tmp_path: Path) -> None:
    settings = toy.Settings(
        runs=8,
        progress=False,
        workers=1,
        temperatures=(0.25, 1.0),
        draws=10,
        burn_in=5,
        short_burn_in=5,
        iterations=(2, 5),
    )
    written = toy.run(settings, tmp_path)
    assert {path.name for path in written} >= {"toy.json", "toy.md", "toy.png", "toy_trajectory.png"}
    rows = read_report(tmp_path, "toy")["rows"]
    keys = {"temperature", "sampler", "setting", "js_mean", "js_low", "js_high", "energy_evaluations"}
    assert all(keys <= set(row) for row in rows)
    for setting in ("paper", "equal_evaluations", "equal_proposals"):
        names = {row["sampler"] for row in rows if row["setting"] == setting}
        assert names == {"vs", "vs_paper", "hmc", "mucola", "independent"}


def test_exact_crossing_finder_is_correct_and_the_grid_is_not(tmp_path: Path) -> None:
    settings = crossings.Settings(
        runs=10, progress=False, embeddings=((6, 2), (100, 4)), step_sizes=(1.0,), reference_points=1000
    )
    written = crossings.run(settings, tmp_path)
    assert {path.name for path in written} == {"crossings.json", "crossings.md", "crossings.png"}
    rows = read_report(tmp_path, "crossings")["rows"]
    assert all(row["wrong"] == 0 for row in rows if row["finder"] == "exact")
    assert any(row["wrong"] > 0 for row in rows if row["finder"] == "grid")


def test_faithfulness_detects_only_the_broken_twins(tmp_path: Path) -> None:
    settings = faithfulness.Settings(
        runs=10_000,
        progress=False,
        workers=1,
        steps=6,
        open_walls=faithfulness.OPEN_SETTINGS[:1],
        hard=(),
        closed_walls=faithfulness.CLOSED_SETTINGS[2:3],
        precisions=(torch.float64,),
    )
    written = faithfulness.run(settings, tmp_path)
    assert {path.name for path in written} == {"faithfulness.json", "faithfulness.md", "faithfulness.png"}
    report = read_report(tmp_path, "faithfulness")
    (row,) = report["open"]
    assert row["p_value"] >= SIGNIFICANCE
    assert row["outward_only_p"] < SIGNIFICANCE
    assert row["cold_momentum_p"] < SIGNIFICANCE
    assert row["round_trips_failed"] == 0
    assert row["round_trips_failed_outward_only"] > 0.1
    assert row["round_trips_failed_divided"] > 0.1
    assert report["closed"][0]["estimated_moved"] > 0.3
    assert report["motion"][0]["largest_energy_error"] < 1e-9
