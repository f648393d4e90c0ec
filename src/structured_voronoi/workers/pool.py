"""A pool of workers that compute tasks. A worker that dies is replaced, and its task is computed again.

The workers are processes on this machine (processes.py) or actors of a Ray cluster (ray_cluster.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.workers.messages import Event, Failed, Finished, Prepare, Reported, to_bytes

MAX_ATTEMPTS = 3
"""A task is given up if it is lost so often."""


@runtime_checkable
class Workers(Protocol):
    """Numbered workers, each with at most one task at a time."""

    count: int

    def start_worker(self, worker: int, prepare: bytes) -> None: ...
    def submit(self, worker: int, task: bytes) -> None: ...
    def wait(self) -> list[Event]:
        """Wait for events of submitted tasks."""

    def stop(self) -> None: ...


class WorkerPool:
    """Workers and their tasks; tasks may be submitted while results arrive.

    Parameters
    ----------
    workers
        The workers. They are started when there are tasks for them, and stopped when the pool is closed.
    prepare
        Called once in each worker; returns the function that computes tasks.
    on_report
        Called with the number of a task and the data that it reports.

    Examples
    --------
    >>> with WorkerPool(ProcessWorkers(2), prepare) as pool:  # doctest: +SKIP
    ...     for number, task in enumerate(tasks):
    ...         pool.submit(number, lambda: task, name=f"task {number}")
    ...     results = dict(pool.results())
    """

    def __init__(
        self, workers: Workers, prepare: Prepare, on_report: Callable[[int, Any], None] = lambda number, message: None
    ) -> None:
        self._workers, self._prepare, self._on_report = workers, to_bytes(prepare), on_report
        self._waiting: deque[_Task] = deque()
        self._running: dict[int, _Task] = {}
        self._idle: list[int] = []
        self._not_started = list(reversed(range(workers.count)))
        self._events: deque[Event] = deque()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.stop()

    def submit(self, number: int, make: Callable[[], Any], name: str) -> None:
        """Submit a task; ``make`` is called whenever it is sent to a worker, and ``name`` is used in errors."""
        self._waiting.append(_Task(number, make, name))

    def results(self) -> Iterator[tuple[int, Any]]:
        """Results as they arrive, each with the number of its task; an error of a task is raised here."""
        while (found := self.next_result()) is not None:
            yield found

    def next_result(self) -> tuple[int, Any] | None:
        """Wait for a result; None if there is no task left."""
        while self._waiting or self._running:
            self._send_tasks()
            if not self._events:
                self._events.extend(self._workers.wait())
            event = self._events.popleft()
            task = self._running[event.worker]
            if isinstance(event, Reported):
                self._on_report(task.number, event.message)
                continue
            del self._running[event.worker]
            if isinstance(event, Failed):
                raise event.error from _WorkerTraceback(event.traceback)
            if isinstance(event, Finished):
                self._idle.append(event.worker)
                return task.number, event.result
            self._not_started.append(event.worker)
            self._waiting.appendleft(task.next_attempt(event.cause))
        return None

    def _send_tasks(self) -> None:
        """Send a task to each idle worker, and start workers as long as there are tasks for them."""
        while self._waiting and (self._idle or self._not_started):
            if not self._idle:
                self._workers.start_worker(self._not_started[-1], self._prepare)
                self._idle.append(self._not_started.pop())
            worker, task = self._idle.pop(), self._waiting.popleft()
            self._workers.submit(worker, to_bytes(task.make()))
            self._running[worker] = task


class _Task(NamedTuple):
    number: int
    make: Callable[[], Any]
    name: str
    attempt: int = 1

    def next_attempt(self, cause: str) -> _Task:
        """The same task after its worker died; an error after the last attempt."""
        if self.attempt == MAX_ATTEMPTS:
            raise SamplingError(
                f"{self.name}: its worker died {MAX_ATTEMPTS} times",
                cause=cause,
                remedy="use fewer workers, so that each has more memory, and check what ends them",
            )
        return self._replace(attempt=self.attempt + 1)


class _WorkerTraceback(Exception):
    """The traceback of an error that was raised in a worker."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"
