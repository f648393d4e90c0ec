"""Runs that are stopped at any moment and go on as if they had not been; and those that are refused."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import structured_voronoi as sv
from helpers import ALL_SAMPLERS, SVS, boxed_target
from structured_voronoi.core.contracts import Chains
from structured_voronoi.core.stopping import Stopping
from structured_voronoi.engine import checkpoint as checkpoints
from structured_voronoi.engine import source as source_module
from structured_voronoi.engine.checkpoint import Bookmark
from structured_voronoi.engine.settings import EngineSettings
from structured_voronoi.lookahead.settings import LookaheadSettings
from structured_voronoi.models import unfinished
from structured_voronoi.models.corpora import Corpus
from structured_voronoi.models.restaurants import descriptions
from structured_voronoi.models.training import Recipe, train_language_model
from structured_voronoi.samplers import svs as svs_sampler
from structured_voronoi.storage.store import LOCK, LineFile, Store, read_manifest
from structured_voronoi.targets.tabular import AutoregressiveTable
from system.commands import svs

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {"chains": 3, "draws": 4, "warmup": 2, "thin": 3, "seed": 4, "progress": False}


class Stopped(Exception):
    """As if the process had been killed, but for the lock."""


@pytest.fixture(autouse=True)
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is written whenever it can be."""
    monkeypatch.setattr(checkpoints, "SECONDS", 0.0)
    monkeypatch.setattr(checkpoints, "SHARE", float("inf"))
    monkeypatch.setattr(svs_sampler, "PILOT_SCALES", (0.3, 0.7))


@contextlib.contextmanager
def stopping(monkeypatch: pytest.MonkeyPatch, steps: int, stop: type[BaseException] = Stopped) -> Iterator[None]:
    """Chains and tries that stop in the middle of a step or batch, after so many."""
    step, draw, taken = Chains.__next__, source_module.draw_tries, 0

    def stepped(self: Chains) -> Any:
        nonlocal taken
        if taken == steps:
            self.rng.uniform(3)  # what a step that is not finished has used up does not count
            raise stop
        taken += 1
        return step(self)

    def drawn(*arguments: Any) -> Any:
        nonlocal taken
        if taken == steps:
            raise stop
        taken += 1
        return draw(*arguments)

    with monkeypatch.context() as patch, pytest.raises(Stopped) if stop is Stopped else contextlib.nullcontext():
        patch.setattr(Chains, "__next__", stepped)
        patch.setattr(source_module, "draw_tries", drawn)
        yield


def sentences() -> AutoregressiveTable:
    generator = torch.Generator().manual_seed(3)
    embeddings, log_prob = torch.randn(5, 3, generator=generator), torch.randn(5, 5, 5, generator=generator)
    scores = -torch.randn(5, 5, 5, generator=generator).abs()
    return AutoregressiveTable(embeddings, log_prob - log_prob.logsumexp((0, 1, 2)), None, scores)


def equal(one: Any, other: Any) -> bool:
    """Bit for bit, with all statistics and attributes."""
    groups = ("posterior", "sample_stats")
    same = all(one[group].to_dataset().identical(other[group].to_dataset()) for group in groups)
    return same and one.attrs == other.attrs


