"""Runs of `sample` that are interrupted at any moment give the same draws when they are resumed."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import structured_voronoi as sv
from helpers import ALL_SAMPLERS, boxed_target
from structured_voronoi.core.contracts import Chains
from structured_voronoi.core.stopping import Stopping
from structured_voronoi.engine.chains import ChainPosition
from structured_voronoi.engine.checkpoint import CheckpointSettings
from structured_voronoi.engine.folder_checkpoint import FolderCheckpoint
from structured_voronoi.samplers import svs as svs_sampler
from structured_voronoi.storage.locks import LOCK
from structured_voronoi.storage.manifest import DamagedError, read_manifest
from structured_voronoi.storage.store import Store
from system.commands import svs
from system.fragile import every_step
from system.interruptions import autoregressive_table, stop_after

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {"chains": 3, "draws": 4, "warmup": 2, "thin": 3, "seed": 4, "progress": False}
SAMPLERS = {
    **ALL_SAMPLERS,
    "cycle": sv.Cycle(sv.SVS(0.6), sv.PNCG(2.0)),
    "refresh": sv.Refresh(block=2),
    "svs + refresh": sv.Cycle(sv.SVS(0.6), sv.Refresh(block=2)),
    "rejection": sv.Rejection(),
    "guided": sv.Guided(tries=3, texts=64),
    "smc": sv.baselines.SMC(particles=4, texts=64),
    "cold": sv.baselines.COLD(iterations=3),
}


@pytest.fixture(autouse=True)
def short_pilot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svs_sampler, "PILOT_SCALES", (0.3, 0.7))


def equal(one: Any, other: Any) -> bool:
    """True if all draws, statistics and attributes are equal to the last bit."""
    groups = ("posterior", "sample_stats")
    same = all(one[group].to_dataset().identical(other[group].to_dataset()) for group in groups)
    return same and one.attrs == other.attrs


@pytest.mark.parametrize("name", SAMPLERS)
def test_resumed_run_gives_the_same_draws(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = boxed_target(3, 5, 3, 2) if name in [*ALL_SAMPLERS, "cycle"] else autoregressive_table()
    sampler, checkpoint = SAMPLERS[name], every_step(tmp_path)
    whole = sv.sample(target, sampler, **SETTINGS)
    for steps in (1, 3, 4):
        with stop_after(monkeypatch, steps):
            sv.sample(target, sampler, checkpoint=checkpoint, **SETTINGS)
    assert equal(sv.sample(target, sampler, checkpoint=checkpoint, **SETTINGS), whole)
    monkeypatch.setattr(Chains, "__init__", None)  # a finished run takes no step and needs no start
    assert equal(sv.sample(target, sampler, checkpoint=checkpoint, **SETTINGS), whole)


def test_resuming_without_the_random_streams_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, sampler = boxed_target(3, 5, 3, 2), sv.SVS(0.6)
    whole = sv.sample(target, sampler, **SETTINGS)
    with stop_after(monkeypatch, 5):
        sv.sample(target, sampler, checkpoint=every_step(tmp_path), **SETTINGS)
    restore = ChainPosition.restore

    def broken(self: ChainPosition) -> Any:
        counter = self.chains.rng.counter.clone()
        record = restore(self)
        self.chains.rng.counter = counter
        return record

    monkeypatch.setattr(ChainPosition, "restore", broken)
    assert not equal(sv.sample(target, sampler, checkpoint=every_step(tmp_path), **SETTINGS), whole)


def test_fifty_kills_lose_nothing() -> None:
    """Of sampling, texts, probabilities and trainings, at random writes, steps and times."""
    script = ROOT / "benchmarks" / "kills.py"
    done = subprocess.run(
        [sys.executable, script, "--kills", "50", "--seed", "1"], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kills, runs, unchanged = map(int, re.findall(r"(\d+) (?:kills|runs) ", done.stdout))
    assert kills >= 50
    assert runs == unchanged


def test_ctrl_c_returns_the_draws_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, sampler = boxed_target(3, 5, 3, 2), sv.SVS(0.6)
    whole = sv.sample(target, sampler, **SETTINGS)
    with stop_after(monkeypatch, 9, KeyboardInterrupt):
        some = sv.sample(target, sampler, checkpoint=every_step(tmp_path), **SETTINGS)
    assert some.attrs["interrupted"] == 1
    assert some["posterior"]["tokens"].shape == (3, 2, 3)
    assert equal(sv.sample(target, sampler, checkpoint=tmp_path, **SETTINGS), whole)


def test_ctrl_c_finishes_and_saves_the_current_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = CheckpointSettings(tmp_path, first_interval=1e9, interval=1e9)
    target, sampler, step, taken = boxed_target(3, 5, 3, 2), sv.SVS(0.6), Chains.__next__, 0
    whole = sv.sample(target, sampler, **SETTINGS)

    def interrupted(self: Chains) -> Any:
        nonlocal taken
        taken += 1
        if taken == 5:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Chains, "__next__", interrupted)
    some = sv.sample(target, sampler, checkpoint=checkpoint, **SETTINGS)
    assert some.attrs["interrupted"] == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert capsys.readouterr().err.count("press Ctrl-C again to abort") == 1
    assert read_manifest(tmp_path).progress["done"] == 5
    assert equal(sv.sample(target, sampler, checkpoint=checkpoint, **SETTINGS), whole)


def test_second_ctrl_c_aborts() -> None:
    stopping = Stopping()
    with stopping:
        signal.raise_signal(signal.SIGINT)
        assert stopping.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_every_flipped_bit_of_a_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stop_after(monkeypatch, 8):
        sv.sample(autoregressive_table(), sv.Guided(tries=3, texts=64), checkpoint=every_step(tmp_path), **SETTINGS)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.name != LOCK)
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    source = random.Random(6)
    for _ in range(500):
        path = source.choice(files)
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[source.randrange(len(whole))] ^= 1 << source.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(sv.SamplingError) as caught:
            sv.sample(autoregressive_table(), sv.Guided(tries=3, texts=64), checkpoint=tmp_path, **SETTINGS)
        assert str(path) in caught.value.message
        path.write_bytes(whole)
    assert svs("runs", "check", str(tmp_path)).stdout.startswith("OK: ")
    path.write_bytes(damaged)
    assert str(path) in svs("runs", "check", str(tmp_path), code=1).stdout
    assert "has no manifest.json" in svs("runs", "check", str(tmp_path.parent), code=2).stderr


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"seed": 5}, "seed"),
        ({"draws": 5}, "draws"),
        ({"start": torch.zeros(3, 3, dtype=torch.int64)}, "start"),
        ({"sampler": sv.SVS(0.5)}, "sampler scale"),
        ({"sampler": sv.PNCG(2.0)}, "sampler class"),
        ({"target": boxed_target(4, 5, 3, 2)}, "target "),
        ({"target": boxed_target(3, 6, 3, 2)}, "target vocabulary"),
    ],
)
def test_run_with_other_settings_is_refused(changed: dict[str, Any], name: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"target": boxed_target(3, 5, 3, 2), "sampler": sv.SVS(0.6), **SETTINGS}
    sv.sample(**asked, checkpoint=tmp_path)
    with pytest.raises(sv.SamplingError) as caught:
        sv.sample(**{**asked, **changed}, checkpoint=tmp_path)
    assert f"holds a run with {name}" in caught.value.message


def test_numpy_numbers_are_equal_to_python_numbers(tmp_path: Path) -> None:
    target = boxed_target(3, 5, 3, 2)
    whole = sv.sample(target, sv.SVS(0.6), checkpoint=tmp_path, **SETTINGS)
    settings = {**SETTINGS, "seed": np.int64(4)}
    assert equal(sv.sample(target, sv.SVS(scale=np.float64(0.6)), checkpoint=tmp_path, **settings), whole)


class Walk:
    """A user's sampler, with a nested state that is changed in place and statistics of its own."""

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


