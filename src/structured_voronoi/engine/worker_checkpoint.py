"""Runs that are spread over workers.

A task is done by a worker with a checkpoint of its own, by the very code that would do it in one process. What it puts
into that checkpoint is sent to the driver, which keeps it in the checkpoint of the run; a task whose worker was lost is
begun again with what has come. So the driver finds in its checkpoint what it would compute otherwise, and where that
has not come yet, it waits. A stopped run is resumed like any other.
"""

from __future__ import annotations

import contextlib
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, TypedDict, final

import torch

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.progress import Tick, ignore_progress, progress_bar
from structured_voronoi.engine.checkpoint import SUFFIX, Checkpoint, fingerprint
from structured_voronoi.problem.problem import Problem
from structured_voronoi.storage.store import Store
from structured_voronoi.workers.pool import Crew, Prepare, Report, Workers
from structured_voronoi.workers.processes import Processes

SPLIT = f"split{SUFFIX}"
"""The part that says for how many workers a run was split."""
TICK_SECONDS = 0.2
"""Between two reports of a task's progress."""


@final
class Sent(TypedDict):
    """Parts that a task puts into the checkpoint, and parts that it leaves out."""

    new: dict[str, bytes]
    drop: list[str]


@final
class Ticked(TypedDict):
    """A task's progress."""

    note: str
    steps: float


class Task(NamedTuple):
    """What is to be done, and the parts that an earlier attempt has left."""

    content: Any
    parts: dict[str, bytes]


