"""Texts, probabilities, trainings and commands that are interrupted and resumed, or refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import structured_voronoi as sv
from helpers import SVS
from structured_voronoi.engine import accepted_texts, text_chains
from structured_voronoi.engine.settings import EngineSettings
from structured_voronoi.lookahead.settings import LookaheadSettings
from structured_voronoi.models.corpora import Corpus
from structured_voronoi.models.restaurants import descriptions
from structured_voronoi.models.training import TrainingSettings, train_language_model
from structured_voronoi.models.training_run import TrainingCheckpoint
from structured_voronoi.storage.manifest import read_manifest
from structured_voronoi.storage.store import Store
from system.commands import svs
from system.fragile import every_step
from system.interruptions import Killed, autoregressive_table, stop_after

ITALIAN = sv.label("food", "Italian")
CASES: dict[str, dict[str, Any]] = {
    "chains": {"controls": [ITALIAN], "sampler": "svs+refresh", "warmup": 1},
    "engine": {"controls": [sv.keyword("a")], "prompt": "The"},
    "prompts": {"prompt": ["Near the", "The", "At a"]},
    "prompts with a control": {"prompt": ["Near the", "The", "At a"], "controls": [ITALIAN], "sampler": "rejection"},
}


def draw_texts(case: str, n: int, folder: Path | None = None) -> sv.Generation:
    settings = {"n": n, "max_tokens": 5, "finish": "length", "seed": 2, "progress": False}
    checkpoint = None if folder is None else every_step(folder)
    return sv.generate("bundled", **{**settings, **CASES[case]}, checkpoint=checkpoint)


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_gives_the_same_texts(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_texts, made = text_chains.make_texts, 0

    def killed(*arguments: Any) -> Any:
        nonlocal made
        made += 1
        if made == 2:
            raise Killed
        return make_texts(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(text_chains, "make_texts", killed)
        patch.setattr(accepted_texts, "make_texts", killed)
        with pytest.raises(Killed):
            draw_texts(case, 20, tmp_path)
    whole = draw_texts(case, 20)
    for _ in range(2):  # the second time the run is finished
        resumed = draw_texts(case, 20, tmp_path)
        assert resumed.draws == whole.draws
        assert resumed.diagnostics == whole.diagnostics
    assert read_manifest(tmp_path).finished


@pytest.mark.parametrize(("case", "steps"), [("chains", 1), ("prompts with a control", 0)])
def test_extended_run_has_the_texts_of_a_longer_run(
    case: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extended during the first batch, and once more when it is finished."""
    with stop_after(monkeypatch, steps):
        draw_texts(case, 3, tmp_path)
    draw_texts(case, 5, tmp_path)
    assert draw_texts(case, 12, tmp_path).draws == draw_texts(case, 12).draws
    manifest = read_manifest(tmp_path)
    assert (manifest.settings["n"], manifest.finished) == (12, True)
    assert manifest.progress["done"] == manifest.progress["of"] == 12 * len(CASES[case].get("prompt", ["one"]))
    with pytest.raises(sv.SamplingError, match="holds a run with n = 12, not 5"):
        draw_texts(case, 5, tmp_path)


def test_chains_of_several_prompts_cannot_be_extended(tmp_path: Path) -> None:
    settings = {"prompt": ["Near the", "The"], "sampler": "refresh", "warmup": 0, "max_tokens": 3, "finish": "length"}
    sv.generate("bundled", **settings, n=1, checkpoint=tmp_path, progress=False)
    with pytest.raises(sv.SamplingError) as caught:
        sv.generate("bundled", **settings, n=2, checkpoint=tmp_path, progress=False)
    assert caught.value.argument == "n"


def test_probability_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineSettings(min_learning_tries=64, batch_rows=64, lookahead=LookaheadSettings(steps=20))
    settings: dict[str, Any] = {"texts": 256, "seed": 2, "progress": False, "monte_carlo": True, "settings": engine}
    target = autoregressive_table()
    whole = sv.probability(target, **settings)
    for _ in range(2):
        with stop_after(monkeypatch, 2):
            sv.probability(target, **settings, checkpoint=every_step(tmp_path))
    assert sv.probability(target, **settings, checkpoint=tmp_path) == whole
    with pytest.raises(sv.SamplingError, match="holds a run with texts = 256, not 128"):
        sv.probability(target, **{**settings, "texts": 128}, checkpoint=tmp_path)
    with pytest.raises(sv.SamplingError, match=r"holds a run of probability, not of sv\.sample"):
        sv.sample(target, sv.Rejection(), checkpoint=tmp_path, progress=False)


WORDS = ("sample", "-n", "1", "--max-tokens", "3", "--finish", "length", "--checkpoint")