def test_run_of_a_custom_sampler_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = boxed_target(3, 5, 3, 2)
    whole = sv.sample(target, Walk(), **SETTINGS)
    assert "luck" in whole["sample_stats"]
    for steps in (3, 5):
        with stop_after(monkeypatch, steps):
            sv.sample(target, Walk(), checkpoint=every_step(tmp_path), **SETTINGS)
    assert equal(sv.sample(target, Walk(), checkpoint=tmp_path, **SETTINGS), whole)


def test_sampler_whose_state_cannot_be_saved_is_refused_before_its_first_step(tmp_path: Path) -> None:
    walk = Walk(torch.Generator())
    walk.step = None  # type: ignore[assignment]
    with pytest.raises(sv.SamplingError) as caught:
        sv.sample(boxed_target(3, 5, 3, 2), walk, checkpoint=tmp_path, **SETTINGS)
    assert caught.value.message == "Walk's state.extra is of type Generator, which cannot be saved"


def test_run_is_resumed_after_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, sampler, calls = boxed_target(3, 5, 3, 2), sv.SVS(0.6), 0
    whole = sv.sample(target, sampler, **SETTINGS)

    def full(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(sv.SamplingError) as caught:
            sv.sample(target, sampler, checkpoint=every_step(tmp_path), **SETTINGS)
    assert caught.value.cause == "No space left on device"
    assert caught.value.remedy.startswith("free some space and resume")
    assert not list(tmp_path.glob("*.new"))
    assert read_manifest(tmp_path).progress["done"] > 2
    assert equal(sv.sample(target, sampler, checkpoint=tmp_path, **SETTINGS), whole)


def test_intervals_between_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 s, then twice as long each time up to 30 s; longer if a save takes more than 2 % of the time."""
    now = 0.0
    monkeypatch.setattr("structured_voronoi.engine.stored_checkpoint.monotonic", lambda: now)
    with FolderCheckpoint(Store(tmp_path)) as checkpoint:
        checkpoint.store.begin("test", {}, {})
        commit, cost = checkpoint.store.commit, 0.0

        def slow(*arguments: Any, **more: Any) -> None:
            nonlocal now
            now += cost
            commit(*arguments, **more)

        monkeypatch.setattr(checkpoint.store, "commit", slow)
        intervals = []
        for _ in range(8):
            began = now
            while not checkpoint.is_due:
                now += 0.5
            intervals.append(now - began)
            cost = 1.0 if len(intervals) == 7 else 0.0
            checkpoint.save()
    assert intervals == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 50.0]


def test_damaged_checkpoint_raises_its_own_error(tmp_path: Path) -> None:
    sv.sample(boxed_target(3, 5, 3, 2), sv.SVS(0.6), checkpoint=tmp_path, **SETTINGS)
    (tmp_path / "counts.safetensors").write_bytes(b"")
    with pytest.raises(DamagedError):
        sv.sample(boxed_target(3, 5, 3, 2), sv.SVS(0.6), checkpoint=tmp_path, **SETTINGS)