SAMPLERS = {
    **ALL_SAMPLERS,
    "cycle": sv.Cycle(sv.SVS(0.6), sv.PNCG(2.0)),
    "refresh": sv.Refresh(block=2),
    "svs + refresh": sv.Cycle(sv.SVS(0.6), sv.Refresh(block=2)),
    "rejection": sv.Rejection(),
    "guided": sv.Guided(tries=3, texts=64),
    "smc": sv.SMC(particles=4, texts=64),
    "cold": sv.COLD(iterations=3),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_run_that_was_stopped_gives_the_same_draws(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, target = SAMPLERS[name], boxed_target(3, 5, 3, 2) if name in [*ALL_SAMPLERS, "cycle"] else sentences()
    whole = sv.sample(target, sampler, **SETTINGS)
    for steps in (1, 3, 4):
        with stopping(monkeypatch, steps):
            sv.sample(target, sampler, checkpoint=tmp_path, **SETTINGS)
    assert equal(sv.sample(target, sampler, checkpoint=tmp_path, **SETTINGS), whole)
    monkeypatch.setattr(Chains, "__init__", None)  # a finished run takes no step, and looks for no start
    assert equal(sv.sample(target, sampler, checkpoint=tmp_path, **SETTINGS), whole)


def test_a_resume_that_forgets_the_random_streams_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, sampler = boxed_target(3, 5, 3, 2), sv.SVS(0.6)
    whole = sv.sample(target, sampler, **SETTINGS)
    with stopping(monkeypatch, 5):
        sv.sample(target, sampler, checkpoint=tmp_path, **SETTINGS)
    resume = Bookmark.resume

    def forgetful(self: Bookmark) -> dict[str, Any]:
        counter = self.chains.rng.counter.clone()
        counted = resume(self)
        self.chains.rng.counter = counter
        return counted

    monkeypatch.setattr(Bookmark, "resume", forgetful)
    assert not equal(sv.sample(target, sampler, checkpoint=tmp_path, **SETTINGS), whole)


def test_fifty_kills_lose_nothing() -> None:
    """Of sampling, texts, probabilities and trainings, at random writes, steps and times."""
    script = ROOT / "benchmarks" / "kills.py"
    done = subprocess.run(
        [sys.executable, script, "--kills", "50", "--seed", "1"], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kills, runs, kept = map(int, re.findall(r"(\d+) (?:kills|runs) ", done.stdout))
    assert kills >= 50
    assert runs == kept


def test_ctrl_c_returns_the_draws_so_far_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, sampler = boxed_target(3, 5, 3, 2), sv.SVS(0.6)
    whole = sv.sample(target, sampler, **SETTINGS)
    with stopping(monkeypatch, 9, KeyboardInterrupt):
        some = sv.sample(target, sampler, checkpoint=tmp_path, **SETTINGS)
    assert some.attrs["interrupted"] == 1
    assert some["posterior"]["tokens"].shape == (3, 2, 3)
    assert equal(sv.sample(target, sampler, checkpoint=tmp_path, **SETTINGS), whole)


def test_ctrl_c_waits_for_the_step_under_way_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoints, "FIRST", 1e9)  # nothing is kept because it is time
    monkeypatch.setattr(checkpoints, "SECONDS", 1e9)
    target, sampler, step, taken = boxed_target(3, 5, 3, 2), sv.SVS(0.6), Chains.__next__, 0
    whole = sv.sample(target, sampler, **SETTINGS)

    def asked(self: Chains) -> Any:
        nonlocal taken
        taken += 1
        if taken == 5:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    def drawn(*arguments: Any) -> Any:
        nonlocal taken
        if taken == steps:
            raise stop
        taken += 1
        return draw(*arguments)

    monkeypatch.setattr(Chains, "__next__", asked)
    some = sv.sample(target, sampler, checkpoint=tmp_path, **SETTINGS)
    assert some.attrs["interrupted"] == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert capsys.readouterr().err.count("stopping after the step under way; once more stops at once") == 1
    assert read_manifest(tmp_path).progress["done"] == 5
    assert equal(sv.sample(target, sampler, checkpoint=tmp_path, **SETTINGS), whole)


def test_a_second_ctrl_c_does_not_wait() -> None:
    held = Stopping()
    with held:
        signal.raise_signal(signal.SIGINT)
        assert held.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_every_flipped_byte_of_a_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stopping(monkeypatch, 8):
        sv.sample(sentences(), sv.Guided(tries=3, texts=64), checkpoint=tmp_path, **SETTINGS)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.name != LOCK)
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    source = random.Random(6)
    for _ in range(500):
        path = source.choice(files)
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[source.randrange(len(whole))] ^= 1 << source.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(sv.SamplingError, match=re.escape(str(path))):
            sv.sample(sentences(), sv.Guided(tries=3, texts=64), checkpoint=tmp_path, **SETTINGS)
        path.write_bytes(whole)
    assert svs("runs", "check", str(tmp_path)).stdout.startswith(f"{tmp_path} is whole")
    path.write_bytes(damaged)
    assert str(path) in svs("runs", "check", str(tmp_path), code=1).stdout
    assert "holds no manifest.json" in svs("runs", "check", str(tmp_path.parent), code=2).stderr


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seed": 5}, r"another seed \(4, not 5\)"),
        ({"draws": 5}, r"another draws \(4, not 5\)"),
        ({"start": torch.zeros(3, 3, dtype=torch.int64)}, r"another start \(null, not "),
        ({"sampler": sv.SVS(0.5)}, r"another sampler scale \(0.6, not 0.5\)"),
        ({"sampler": sv.PNCG(2.0)}, r'another sampler class \("SVS", not "PNCG"\)'),
        ({"target": boxed_target(4, 5, 3, 2)}, "another target "),
        ({"target": boxed_target(3, 6, 3, 2)}, r"another target vocabulary \(5, not 6\)"),
    ],
)
def test_another_run_is_refused(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"target": boxed_target(3, 5, 3, 2), "sampler": sv.SVS(0.6), **SETTINGS}
    sv.sample(**asked, checkpoint=tmp_path)
    with pytest.raises(sv.SamplingError, match=said):
        sv.sample(**{**asked, **changed}, checkpoint=tmp_path)


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    target, sampler = boxed_target(3, 5, 3, 2), sv.SVS(scale=np.float64(0.6))
    whole = sv.sample(target, sv.SVS(0.6), checkpoint=tmp_path, **SETTINGS)
    again = sv.sample(target, sampler, checkpoint=tmp_path, **{**SETTINGS, "seed": np.int64(4)})
    assert equal(again, whole)


