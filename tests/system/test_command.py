"""The commands as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import SVS, svs


def test_help_teaches_and_imports_nothing_heavy() -> None:
    assert "svs verify" in svs("--help").stdout
    assert "results" in svs("reproduce", "--help").stdout
    heavy = "{'torch', 'matplotlib', 'xarray', 'scipy'} & set(sys.modules)"
    code = f"import sys, structured_voronoi.cli; print(sorted({heavy}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_ls_lists_what_exists() -> None:
    import structured_voronoi as sv
    from structured_voronoi.catalogue import SAMPLERS, TARGETS

    listed = svs("ls").stdout
    for name in sv.__all__:
        if name.endswith("Target") or hasattr(getattr(sv, name), "step"):
            assert name in listed
    for name in [*SAMPLERS, *TARGETS]:
        assert hasattr(sv, name.split(".")[0])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["reproduce", "toyy"], "did you mean 'toy'?"),
        (["reproduce"], "requires an argument"),
        (["verifi"], "verify"),
        (["reproduce", "toy", "--runs", "1"], "--runs 1"),
        (["reproduce", "toy", "--runs", "many"], "many"),
        (["verify", "--chains", "3"], "--chains 3"),
        (["verify", "--seed", "-1"], "seed -1"),
        (["reproduce", "toy", "--seed", "-1"], "--seed -1"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(words: list[str], said: str) -> None:
    error = svs(*words, code=2).stderr
    assert said in error
    assert len(error.strip().splitlines()) == 1


def test_unwritable_folder_is_refused_before_the_work(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    error = svs("reproduce", "crossings", "--out", str(file), code=2).stderr
    assert str(file) in error
    assert file.read_text() == "in the way"


def test_crossings_writes_its_report(tmp_path: Path) -> None:
    svs("reproduce", "crossings", "--runs", "5", "--out", str(tmp_path / "new" / "folder"))
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == ["crossings.json", "crossings.md", "crossings.png"]
    rows = json.loads((folder / "crossings.json").read_text())["rows"]
    assert all(row["wrong"] == 0 for row in rows if row["finder"] == "exact")
    assert any(row["wrong"] > 0 for row in rows if row["finder"] == "grid")


def test_hypercube_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from structured_voronoi.experiments import hypercube

    monkeypatch.setattr(hypercube, "side_by_side", lambda work, tasks, *_: [work(task) for task in tasks])
    monkeypatch.setattr(hypercube, "DIMENSIONS", range(1, 3))
    monkeypatch.setattr(hypercube, "ITERATIONS", 10)
    written = hypercube.run(tmp_path, runs=8, progress=False)
    assert {path.name for path in written} == {"hypercube.json", "hypercube.md", "hypercube.png"}
    rows = json.loads((tmp_path / "hypercube.json").read_text())["rows"]
    assert {row["k"] for row in rows} == {1, 2}


def test_a_folder_in_the_way_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "crossings.json").mkdir()
    assert "in the way" in svs("reproduce", "crossings", "--out", str(tmp_path), code=2).stderr
    assert [path.name for path in tmp_path.iterdir()] == ["crossings.json"]


def test_toy_has_the_promised_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from structured_voronoi.experiments import toy

    monkeypatch.setattr(toy, "side_by_side", lambda work, tasks, *_: [work(task) for task in tasks])
    sizes = {"BURN_IN": 5, "SHORT_BURN_IN": 5, "BUDGET": 15, "DRAWS": 10, "ITERATIONS": (2, 5, 10)}
    for name, small in {"TEMPERATURES": (0.25, 1.0), **sizes}.items():
        monkeypatch.setattr(toy, name, small)
    written = toy.run(tmp_path, runs=8, progress=False)
    assert {path.name for path in written} >= {"toy.json", "toy.md", "toy.png", "toy_trajectory.png"}
    rows = json.loads((tmp_path / "toy.json").read_text())["rows"]
    keys = {"temperature", "sampler", "setting", "js_mean", "js_low", "js_high", "energy_evaluations"}
    assert all(keys <= set(row) for row in rows)
    for setting in ("paper", "equal_evaluations", "equal_proposals"):
        names = {row["sampler"] for row in rows if row["setting"] == setting}
        assert names == {"vs", "vs_paper", "hmc", "mucola", "independent"}


def test_verify_passes() -> None:
    done = svs("verify", "--chains", "2000", "--seed", "3")
    assert "0 of 16 claims of exactness failed" in done.stdout


def test_verify_fails_for_a_false_claim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from structured_voronoi import cli
    from structured_voronoi.experiments import verify

    false = next(case for case in verify.cases() if case.sampler == "langevin")._replace(claims_exact=True)
    monkeypatch.setattr(verify, "cases", lambda: [false])
    assert cli.verify(chains=2000) == 1
    assert "FAILED" in capsys.readouterr().out


def test_interrupt_ends_at_once_and_leaves_no_half_report(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [SVS, "reproduce", "hypercube", "--out", str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text():  # it has begun to work
        time.sleep(0.2)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.strip() == "svs: interrupted"
    assert list(tmp_path.iterdir()) == []
