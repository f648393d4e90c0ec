"""Runs on workers: the same draws for every split, also where a worker is lost, and after the run was stopped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from xarray import DataTree

import structured_voronoi as sv
from helpers import svs as run_svs
from structured_voronoi.engine import checkpoint as checkpoints
from structured_voronoi.engine import worker_chains as spread_chains
from structured_voronoi.engine import worker_checkpoint as spread
from structured_voronoi.engine.worker_checkpoint import SpreadCheckpoint, Task
from structured_voronoi.problem.problem import bind
from structured_voronoi.workers.pool import Event, Lost, Work, event_of, packed, respond, unpacked
from structured_voronoi.workers.processes import Processes
from system.commands import svs
from system.fragile import Fragile

SETTINGS: dict[str, Any] = {"chains": 8, "draws": 6, "warmup": 2, "thin": 2, "seed": 3, "progress": False}
SAMPLER = sv.SVS(scale=0.6)


def same(one: DataTree, other: DataTree) -> bool:
    """Tokens, statistics and settings, to the last bit."""
    groups = ("posterior", "sample_stats")
    return one.attrs == other.attrs and all(one[name].dataset.identical(other[name].dataset) for name in groups)


class Here:
    """Workers in this process: all that they are sent and send is packed, and one is lost after so many messages."""

    def __init__(self, count: int, lost_after: int = -1) -> None:
        self.count, self.lost_after = count, lost_after
        self.work: dict[int, Work | None] = {}
        self.answers: dict[int, deque[bytes]] = {}
        self.given: set[int] = set()

    def start(self, worker: int, prepare: bytes) -> None:
        self.answers[worker] = deque()
        self.work[worker] = respond(None, prepare, self.answers[worker].append)

    def give(self, worker: int, task: bytes) -> None:
        self.given.add(worker)
        respond(self.work[worker], task, self.answers[worker].append)

    def wait(self) -> list[Event]:
        while True:
            for worker in sorted(self.given, reverse=True):  # the last comes first, so that order is seen to be kept
                event = event_of(worker, self.answers[worker].popleft())
                self.lost_after -= 1
                if self.lost_after == 0:
                    event = Lost(worker, "the test")
                if event is not None:
                    self.given -= {worker} if not hasattr(event, "message") else set()
                    return [event]

    def stop(self) -> None:
        self.work.clear()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Workers are in this process; checkpoints are written after every step."""
    monkeypatch.setattr(checkpoints, "SECONDS", 0.0)
    monkeypatch.setattr(checkpoints, "SHARE", float("inf"))

    def losing(after: int = -1) -> None:
        monkeypatch.setattr(spread, "hire", lambda workers, folder: Here(int(workers), after))

    losing()
    return losing


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The parts that go with tasks when they are begun."""
    found: list[list[str]] = []
    make = SpreadCheckpoint._make_task

    def noting(self: SpreadCheckpoint, *arguments: Any) -> Task:
        task = make(self, *arguments)
        found.append(list(task.parts))
        return task

    monkeypatch.setattr(SpreadCheckpoint, "_make_task", noting)
    return found


def test_two_processes_of_which_one_is_killed_draw_what_one_draws(tmp_path: Path, given: list[list[str]]) -> None:
    target = Fragile(tmp_path, fatal=12)
    spread_over_two = sv.sample(target, SAMPLER, **SETTINGS, workers=2)
    assert target.mark.exists()
    assert len(given) == 3
    assert given[0] == given[1] == []
    assert any(name.startswith("chains.") for name in given[2])  # it went on where the killed one was
    assert same(spread_over_two, sv.sample(target, SAMPLER, **SETTINGS))


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("lost_after", [-1, 5])
def test_every_split_draws_the_same(workers: int, lost_after: int, here: Callable[[int], None]) -> None:
    here(lost_after)
    potts = sv.PottsTarget(side=2, states=3, coupling=0.5)
    for sampler in (sv.SVS(scale=0.5), sv.Cycle(sv.PNCG(step_size=1.0), sv.GibbsWithGradients())):
        alone = sv.sample(potts, sampler, **SETTINGS)
        assert same(sv.sample(potts, sampler, **SETTINGS, workers=workers), alone)


@pytest.mark.usefixtures("here")
def test_a_start_is_split_with_its_chains() -> None:
    target = sv.verify.random_target(1, 6, 3, 4)
    start = sv.Rng(5, 8).categorical(target.embeddings.new_zeros(8, 3, 6))
    alone = sv.sample(target, SAMPLER, **SETTINGS, start=start)
    assert same(sv.sample(target, SAMPLER, **SETTINGS, start=start, workers=3), alone)


def interrupt_after(monkeypatch: pytest.MonkeyPatch, messages: int) -> None:
    """Ctrl-C when so many parts have come from workers."""
    hear, heard = SpreadCheckpoint._hear, 0

    def interrupted(self: SpreadCheckpoint, number: int, message: Any) -> None:
        nonlocal heard
        hear(self, number, message)
        heard += "new" in message
        if heard == messages:
            raise KeyboardInterrupt

    monkeypatch.setattr(SpreadCheckpoint, "_hear", interrupted)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("later", [1, 4])
def test_a_stopped_run_goes_on_with_another_number_of_workers(
    later: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = sv.verify.random_target(1, 6, 3, 4)
    alone = sv.sample(target, SAMPLER, **SETTINGS)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 20)  # the one worker has done all, the other some of its draws
        stopped = sv.sample(target, SAMPLER, **SETTINGS, checkpoint=tmp_path, workers=2)
    assert stopped.attrs["interrupted"] == 1
    drawn = stopped["posterior"].sizes["draw"]
    assert 0 < drawn < SETTINGS["draws"]
    assert stopped["posterior"].dataset.identical(alone["posterior"].dataset.isel(draw=slice(drawn)))
    told, judged = sv.diagnose(stopped), sv.diagnose(tmp_path)  # from the parts of both workers
    assert (judged.about, judged.warnings) == (told.about, told.warnings)
    assert same(sv.sample(target, SAMPLER, **SETTINGS, checkpoint=tmp_path, workers=later), alone)
    monkeypatch.setattr(spread, "hire", lambda workers, folder: Processes(0))  # a finished run needs no worker
    assert same(sv.sample(target, SAMPLER, **SETTINGS, checkpoint=tmp_path, workers=later), alone)


@pytest.mark.usefixtures("here")
def test_a_run_that_was_begun_without_workers_goes_on_without(tmp_path: Path) -> None:
    target = sv.verify.random_target(1, 6, 3, 4)
    alone = sv.sample(target, SAMPLER, **SETTINGS, checkpoint=tmp_path)
    assert same(sv.sample(target, SAMPLER, **SETTINGS, checkpoint=tmp_path, workers=2), alone)


def test_chains_are_split_into_groups_as_equal_as_can_be() -> None:
    for chains, parts, sizes in ((8, 2, [4, 4]), (8, 8, [1] * 8), (3, 8, [1, 1, 1]), (10, 4, [2, 3, 2, 3])):
        groups = list(spread_chains.split_chains(chains, parts).values())
        assert [len(group) for group in groups] == sizes
        assert [number for group in groups for number in group] == list(range(chains))


TEXTS: dict[str, dict[str, Any]] = {
    "chains": {"n": 5, "sampler": "svs+refresh", "warmup": 2},
    "prompts together": {"n": 3, "prompts": ["Near the", "The", "In the"]},
    "prompts with plans": {"n": 3, "prompts": ["Near the", "The"], "controls": ["characters=1.."], "sampler": "auto"},
}


@pytest.mark.parametrize("asked", TEXTS.values(), ids=TEXTS)
def test_texts_are_the_same_for_every_split(asked: dict[str, Any], here: Callable[[int], None]) -> None:
    here(4)
    model = sv.LanguageModel.load("bundled")
    asked = {**asked, "length": 6, "ends": "never", "progress": False}
    alone, spread_over_two = (sv.generate(model, **asked, workers=workers) for workers in (1, 2))
    assert spread_over_two.draws == alone.draws
    assert spread_over_two.diagnosis == alone.diagnosis


@pytest.mark.usefixtures("here")
def test_more_texts_of_workers_are_those_of_a_run_that_had_them_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"length": 6, "ends": "never", "sampler": "svs+refresh", "warmup": 2, "progress": False}
    kept = {**asked, "checkpoint": tmp_path, "workers": 2}
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            sv.generate("bundled", n=5, **kept)
    assert sv.generate("bundled", n=9, **kept).draws == sv.generate("bundled", n=9, **asked).draws


@pytest.mark.usefixtures("here")
def test_a_probability_is_the_same_for_every_split() -> None:
    target = sv.Controlled(sv.LanguageModel.load("bundled", length=6), {sv.controls.Predicate.characters(10): 1.0})
    lookahead = sv.Lookahead.fit(target, texts=64)
    asked = {"texts": 100, "lookahead": lookahead, "monte_carlo": True, "progress": False}
    assert sv.probability(target, **asked, workers=3) == sv.probability(target, **asked)


def test_workers_find_a_control_of_the_current_folder_and_no_other_module_there(tmp_path: Path) -> None:
    """In a process of its own, whose ``sys.path`` holds the current folder only by way of the control."""
    (tmp_path / "rules.py").write_text(
        "import os\n"
        "print(os.getpid(), file=open('importing.txt', 'a'))\n"
        "import helpers_of_rules\n"
        "def short(text):\n    return len(text) < helpers_of_rules.LONGEST\n"
    )
    (tmp_path / "helpers_of_rules.py").write_text("LONGEST = 60\n")
    for name in ("multiprocessing", "torch", "pydantic", "json"):
        (tmp_path / f"{name}.py").write_text("open('executed', 'w').close()\n")
    words = ("--control", "rules:short", "--sampler", "rejection", "--ends", "never", "--length", "4", "-n", "8")
    run_svs("sample", *words, "--workers", "2", "--out", "texts.jsonl", cwd=tmp_path)
    assert len((tmp_path / "texts.jsonl").read_text().splitlines()) == 8
    assert len(set((tmp_path / "importing.txt").read_text().split())) == 3  # the command and both workers
    assert not (tmp_path / "executed").exists()


def test_the_command_has_workers(tmp_path: Path) -> None:
    words = ("sample", "-n", "4", "--length", "6", "--ends", "never", "--sampler", "ancestral", "--out")
    svs(*words, str(tmp_path / "one.jsonl"))
    done = svs(*words, str(tmp_path / "two.jsonl"), "--workers", "2", "--checkpoint", str(tmp_path / "run"))
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert len(done.stdout.splitlines()) == 4


@pytest.mark.parametrize("wrong", ["0", "-1", "1.5", "two", "rays", "ray://", ""])
def test_workers_that_are_none_are_refused(wrong: str) -> None:
    said = svs("sample", "--workers", wrong, code=2).stderr
    assert said.startswith("svs: workers = ")
    assert "ray://HOST:PORT" in said


def test_a_language_model_is_sent_by_its_name_and_told_apart() -> None:
    model = sv.LanguageModel.load("bundled", length=5, prompt="Near", ends="anywhere", stop=".")
    assert len(packed(model)) < 1000
    again = unpacked(packed(model))
    assert (again.prompt, again.length, again.stop, again.ends) == (model.prompt, 5, (".",), "anywhere")
    assert again.model is not model.model
    model.embeddings.mul_(1.5)  # as if it had been trained further
    with pytest.raises(sv.SamplingError, match="another target than the run"):
        spread.check_same(bind(again), checkpoints.fingerprint(bind(model)))