class Walk:
    """A user's sampler: a state of odds and ends that is changed in place, a report of its own."""

    class State(NamedTuple):
        tokens: Tensor
        visits: dict[str, Tensor]
        history: list[int]
        extra: Any = None

    class Report(NamedTuple):
        energy: Tensor
        evaluations: Tensor
        luck: Tensor

    def __init__(self, extra: Any = None) -> None:
        self.extra = extra

    def __repr__(self) -> str:
        return "Walk()"

    def init(self, target: Any, rng: sv.Rng, start: Any) -> Any:
        return self.State(torch.zeros(len(rng), 3, dtype=torch.int64), {"a": torch.zeros(5)}, [], self.extra)

    def step(self, target: Any, rng: sv.Rng, state: Any) -> Any:
        level = rng.uniform(3)
        state.tokens[:] = (state.tokens + (5 * level).long() + len(state.history)) % 5
        state.visits["a"][state.tokens[0, 0]] += 1
        state.history.append(int(state.tokens[0, 0]))
        energy = state.visits["a"][state.tokens[:, 0]].double()
        return state, self.Report(energy, torch.ones_like(state.tokens[:, 0]), level[:, 0])


def test_a_sampler_of_ones_own_goes_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = boxed_target(3, 5, 3, 2)
    whole = sv.sample(target, Walk(), **SETTINGS)
    assert "luck" in whole["sample_stats"]
    for steps in (3, 5):
        with stopping(monkeypatch, steps):
            sv.sample(target, Walk(), checkpoint=tmp_path, **SETTINGS)
    assert equal(sv.sample(target, Walk(), checkpoint=tmp_path, **SETTINGS), whole)


def test_a_sampler_whose_state_cannot_be_kept_is_refused_before_its_first_step(tmp_path: Path) -> None:
    walk = Walk(torch.Generator())
    walk.step = None  # type: ignore[assignment]
    with pytest.raises(sv.SamplingError, match=r"Walk's state\.extra is of type Generator, which a checkpoint cannot"):
        sv.sample(boxed_target(3, 5, 3, 2), walk, checkpoint=tmp_path, **SETTINGS)


