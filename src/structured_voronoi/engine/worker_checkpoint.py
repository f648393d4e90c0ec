"""Checkpoints of runs whose tasks are computed by workers.

Loops ask the checkpoint for values as usual. A value that a worker is computing is waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from structured_voronoi.core.progress import Stage, ignore_progress, progress_bar
from structured_voronoi.engine.checkpoint import CheckpointSettings
from structured_voronoi.engine.folder_checkpoint import FolderCheckpoint
from structured_voronoi.engine.stored_checkpoint import SUFFIX
from structured_voronoi.engine.worker_tasks import SavedParts, Task, TaskProgress
from structured_voronoi.problem.problem import Problem
from structured_voronoi.storage.store import Store
from structured_voronoi.workers.messages import Prepare
from structured_voronoi.workers.pool import WorkerPool, Workers

SPLIT = f"split{SUFFIX}"
"""The file with the number of workers for which a run was split."""


class WorkerCheckpoint(FolderCheckpoint):
    """The checkpoint of a run with workers, in the main process."""

    has_workers = True

    def __init__(self, store: Store, workers: Workers, settings: CheckpointSettings | None = None) -> None:
        super().__init__(store, settings)
        self.workers, self._tick = workers, ignore_progress
        self._pool: WorkerPool | None = None
        self._folders: list[str] = []
        self._submitted: set[str] = set()

    def __exit__(self, kind: object = None, error: BaseException | None = None, trace: object = None) -> None:
        self.workers.stop()
        super().__exit__(kind, error, trace)

    def begin(self, kind: str, problem: Problem, settings: Mapping[str, Any], growing: str | None = None) -> None:
        super().begin(kind, problem, settings, growing)
        if SPLIT not in self.store:
            self.put(SPLIT.removesuffix(SUFFIX), self.workers.count)
            self.save()
        self.split = super().get(SPLIT.removesuffix(SUFFIX))

    def start_workers(self, prepare: Prepare) -> None:
        self._pool = WorkerPool(self.workers, prepare, self._receive)

    @contextlib.contextmanager
    def worker_progress(self, total: int, progress: bool, stage: Stage) -> Iterator[None]:
        label = f"{stage}, {self.workers.count} workers"
        with progress_bar(total, progress, label, stage=stage) as self._tick:
            try:
                yield
            finally:
                self._tick = ignore_progress

    def submit(self, name: str, content: Any, *, folder: str = "", given: str | None = None) -> None:
        """Have a worker compute the value ``name``, unless it is saved already.

        Parameters
        ----------
        name
            The value that the task puts into its checkpoint.
        content
            What the worker is given.
        folder
            Where the checkpoint of the task is within that of the run.
        given
            The worker is also given the files of the folder whose names begin with this.
        """
        assert self._pool is not None
        if folder + name + SUFFIX in self.store:
            return
        number = len(self._folders)
        self._folders.append(folder)
        self._submitted.add(folder + name)
        self._pool.submit(number, partial(self._make_task, content, folder, given), f"task {folder}{name}")

    def get(self, name: str, template: Any = None, device: torch.device | str = "cpu") -> Any:
        if name in self._submitted:
            while name + SUFFIX not in self.store:
                self.wait()
        return super().get(name, template, device)

    def wait(self) -> bool:
        """Wait until a task is finished; False if there is none."""
        assert self._pool is not None
        return self._pool.next_result() is not None

    def _make_task(self, content: Any, folder: str, given: str | None) -> Task:
        names = [] if given is None else self.store.names(folder + given)
        parts = {name.removeprefix(folder): self.store.read(name) for name in names}
        return Task(content, parts, self.timing)

    def _receive(self, number: int, message: SavedParts | TaskProgress) -> None:
        """Save what a task has saved, or show its progress."""
        if "steps" in message:
            self._tick(message["note"], message["steps"])
            return
        folder = self._folders[number]
        new = {folder + name: data for name, data in message["new"].items() if folder + name not in self.store}
        drop = [folder + name for name in message["drop"] if folder + name in self.store]
        self.store.commit(new, drop, self._progress)