def test_command_writes_the_same_file_when_it_is_resumed(tmp_path: Path) -> None:
    words = ("sample", "-n", "20", "--max-tokens", "5", "--finish", "length", "--control", "food=Italian", "--out")
    whole = svs(*words, str(tmp_path / "whole.jsonl"))
    checkpoint = ("--checkpoint", str(tmp_path / "run"), "--resume")
    for _ in range(2):
        resumed = svs(*words, str(tmp_path / "resumed.jsonl"), *checkpoint)
        assert (tmp_path / "resumed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
        assert resumed.stdout == whole.stdout


def test_command_refuses_other_runs(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    svs(*WORDS, run)
    assert "holds a run; resume it, or choose another folder" in svs(*WORDS, run, code=2).stderr
    for more, name in (
        (("--seed", "1"), "seed"),
        (("--control", "keyword=a"), "controls"),
        (("--prompt", "A"), "prompt"),
    ):
        assert f"holds a run with {name}" in svs(*WORDS, run, *more, "--resume", code=2).stderr
    for command in (("sample",), ("probability", "--control", "keyword=a")):
        assert "--checkpoint" in svs(*command, "--resume", code=2).stderr
    (tmp_path / "texts.txt").write_text("\n".join(one.text for one in descriptions(30, seed=0)))
    training = ("train", "lm", "--data", str(tmp_path / "texts.txt"), "--out", str(tmp_path / "model"), "--resume")
    assert "--checkpoint" in svs(*training, code=2).stderr
    assert "holds a run of texts, not of training" in svs(*training, "--checkpoint", run, code=2).stderr
    asked = ("probability", "--control", "keyword=a", "--checkpoint", run)
    assert "holds a run; resume it" in svs(*asked, code=2).stderr
    assert "holds a run of texts, not of probability" in svs(*asked, "--resume", code=2).stderr


def test_command_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    nowhere = ("--model", str(tmp_path / "nowhere"), "--checkpoint", str(tmp_path / "new" / "run"))
    svs("sample", *nowhere, code=2)
    svs("probability", "--control", "keyword=a", *nowhere, code=2)
    assert not (tmp_path / "new").exists()


def test_command_refuses_files_links_and_locked_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    svs(*WORDS, str(tmp_path / "run"))
    assert "it is a file" in svs(*WORDS, str(tmp_path / "file"), code=2).stderr
    assert "it is a link whose target does not exist" in svs(*WORDS, str(tmp_path / "link"), code=2).stderr
    with Store(tmp_path / "run"):
        assert f"is in use by process {os.getpid()}" in svs(*WORDS, str(tmp_path / "run"), "--resume", code=2).stderr


def test_runs_show_prints_settings_progress_and_texts(tmp_path: Path) -> None:
    svs(*WORDS, str(tmp_path))
    shown = svs("runs", "show", str(tmp_path)).stdout
    assert "texts, finished, 1 of 1 texts" in shown
    assert '  model: "bundled"\n' in shown
    assert "\ntext: " in shown
    (texts,) = tmp_path.glob("texts-*")
    texts.write_bytes(b"?" * texts.stat().st_size)
    assert f"{texts} is damaged" in svs("runs", "show", str(tmp_path), code=2).stderr
    texts.unlink()
    assert f"{texts} is missing; restore it" in svs("runs", "show", str(tmp_path), code=2).stderr


def test_run_that_is_resumed_with_other_libraries_has_a_warning(tmp_path: Path) -> None:
    settings = {"n": 1, "max_tokens": 3, "finish": "length", "checkpoint": tmp_path, "progress": False}
    assert not sv.generate("bundled", **settings).diagnostics.warnings
    with Store(tmp_path) as store:
        store._write_manifest(replace(store.run, versions={**store.run.versions, "torch": "1.0"}))
    (warning,) = sv.generate("bundled", **settings).diagnostics.warnings
    assert warning.code == "changed-versions"
    assert f"torch 1.0, now {version('torch')}" in warning.message


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_training_saves_the_current_step(number: int, tmp_path: Path) -> None:
    texts = [one.text for one in descriptions(60, seed=0)]
    corpus = Corpus(texts, texts[:9])
    settings = TrainingSettings(280, width=8, layers=1, heads=1, context=32, batch_size=8)
    steps, taken, previous = settings.steps(60), 0, signal.signal(signal.SIGTERM, signal.default_int_handler)
    whole = train_language_model(corpus, tmp_path / "whole", settings, lambda note, steps: None)

    def interrupt(note: str, steps: int) -> None:
        nonlocal taken
        taken += steps
        if taken == 3:
            signal.raise_signal(number)

    folder = tmp_path / "part" / "checkpoint"
    try:
        with pytest.raises(KeyboardInterrupt) as stop:
            train_language_model(corpus, tmp_path / "part", settings, interrupt)
        assert stop.value.__notes__ == [f"4 of {steps} steps are saved in {folder}"]
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert read_manifest(folder).progress["done"] == 4
    with Store(folder), pytest.raises(sv.SamplingError, match="is in use by process"):
        train_language_model(corpus, tmp_path / "part", settings, interrupt)
    state = folder / "state-000000004.safetensors"
    data = state.read_bytes()
    state.write_bytes(data[:-1] + b"?")
    with pytest.raises(sv.SamplingError, match=r"state-000000004.safetensors is damaged"):
        train_language_model(corpus, tmp_path / "part", settings, interrupt)
    state.write_bytes(data)
    assert train_language_model(corpus, tmp_path / "part", settings, interrupt) == whole
    assert not folder.exists()
    assert TrainingCheckpoint().steps > 4  # it was saved because of the signal


def test_sigterm_ends_a_command_as_ctrl_c_does(tmp_path: Path) -> None:
    out, folder = tmp_path / "texts.jsonl", tmp_path / "run"
    words = ["sample", "-n", "5000", "--sampler", "svs+refresh", "--warmup", "0", "--out", out, "--checkpoint", folder]
    running = subprocess.Popen([SVS, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while not out.exists() and running.poll() is None:
            time.sleep(0.1)
        running.terminate()
        _, printed = running.communicate(timeout=120)
    finally:
        running.kill()
    assert running.returncode == 143
    assert "Traceback" not in printed
    lines = out.read_text(encoding="utf-8")
    assert lines.endswith("\n")
    count = len([json.loads(line) for line in lines.splitlines()])
    assert count >= 8
    last = printed.splitlines()[-1]
    assert last.startswith("svs: ended by SIGTERM; ")
    assert f"; {count} lines are in {out}; " in last
    assert ": svs sample -n 5000 " in last
    assert last.endswith(f" --checkpoint {folder} --resume")
    assert re.search(rf"; [\d,]+ of 5,000 texts are saved in {folder}; ", last) or not read_manifest(folder).progress
    svs("runs", "check", str(folder))
