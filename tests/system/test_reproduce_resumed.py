"""`svs reproduce --checkpoint DIR --resume` computes only the missing tasks and writes the same report."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from structured_voronoi.experiments.toy import hypercube
from system.commands import svs

DIMENSIONS = (1, 2, 3)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A small experiment, computed in this process; the list of the tasks that were begun."""
    tasks: list[int] = []
    run_dimension = hypercube._run_dimension

    def recording(k: int, settings: Any) -> Any:
        tasks.append(k)
        return run_dimension(k, settings)

    small = partial(hypercube.Settings, runs=4, workers=1, dimensions=DIMENSIONS, iterations=5)
    monkeypatch.setattr(hypercube, "Settings", small)
    monkeypatch.setattr(hypercube, "_run_dimension", recording)
    return tasks


def interrupt_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Press Ctrl-C at the beginning of a task."""
    run_dimension = hypercube._run_dimension

    def interrupted(k: int, settings: Any) -> Any:
        if k == number:
            raise KeyboardInterrupt
        return run_dimension(k, settings)

    monkeypatch.setattr(hypercube, "_run_dimension", interrupted)


def test_resumed_run_computes_only_missing_tasks(
    computed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, words = tmp_path / "plain", ("--out", str(tmp_path / "out"), "--checkpoint", str(tmp_path / "run"))
    svs("reproduce", "hypercube", "--out", str(plain))
    assert computed == list(DIMENSIONS)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        printed = svs("reproduce", "hypercube", *words, code=130).stderr
    command = shlex.join(["svs", "reproduce", "hypercube", *words, "--resume"])
    assert printed.startswith(f"svs: interrupted; 2 tasks are saved in {tmp_path / 'run'}; ")
    assert printed.endswith(f": {command}\n")
    assert "svs reproduce, unfinished, 2 tasks\n" in svs("runs", "show", str(tmp_path / "run")).stdout
    computed.clear()
    svs("reproduce", "hypercube", *words, "--resume")
    assert computed == [3]
    svs("reproduce", "hypercube", *words, "--resume")
    assert computed == [3]
    for name in ("hypercube.json", "hypercube.md"):
        assert (tmp_path / "out" / name).read_bytes() == (plain / name).read_bytes()


@pytest.mark.usefixtures("computed")
def test_other_runs_are_refused(tmp_path: Path) -> None:
    words = ("reproduce", "hypercube", "--out", str(tmp_path / "out"), "--checkpoint", str(tmp_path / "run"))
    svs(*words)
    assert "holds a run; resume it" in svs(*words, code=2).stderr
    assert "holds a run with hypercube seed = 0, not 1" in svs(*words, "--resume", "--seed", "1", code=2).stderr
    (part,) = (tmp_path / "run" / "hypercube").glob("*-000001.json")
    part.write_bytes(part.read_bytes().replace(b"js_mean", b"js_MEAN"))
    assert f"{part} is damaged" in " ".join(svs(*words, "--resume", code=2).stderr.split())
    assert "--checkpoint" in svs("reproduce", "hypercube", "--resume", code=2).stderr
