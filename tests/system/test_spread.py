"""Runs with workers give the same draws for every split, also if a worker dies or the run is resumed."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
from xarray import DataTree

import structured_voronoi as sv
from helpers import svs as run_svs
from structured_voronoi.engine.folder_checkpoint import fingerprint
from structured_voronoi.engine.worker_chains import split_chains
from structured_voronoi.engine.worker_checkpoint import WorkerCheckpoint
from structured_voronoi.engine.worker_tasks import Task, check_same_target
from structured_voronoi.problem.problem import bind
from structured_voronoi.workers.messages import (
    Event,
    Lost,
    Reported,
    Work,
    from_bytes,
    handle_message,
    read_answer,
    to_bytes,
)
from structured_voronoi.workers.processes import ProcessWorkers
from system.commands import svs
from system.fragile import KillingTarget, every_step

SETTINGS: dict[str, Any] = {"chains": 8, "draws": 6, "warmup": 2, "thin": 2, "seed": 3, "progress": False}
SAMPLER = sv.SVS(scale=0.6)


def same(one: DataTree, other: DataTree) -> bool:
    """True if tokens, statistics and settings are equal to the last bit."""
    groups = ("posterior", "sample_stats")
    return one.attrs == other.attrs and all(one[name].dataset.identical(other[name].dataset) for name in groups)


class LocalWorkers:
    """Workers in this process: all messages are packed as usual, and one worker is lost after a number of them."""

    def __init__(self, count: int, lost_after: int = -1) -> None:
        self.count, self.lost_after = count, lost_after
        self.work: dict[int, Work | None] = {}
        self.answers: dict[int, deque[bytes]] = {}
        self.running: set[int] = set()

    def start_worker(self, worker: int, prepare: bytes) -> None:
        self.answers[worker] = deque()
        self.work[worker] = handle_message(None, prepare, self.answers[worker].append)

    def submit(self, worker: int, task: bytes) -> None:
        self.running.add(worker)
        handle_message(self.work[worker], task, self.answers[worker].append)

    def wait(self) -> list[Event]:
        while True:
            for worker in sorted(self.running, reverse=True):  # results arrive in another order than the tasks
                event = read_answer(worker, self.answers[worker].popleft())
                self.lost_after -= 1
                if self.lost_after == 0:
                    event = Lost(worker, "the test")
                if event is not None:
                    self.running -= set() if isinstance(event, Reported) else {worker}
                    return [event]

    def stop(self) -> None:
        self.work.clear()


@pytest.fixture
def given_parts(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of the files that each task is given."""
    found: list[list[str]] = []
    make = WorkerCheckpoint._make_task

    def recording(self: WorkerCheckpoint, *arguments: Any) -> Task:
        task = make(self, *arguments)
        found.append(list(task.parts))
        return task

    monkeypatch.setattr(WorkerCheckpoint, "_make_task", recording)
    return found


def test_killed_worker_process_does_not_change_the_draws(tmp_path: Path, given_parts: list[list[str]]) -> None:
    target = KillingTarget(tmp_path, fatal=12)
    distributed = sv.sample(target, SAMPLER, **SETTINGS, checkpoint=every_step(), workers=2)
    assert target.mark.exists()
    assert len(given_parts) == 3
    assert given_parts[0] == given_parts[1] == []
    assert any(name.startswith("chains.") for name in given_parts[2])  # it resumed from what the killed one saved
    assert same(distributed, sv.sample(target, SAMPLER, **SETTINGS))


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("lost_after", [-1, 5])
def test_every_split_gives_the_same_draws(workers: int, lost_after: int) -> None:
    potts = sv.PottsTarget(side=2, states=3, coupling=0.5)
    for sampler in (sv.SVS(scale=0.5), sv.Cycle(sv.PNCG(step_size=1.0), sv.GibbsWithGradients())):
        alone = sv.sample(potts, sampler, **SETTINGS)
        local = LocalWorkers(workers, lost_after)
        assert same(sv.sample(potts, sampler, **SETTINGS, checkpoint=every_step(), workers=local), alone)


def test_given_start_is_split_with_its_chains() -> None:
    target = sv.verify.random_target(1, 6, 3, 4)
    start = sv.Rng(5, 8).categorical(target.embeddings.new_zeros(8, 3, 6))
    alone = sv.sample(target, SAMPLER, **SETTINGS, start=start)
    assert same(sv.sample(target, SAMPLER, **SETTINGS, start=start, workers=LocalWorkers(3)), alone)


def interrupt_after(monkeypatch: pytest.MonkeyPatch, saves: int) -> None:
    """Press Ctrl-C after a number of saves of the workers."""
    receive, received = WorkerCheckpoint._receive, 0

    def interrupted(self: WorkerCheckpoint, number: int, message: Any) -> None:
        nonlocal received
        receive(self, number, message)
        received += "new" in message
        if received == saves:
            raise KeyboardInterrupt

    monkeypatch.setattr(WorkerCheckpoint, "_receive", interrupted)


@pytest.mark.parametrize("later", [1, 4])
def test_run_is_resumed_with_another_number_of_workers(
    later: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = sv.verify.random_target(1, 6, 3, 4)
    alone = sv.sample(target, SAMPLER, **SETTINGS)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 20)  # one worker has drawn all, the other some of its draws
        stopped = sv.sample(target, SAMPLER, **SETTINGS, checkpoint=every_step(tmp_path), workers=LocalWorkers(2))
    assert stopped.attrs["interrupted"] == 1
    drawn = stopped["posterior"].sizes["draw"]
    assert 0 < drawn < SETTINGS["draws"]
    assert stopped["posterior"].dataset.identical(alone["posterior"].dataset.isel(draw=slice(drawn)))
    returned, saved = sv.diagnose(stopped), sv.diagnose(tmp_path)  # from the files of both workers
    assert (saved.mixing, saved.warnings) == (returned.mixing, returned.warnings)
    assert same(sv.sample(target, SAMPLER, **SETTINGS, checkpoint=tmp_path, workers=LocalWorkers(later)), alone)
    finished = sv.sample(target, SAMPLER, **SETTINGS, checkpoint=tmp_path, workers=ProcessWorkers(0))
    assert same(finished, alone)  # a finished run needs no worker


