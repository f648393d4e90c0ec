"""Workers of Ray: started, used, killed during a task, and stopped."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

import structured_voronoi as sv
from helpers import svs
from structured_voronoi.workers import ray_cluster
from system.fragile import KillingTarget, every_step

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed; pip install 'structured-voronoi[ray]'"
)
SETTINGS = {"chains": 6, "draws": 30, "warmup": 5, "seed": 3, "progress": False}


def processes_of(folder: str) -> list[str]:
    """The command lines that contain the folder."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines.append((process / "cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return [line for line in lines if folder in line]


def test_killed_ray_worker_does_not_change_the_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[str] = []
    in_folder = ray_cluster._short_folder
    monkeypatch.setattr(ray_cluster, "_short_folder", lambda folder: in_folder(folders.append(str(folder)) or folder))
    target, sampler = KillingTarget(tmp_path, fatal=20), sv.SVS(scale=0.6)
    distributed = sv.sample(target, sampler, **SETTINGS, checkpoint=every_step(tmp_path / "run"), workers="ray:2")
    assert target.mark.exists()
    alone = sv.sample(target, sampler, **SETTINGS)
    for group in ("posterior", "sample_stats"):
        assert distributed[group].dataset.identical(alone[group].dataset)
    assert not processes_of(folders[0])
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"manifest.json", "group-000000", "group-000001"}
    assert not (tmp_path / "run" / "ray").exists()


def test_ray_workers_find_a_control_of_the_current_folder_and_no_other_module_there(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(
        "import os\nprint(os.getpid(), file=open('importing.txt', 'a'))\ndef short(text):\n    return len(text) < 60\n"
    )
    for name in ("pydantic", "torch", "ray", "json"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()\n")
    words = ("--control", "rules:short", "--sampler", "rejection", "--finish", "length", "--max-tokens", "4", "-n", "4")
    svs("sample", *words, "--workers", "ray:1", "--out", "texts.jsonl", cwd=tmp_path)
    assert len((tmp_path / "texts.jsonl").read_text().splitlines()) == 4
    assert len(set((tmp_path / "importing.txt").read_text().split())) == 2  # the command and its worker
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("address", ["ray://127.0.0.1:9", "ray://nowhere", "ray://127.0.0.1:999999"])
def test_cluster_that_does_not_answer_is_named(address: str) -> None:
    with pytest.raises(sv.SamplingError) as caught:
        sv.sample(sv.PottsTarget(side=2), sv.SVS(scale=0.5), **SETTINGS, workers=address)
    assert caught.value.message == f"no Ray cluster answers at {address}"
