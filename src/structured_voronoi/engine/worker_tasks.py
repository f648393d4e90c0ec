"""What a worker needs to compute a task with the code that would compute it in one process.

The task has a checkpoint of its own. What the code saves there is sent to the main process, which saves it in the
checkpoint of the run. A task whose worker died is computed again from what was saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from time import monotonic
from typing import Any, NamedTuple, TypedDict, final

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.progress import Tick
from structured_voronoi.engine.checkpoint import CheckpointSettings
from structured_voronoi.engine.folder_checkpoint import fingerprint
from structured_voronoi.engine.stored_checkpoint import StoredCheckpoint
from structured_voronoi.problem.problem import Problem
from structured_voronoi.workers.messages import Report


@final
class SavedParts(TypedDict):
    """Files that a task adds to its checkpoint and removes from it."""

    new: dict[str, bytes]
    drop: list[str]


@final
class TaskProgress(TypedDict):
    """Progress of a task."""

    note: str
    steps: float


class Task(NamedTuple):
    """A task and what an earlier attempt has saved."""

    content: Any
    parts: dict[str, bytes]
    settings: CheckpointSettings

    def checkpoint(self, report: Report) -> StoredCheckpoint:
        """The checkpoint with which a worker computes the task."""
        return StoredCheckpoint(TaskStore(self.parts, report), self.settings)


class TaskStore:
    """The files of a task, in the memory of a worker; changes are sent to the main process."""

    def __init__(self, parts: Mapping[str, bytes], report: Report) -> None:
        self.parts, self._report = dict(parts), report

    @property
    def is_finished(self) -> bool:
        """False: finished tasks are not submitted."""
        return False

    def __contains__(self, name: str) -> bool:
        return name in self.parts

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
    ) -> None:
        dropped = list(drop)
        self.parts = {name: data for name, data in self.parts.items() if name not in dropped} | dict(new)
        self._report(SavedParts(new=dict(new), drop=dropped))


def progress_reporter(report: Report, unit: float = 1.0) -> Tick:
    """A function for a worker to call after each step; it updates the progress bar of the main process.

    A step counts as ``unit`` steps of that bar. Reports are sent every 0.2 s.
    """
    pending, reported = 0.0, -math.inf

    def tick(note: str = "", steps: float = 1) -> None:
        nonlocal pending, reported
        pending += steps * unit
        if monotonic() - reported >= 0.2:
            report(TaskProgress(note=note, steps=pending))
            pending, reported = 0.0, monotonic()

    return tick


def check_same_target(problem: Problem, expected: Mapping[str, Any]) -> None:
    """Raise an error if a worker has another target than the run, because a file or a model has changed."""
    found = fingerprint(problem)
    for key, value in expected.items():
        if found[key] != value:
            raise SamplingError(
                f"the target of a worker has {key} {found[key]}, and that of the run {value}",
                remedy="let workers load the same files, and do not change a model after it was loaded",
            )