class TaskStore(Store):
    """The parts of a task, in a worker's memory; all that is committed is sent to the driver, too."""

    def __init__(self, parts: dict[str, bytes], report: Report) -> None:
        self.parts, self.finished, self._report = dict(parts), False, report

    @property
    def run(self) -> Any:
        return self

    def names(self, prefix: str) -> list[str]:
        return sorted(name for name in self.parts if name.startswith(prefix))

    def read(self, name: str) -> bytes:
        return self.parts[name]

    def commit(
        self,
        new: Mapping[str, bytes],
        drop: Iterable[str] = (),
        progress: dict[str, Any] | None = None,
        finished: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.parts |= new
        for name in (dropped := list(drop)):
            del self.parts[name]
        self.finished = finished
        self._report(Sent(new=dict(new), drop=dropped))

    def close(self) -> None:
        pass


def task_checkpoint(task: Task, report: Report) -> Checkpoint:
    """The checkpoint with which a worker does a task."""
    return Checkpoint(TaskStore(task.parts, report))


def tick_to(report: Report, unit: float = 1.0) -> Tick:
    """A progress bar's tick whose bar is the driver's, where a step counts as ``unit``."""

    taken, told = 0.0, -math.inf

    def tick(note: str = "", steps: float = 1) -> None:
        nonlocal taken, told
        taken += steps * unit
        if monotonic() - told >= TICK_SECONDS:
            report(Ticked(note=note, steps=taken))
            taken, told = 0.0, monotonic()

    return tick


class SpreadCheckpoint(Checkpoint):
    """The driver's checkpoint. What is asked for and is some task's to make is waited for."""

    is_spread = True

    def __init__(self, store: Store, workers: Workers) -> None:
        super().__init__(store)
        self.workers, self.tick = workers, ignore_progress
        self._crew: Crew | None = None
        self._maker: dict[str, int] = {}
        self._folders: list[str] = []
        self._then: dict[int, Callable[[], None]] = {}

    def __exit__(self, kind: object = None, error: BaseException | None = None, trace: object = None) -> None:
        self.workers.stop()
        super().__exit__(kind, error, trace)

    def begin(self, kind: str, problem: Problem, settings: dict[str, Any], growing: str | None = None) -> None:
        """Begin the run, or go on with it, split as it was."""
        super().begin(kind, problem, settings, growing)
        if SPLIT not in self.store.run.parts:
            self.put(SPLIT.removesuffix(SUFFIX), self.workers.count)
            self.save()
        self.split = super().get(SPLIT.removesuffix(SUFFIX))

    @property
    def target(self) -> dict[str, Any]:
        """The fingerprint of the run's target."""
        found: dict[str, Any] = self.store.run.settings["target"]
        return found

    def employ(self, prepare: Prepare) -> None:
        """Say how workers prepare themselves."""
        self._crew = Crew(self.workers, prepare, self._hear)

    @contextlib.contextmanager
    def showing(self, total: int, progress: bool, label: str) -> Iterator[None]:
        """One bar for what all workers do."""
        with progress_bar(total, progress, f"{label}, {self.workers.count} workers") as self.tick:
            try:
                yield
            finally:
                self.tick = ignore_progress

    def assign(
        self,
        name: str,
        content: Any,
        *,
        folder: str = "",
        given: str | None = None,
        then: Callable[[], None] | None = None,
        is_urgent: bool = False,
    ) -> bool:
        """Let some worker make the part of this name, in a folder, unless it is there already; is it to be made?

        With the task go those parts of the folder whose names begin with ``given``. ``then`` is called when it is done.
        """
        assert self._crew is not None
        if folder + name + SUFFIX in self.store.run.parts:
            return False
        number = len(self._folders)
        self._folders.append(folder)
        self._maker[folder + name] = number
        if then is not None:
            self._then[number] = then
        make = partial(self._make_task, content, folder, given)
        self._crew.add(number, make, f"the task {folder}{name}", is_urgent)
        return True

    def get(self, name: str, template: Any = None, device: torch.device | str = "cpu") -> Any:
        """What was put under a name, now or when the worker that makes it has done so; None where nothing will be."""
        if name in self._maker:
            while name + SUFFIX not in self.store.run.parts:
                self.wait()
        return super().get(name, template, device)

    def wait(self) -> bool:
        """Wait until a task is done; False where there is none."""
        assert self._crew is not None
        found = self._crew.next_result()
        if found is not None and found[0] in self._then:
            self._then[found[0]]()
        return found is not None

    def _make_task(self, content: Any, folder: str, given: str | None) -> Task:
        names = [] if given is None else self.store.names(folder + given)
        return Task(content, {name.removeprefix(folder): self.store.read(name) for name in names})

    def _hear(self, number: int, message: Sent | Ticked) -> None:
        if "steps" in message:
            self.tick(message["note"], message["steps"])
            return
        folder, parts = self._folders[number], self.store.run.parts
        new = {folder + name: data for name, data in message["new"].items() if folder + name not in parts}
        self.store.commit(new, [folder + name for name in message["drop"] if folder + name in parts], self._progress)


class TemporaryStore(Store):
    """The store of a run that is not kept."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="svs-")
        super().__init__(self._temporary.name)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        super().close()
        self._temporary.cleanup()


WRITTEN = re.compile(r"([0-9]{1,6})|(ray)(?::([0-9]{1,6})|://(.+))?")


def hire(workers: int | str, folder: Path) -> Workers:
    """Processes on this machine, or actors of a Ray cluster; one that is started here has its files in the folder."""
    found = WRITTEN.fullmatch(str(workers)) if not isinstance(workers, bool) else None
    if found is None or (found[1] and not int(found[1])):
        raise SamplingError(
            f"workers = {workers!r}: write a number of processes, or ray, ray:NUMBER, or ray://HOST:PORT"
        )
    if found[1]:
        return Processes(int(found[1]))
    from structured_voronoi.workers.ray_cluster import RayWorkers

    return RayWorkers(f"ray://{found[4]}" if found[4] else None, int(found[3]) if found[3] else None, folder)


def check_same(problem: Problem, expected: dict[str, Any]) -> None:
    """Refuse to work on another target than the driver's: a file that has changed, or another model by that name."""
    found = fingerprint(problem)
    for key, value in expected.items():
        if found[key] != value:
            raise SamplingError(
                f"a worker has another target than the run ({key} {found[key]}, not {value})",
                remedy="let workers load the same files, and change no model after it was loaded",
            )