def test_run_that_was_begun_without_workers_is_resumed_without(tmp_path: Path) -> None:
    target = sv.verify.random_target(1, 6, 3, 4)
    alone = sv.sample(target, SAMPLER, **SETTINGS, checkpoint=tmp_path)
    assert same(sv.sample(target, SAMPLER, **SETTINGS, checkpoint=tmp_path, workers=2), alone)


def test_chains_are_split_into_groups_of_nearly_equal_size() -> None:
    for chains, parts, sizes in ((8, 2, [4, 4]), (8, 8, [1] * 8), (3, 8, [1, 1, 1]), (10, 4, [2, 3, 2, 3])):
        groups = list(split_chains(chains, parts).values())
        assert [len(group) for group in groups] == sizes
        assert [number for group in groups for number in group] == list(range(chains))


TEXTS: dict[str, dict[str, Any]] = {
    "chains": {"n": 5, "sampler": "svs+refresh", "warmup": 2},
    "several prompts": {"n": 3, "prompt": ["Near the", "The", "In the"]},
    "chains of several prompts": {"n": 3, "prompt": ["Near the", "The"], "sampler": "refresh", "warmup": 2},
    "controls": {"n": 3, "prompt": ["Near the", "The"], "controls": [sv.characters(1)]},
}


@pytest.mark.parametrize("settings", TEXTS.values(), ids=TEXTS)
def test_every_split_gives_the_same_texts(settings: dict[str, Any]) -> None:
    settings = {**settings, "max_tokens": 6, "finish": "length", "progress": False}
    alone = sv.generate("bundled", **settings)
    distributed = sv.generate("bundled", **settings, workers=LocalWorkers(2, 4))
    assert distributed.draws == alone.draws
    assert distributed.diagnostics == alone.diagnostics


def test_extended_run_with_workers_has_the_texts_of_a_longer_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"max_tokens": 6, "finish": "length", "sampler": "svs+refresh", "warmup": 2, "progress": False}

    def draw(n: int) -> sv.Generation:
        return sv.generate("bundled", n=n, **settings, checkpoint=every_step(tmp_path), workers=LocalWorkers(2))

    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            draw(5)
    assert draw(9).draws == sv.generate("bundled", n=9, **settings).draws


def test_every_split_gives_the_same_probability() -> None:
    target = sv.load("bundled").target("", [sv.characters(10)], max_tokens=6)
    lookahead = sv.Lookahead.fit(target, texts=64)
    settings = {"texts": 100, "lookahead": lookahead, "monte_carlo": True, "progress": False}
    assert sv.probability(target, **settings, workers=LocalWorkers(3)) == sv.probability(target, **settings)


def test_workers_find_a_control_of_the_current_folder_and_no_other_module_there(tmp_path: Path) -> None:
    """The ``sys.path`` of the workers holds the current folder only because of the control."""
    (tmp_path / "rules.py").write_text(
        "import os\n"
        "print(os.getpid(), file=open('importing.txt', 'a'))\n"
        "import helpers_of_rules\n"
        "def short(text):\n    return len(text) < helpers_of_rules.LONGEST\n"
    )
    (tmp_path / "helpers_of_rules.py").write_text("LONGEST = 60\n")
    for name in ("multiprocessing", "torch", "pydantic", "json"):
        (tmp_path / f"{name}.py").write_text("open('executed', 'w').close()\n")
    words = ("--control", "rules:short", "--sampler", "rejection", "--finish", "length", "--max-tokens", "4", "-n", "8")
    run_svs("sample", *words, "--workers", "2", "--out", "texts.jsonl", cwd=tmp_path)
    assert len((tmp_path / "texts.jsonl").read_text().splitlines()) == 8
    assert len(set((tmp_path / "importing.txt").read_text().split())) == 3  # the command and both workers
    assert not (tmp_path / "executed").exists()


def test_command_with_workers_writes_the_same_file(tmp_path: Path) -> None:
    words = ("sample", "-n", "4", "--max-tokens", "6", "--finish", "length", "--sampler", "ancestral", "--out")
    svs(*words, str(tmp_path / "one.jsonl"))
    done = svs(*words, str(tmp_path / "two.jsonl"), "--workers", "2", "--checkpoint", str(tmp_path / "run"))
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert len(done.stdout.splitlines()) == 4


@pytest.mark.parametrize("workers", [0, -1, 1.5, "two", "rays", "ray://", ""])
def test_invalid_workers_are_refused(workers: Any) -> None:
    with pytest.raises(sv.SamplingError) as caught:
        sv.sample(sv.PottsTarget(side=2), SAMPLER, **SETTINGS, workers=workers)
    assert caught.value.argument == "workers"


def test_target_is_sent_by_the_name_of_its_model_and_compared() -> None:
    target = sv.load("bundled").target("Near", max_tokens=5, finish="stop", stop=".")
    assert len(to_bytes(target)) < 1000
    loaded = from_bytes(to_bytes(target))
    assert (loaded.prompt, loaded.length, loaded.stop, loaded.finish) == ("Near", 5, (".",), "stop")
    assert loaded.network is not target.network
    target.embeddings.mul_(1.5)  # as if the model had been trained further
    with pytest.raises(sv.SamplingError, match="the target of a worker has"):
        check_same_target(bind(loaded), fingerprint(bind(target)))