def test_a_full_disk_leaves_a_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, sampler, calls = boxed_target(3, 5, 3, 2), sv.SVS(0.6), 0
    whole = sv.sample(target, sampler, **SETTINGS)

    def full(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(sv.SamplingError, match=r"\(No space left on device\).* make room and resume"):
            sv.sample(target, sampler, checkpoint=tmp_path, **SETTINGS)
    assert not list(tmp_path.glob("*.new"))
    assert read_manifest(tmp_path).progress["done"] > 2
    assert equal(sv.sample(target, sampler, checkpoint=tmp_path, **SETTINGS), whole)


def test_writes_take_their_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first comes after a second, each next after twice the time, up to 30 s, or to what is 2 % on a slow disk."""
    now = 0.0
    monkeypatch.setattr(checkpoints, "SECONDS", 30.0)
    monkeypatch.setattr(checkpoints, "SHARE", 0.02)
    monkeypatch.setattr(checkpoints, "monotonic", lambda: now)
    with checkpoints.Checkpoint(tmp_path) as kept:
        kept.store.begin("test", {}, {})
        commit, cost = kept.store.commit, 0.0

        def slow(*arguments: Any, **more: Any) -> None:
            nonlocal now
            now += cost
            commit(*arguments, **more)

        monkeypatch.setattr(kept.store, "commit", slow)
        waits = []
        for _ in range(8):
            began = now
            while not kept.is_due:
                now += 0.5
            waits.append(now - began)
            kept.save()
            cost = 1.0 if len(waits) == 6 else 0.0
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 50.0]


TEXTS = ("sample", "-n", "20", "--length", "5", "--ends", "never", "--seed", "2")
CASES = {
    "chains": ("--control", "food=Italian@0.3", "--sampler", "svs+refresh", "--warmup", "1"),
    "auto": ("--control", "keyword=a", "--prompt", "The"),
    "prompts": ("--prompts", "prompts.txt"),
    "prompts under control": ("--prompts", "prompts.txt", "--control", "food=Italian@0.1", "--sampler", "rejection"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_command_that_was_stopped_writes_the_same_file(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from structured_voronoi.engine import accepted_texts as engine_texts
    from structured_voronoi.engine import text_chains as texts

    (tmp_path / "prompts.txt").write_text("Near the\nThe\nAt a\n")
    words = (*TEXTS, *CASES[case], "--checkpoint", "run", "--resume")
    make_texts, made = texts.make_texts, 0

    def stopped(*arguments: Any) -> Any:
        nonlocal made
        made += 1
        if made == 2:
            raise Stopped
        return make_texts(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(texts, "make_texts", stopped)
        patch.setattr(engine_texts, "make_texts", stopped)
        with pytest.raises(Stopped):
            svs(*words, "--out", "stopped.jsonl", cwd=tmp_path)
    kept = read_manifest(tmp_path / "run")
    texts_kept = "texts" if any(name.startswith("batch-") for name in kept.parts) else ""
    assert kept.far.endswith(texts_kept)  # whatever has written them, it said how far they are
    resumed = svs(*words, "--out", "resumed.jsonl", cwd=tmp_path)
    fresh = [word for word in words if word not in ("--checkpoint", "run", "--resume")]
    whole = svs(*fresh, "--out", "whole.jsonl", cwd=tmp_path)
    assert (tmp_path / "resumed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert resumed.stdout == whole.stdout
    again = svs(*words[: len(TEXTS) + len(CASES[case])], "--checkpoint", "run", "--resume", cwd=tmp_path)
    assert again.stdout == whole.stdout


@pytest.mark.parametrize(("case", "steps"), [("chains", 1), ("prompts under control", 0)])
def test_more_texts_than_at_first_are_those_of_a_run_that_had_them_from_the_start(
    case: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raised amid the first batch, after some steps, and once more after the end."""
    controls = CASES[case][CASES[case].index("--control") :]

    def draw(texts: int, *more: str, code: int = 0) -> str:
        return svs("sample", "-n", str(texts), *TEXTS[3:], *controls, *more, code=code, cwd=tmp_path).stderr

    kept = ("--checkpoint", "run", "--resume", "--out", "grown.jsonl")
    with stopping(monkeypatch, steps):
        draw(3, *kept)
    for texts in (5, 12):
        draw(texts, *kept)
    draw(12, "--out", "whole.jsonl")
    assert (tmp_path / "grown.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    manifest = read_manifest(tmp_path / "run")
    assert (manifest.settings["n"], manifest.far, manifest.finished) == (12, "12 of 12 texts", True)
    assert "another n (12, not 5)" in draw(5, *kept, code=2)
    if case == "chains":
        (tmp_path / "prompts.txt").write_text("Near the\nThe\n")
        several = ("--prompts", "prompts.txt", "--checkpoint", "several", "--resume")
        draw(1, *several)
        assert "those of all prompts but the first would be others; ask for 1 again" in draw(2, *several, code=2)


def test_a_command_refuses_what_is_not_its_run(tmp_path: Path) -> None:
    words = ("sample", "-n", "1", "--length", "3", "--ends", "never", "--checkpoint", str(tmp_path / "run"))
    svs(*words)
    assert "add --resume or choose another folder" in svs(*words, code=2).stderr
    for more, said in (
        (("--seed", "1"), "another seed (0, not 1)"),
        (("--control", "keyword=a"), "another controls keyword=a (null, not 1.0)"),
        (("--prompt", "The"), 'another prompts ([""], not ["The"])'),
    ):
        assert said in svs(*words, *more, "--resume", code=2).stderr
    assert "--resume needs the folder" in svs("sample", "--resume", code=2).stderr
    assert "--resume needs the folder" in svs("probability", "--control", "keyword=a", "--resume", code=2).stderr
    (tmp_path / "texts.txt").write_text("\n".join(one.text for one in descriptions(30, seed=0)))
    training = ("train", "lm", "--data", str(tmp_path / "texts.txt"), "--out", str(tmp_path / "model"))
    assert "--resume needs the folder" in svs(*training, "--resume", code=2).stderr
    assert (
        "holds a run of texts, not of training"
        in svs(*training, "--resume", "--checkpoint", str(tmp_path / "run"), code=2).stderr
    )
    with pytest.MonkeyPatch.context() as patch:  # before anything is loaded
        patch.setattr(sv.LanguageModel, "load", None)
        asked = ("probability", "--control", "keyword=a", "--checkpoint", str(tmp_path / "run"))
        assert "add --resume or choose another folder" in svs(*asked, code=2).stderr
        assert "holds a run of texts, not of probability" in svs(*asked, "--resume", code=2).stderr
    nowhere = ("--model", str(tmp_path / "nowhere"), "--checkpoint", str(tmp_path / "new" / "run"))
    svs("sample", *nowhere, code=2)
    svs("probability", "--control", "keyword=a", *nowhere, code=2)
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    assert "it is a file" in svs("sample", "--checkpoint", str(tmp_path / "file"), code=2).stderr
    (tmp_path / "link").symlink_to("nowhere")
    assert "it is a link that leads nowhere" in svs("sample", "--checkpoint", str(tmp_path / "link"), code=2).stderr
    with Store(tmp_path / "run"):
        assert f"is in use by process {os.getpid()}" in svs(*words, "--resume", code=2).stderr
    shown = svs("runs", "show", str(tmp_path / "run")).stdout
    assert "texts, finished, 1 of 1 texts" in shown
    assert '  model: "bundled"\n' in shown
    assert "\ntext: " in shown
    (batch,) = (tmp_path / "run").glob("texts-*")
    batch.write_bytes(b"?" * batch.stat().st_size)
    assert f"{batch} is damaged" in svs("runs", "show", str(tmp_path / "run"), code=2).stderr
    batch.unlink()
    assert f"{batch} is missing; restore it" in svs("runs", "show", str(tmp_path / "run"), code=2).stderr


def test_a_run_that_goes_on_with_other_libraries_says_so(tmp_path: Path) -> None:
    words = ("sample", "-n", "1", "--length", "3", "--ends", "never", "--checkpoint", str(tmp_path / "run"), "--resume")
    svs(*words)
    assert "was begun with" not in svs(*words).stderr
    with Store(tmp_path / "run") as store:
        store._write_manifest(replace(store.run, versions={**store.run.versions, "torch": "1.0"}))
    assert f"svs: the run was begun with torch 1.0, now {version('torch')}: what is to come" in svs(*words).stderr


def test_probability_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineSettings(min_learning_tries=64, batch_rows=64, lookahead=LookaheadSettings(steps=20))
    settings: dict[str, Any] = {"texts": 256, "seed": 2, "progress": False, "monte_carlo": True, "settings": engine}
    whole = sv.probability(sentences(), **settings)
    monkeypatch.setattr(checkpoints, "FIRST", 0.0)
    for _ in range(2):
        with stopping(monkeypatch, 2):
            sv.probability(sentences(), **settings, checkpoint=tmp_path)
    assert sv.probability(sentences(), **settings, checkpoint=tmp_path) == whole
    with pytest.raises(sv.SamplingError, match=r"another texts \(256, not 128\)"):
        sv.probability(sentences(), **{**settings, "texts": 128}, checkpoint=tmp_path)
    with pytest.raises(sv.SamplingError, match=r"holds a run of probability, not of sv\.sample"):
        sv.sample(sentences(), sv.Rejection(), checkpoint=tmp_path, **SETTINGS)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_training_that_is_asked_to_stop_keeps_the_step_under_way(number: int, tmp_path: Path) -> None:
    texts = [one.text for one in descriptions(60, seed=0)]
    corpus, recipe = Corpus(texts, texts[:9]), Recipe(280, width=8, layers=1, heads=1, context=32, batch=8)
    whole, steps = train_language_model(corpus, tmp_path / "whole", recipe, lambda note, steps: None), recipe.steps(60)
    taken, previous = 0, signal.signal(signal.SIGTERM, signal.default_int_handler)

    def ask(note: str, steps: int) -> None:
        nonlocal taken
        taken += steps
        if taken == 3:
            signal.raise_signal(number)

    try:
        with pytest.raises(KeyboardInterrupt) as stop:
            train_language_model(corpus, tmp_path / "part", recipe, ask)
        assert stop.value.__notes__ == [f"4 of {steps} steps are kept in {tmp_path / 'part' / 'unfinished'}"]
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, previous)
    folder = tmp_path / "part" / "unfinished"
    assert read_manifest(folder).progress["done"] == 4
    with Store(folder), pytest.raises(sv.SamplingError, match="is in use by process"):
        train_language_model(corpus, tmp_path / "part", recipe, ask)
    state = folder / "state-000000004.safetensors"
    data = state.read_bytes()
    state.write_bytes(data[:-1] + b"?")
    with pytest.raises(sv.SamplingError, match=r"state-000000004.safetensors is damaged"):
        train_language_model(corpus, tmp_path / "part", recipe, ask)
    state.write_bytes(data)
    assert train_language_model(corpus, tmp_path / "part", recipe, ask) == whole
    assert not folder.exists()
    assert unfinished.CHECKPOINT_STEPS > 4  # it was kept because it was asked to stop


def test_sigterm_ends_a_command_as_ctrl_c_does(tmp_path: Path) -> None:
    out, folder = tmp_path / "texts.jsonl", tmp_path / "run"
    words = ["sample", "-n", "5000", "--sampler", "svs+refresh", "--warmup", "0", "--out", out, "--checkpoint", folder]
    running = subprocess.Popen([SVS, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while not out.exists() and running.poll() is None:
            time.sleep(0.1)
        running.terminate()
        _, said = running.communicate(timeout=120)
    finally:
        running.kill()
    assert running.returncode == 143
    assert "Traceback" not in said
    lines = out.read_text(encoding="utf-8")
    assert lines.endswith("\n")
    count = len([json.loads(line) for line in lines.splitlines()])
    assert count >= 8
    last = said.splitlines()[-1]
    assert last.startswith("svs: ended by SIGTERM; ")
    assert f"; {count} lines are in {out}; go on with: svs sample -n 5000 " in last
    assert last.endswith(f" --checkpoint {folder} --resume")
    assert re.search(rf"; [\d,]+ of 5,000 texts are kept in {folder}; ", last) or read_manifest(folder).far == ""
    svs("runs", "check", str(folder))


def test_lines_are_whole_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    path.write_text("old\n")
    path.chmod(0o600)
    with LineFile(path) as lines:
        assert path.read_text() == "old\n"
        lines.write(["one", "two"])
        assert path.read_text() == "one\ntwo\n"
        lines.write(["three"])
        assert path.read_text() == "one\ntwo\nthree\n"
        write = os.write
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda file, data: write(file, data[:2]))  # the disk is full
            with pytest.raises(sv.SamplingError, match=r"lines cannot be written \(No space left on device\)"):
                lines.write(["four"])
        assert path.read_text() == "one\ntwo\nthree\n"
    assert path.stat().st_mode & 0o777 == 0o600
    with LineFile(Path("/dev/full")) as full, pytest.raises(sv.SamplingError, match="/dev/full cannot be written"):
        full.write(["one"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        with LineFile(path) as lines, pytest.raises(sv.SamplingError, match="No space"):
            lines.write(["new"])
    assert path.read_text() == "one\ntwo\nthree\n"
    assert os.listdir(tmp_path) == ["lines"]
