"""Tasks for several workers at once. A worker that dies is replaced, and its task is run again.

A worker prepares itself once, by loading a model for example, and then does one task after another. `Crew` hands the
tasks out; where they are done is a matter of `Workers`: processes on this machine (processes.py), or actors of a
Ray cluster (ray_cluster.py). What goes to and fro is bytes. Workers are sent Python objects, those of the user
among them, which are pickled (`packed`). What they answer is data (`answered`, `event_of`), which is not.
"""

from __future__ import annotations

import io
import os
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from structured_voronoi.core import errors
from structured_voronoi.core.errors import SamplingError, one_line
from structured_voronoi.storage.packing import pack, unpack

Report = Callable[[Any], None]
"""Tells the driver something in the middle of a task: data, as `stored.pack` takes it."""
Work = Callable[[Any, Report], Any]
"""(task, report) -> result, which is data, too."""
Prepare = Callable[[], Work]
"""Called once in every worker; what it returns does each of the worker's tasks."""
RUNS = 3
"""How often a task is begun before it is given up."""
PREPARED, SAID, DONE, FAILED = "prepared", "said", "done", "failed"
"""What a worker's answer is."""


class Said(NamedTuple):
    """A worker reports something in the middle of its task."""

    worker: int
    message: Any


class Done(NamedTuple):
    """A worker has done its task."""

    worker: int
    result: Any


class Failed(NamedTuple):
    """A worker's task, or its preparation, has raised an error."""

    worker: int
    error: SamplingError
    traceback: str


class Lost(NamedTuple):
    """A worker has died in the middle of its task."""

    worker: int
    cause: str


Event = Said | Done | Failed | Lost


class Workers(Protocol):
    """Some numbered workers, each with at most one task at a time."""

    count: int

    def start(self, worker: int, prepare: bytes) -> None: ...
    def give(self, worker: int, task: bytes) -> None: ...
    def wait(self) -> list[Event]:
        """What has become of tasks that were given; waits until there is something to tell."""

    def stop(self) -> None: ...


class Crew:
    """Workers and the tasks that are theirs; more may be added while results come in.

    ``hear`` is called with the number of a task and what is reported of it.
    """

    def __init__(
        self, workers: Workers, prepare: Prepare, hear: Callable[[int, Any], None] = lambda number, message: None
    ) -> None:
        self._workers, self._prepare, self._hear = workers, packed(prepare), hear
        self._waiting: deque[_Task] = deque()
        self._busy: dict[int, _Task] = {}
        self._idle: list[int] = []
        self._absent = list(reversed(range(workers.count)))
        self._events: deque[Event] = deque()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.stop()

    def add(self, number: int, make: Callable[[], Any], name: str, is_urgent: bool = False) -> None:
        """A task, made when it is begun or begun again; what to call it in errors; does it come before others?"""
        task = _Task(number, make, name)
        if is_urgent:
            self._waiting.appendleft(task)
        else:
            self._waiting.append(task)

    def results(self) -> Iterator[tuple[int, Any]]:
        """(number of the task, result), as they come, until none is left; a task's error is raised here."""
        while (found := self.next_result()) is not None:
            yield found

    def next_result(self) -> tuple[int, Any] | None:
        """Wait for a result; None if there is no task left."""
        while self._waiting or self._busy:
            self._hand_out()
            if not self._events:
                self._events.extend(self._workers.wait())
            event = self._events.popleft()
            task = self._busy[event.worker]
            if isinstance(event, Said):
                self._hear(task.number, event.message)
                continue
            del self._busy[event.worker]
            if isinstance(event, Failed):
                raise event.error from _InWorker(event.traceback)
            if isinstance(event, Done):
                self._idle.append(event.worker)
                return task.number, event.result
            self._absent.append(event.worker)
            self._waiting.appendleft(task.begun_again(event.cause))
        return None

    def _hand_out(self) -> None:
        """A task to every worker that is free; workers are started when there is something for them to do."""
        while self._waiting and (self._idle or self._absent):
            if not self._idle:
                self._workers.start(self._absent[-1], self._prepare)
                self._idle.append(self._absent.pop())
            worker, task = self._idle.pop(), self._waiting.popleft()
            self._workers.give(worker, packed(task.make()))
            self._busy[worker] = task


class _Task(NamedTuple):
    number: int
    make: Callable[[], Any]
    name: str
    runs: int = 1

    def begun_again(self, cause: str) -> _Task:
        """The same once more, unless it was lost too often."""
        if self.runs == RUNS:
            raise SamplingError(
                f"{self.name}: its worker died {RUNS} times, at last by {cause}",
                remedy="use fewer workers, so that each has more memory, and see who ends them",
            )
        return self._replace(runs=self.runs + 1)


class _InWorker(Exception):
    """The traceback of an error that was raised in a worker."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Packer(pickle.Pickler):
    """Objects that have a ``recipe`` are sent as that, and made again by it: a language model is loaded by its name."""

    def reducer_override(self, content: Any) -> Any:
        recipe = getattr(type(content), "recipe", None)
        return NotImplemented if recipe is None else recipe(content)


def packed(content: Any) -> bytes:
    """What is sent to another process. (A pipe's own way would share tensors, which end with their process.)"""
    file = io.BytesIO()
    try:
        _Packer(file).dump(content)
        return file.getvalue()
    except Exception as error:  # pickle raises many kinds, and user's objects may raise any
        raise SamplingError(
            f"workers cannot be sent what they need ({type(error).__name__}: {one_line(error)})",
            remedy=(
                "define functions and classes at the top of a module rather than inside functions, or do without "
                "workers"
            ),
        ) from error


def unpacked(message: bytes) -> Any:
    """What another process has sent."""
    try:
        return pickle.loads(message)
    except Exception as error:
        raise SamplingError(
            f"a worker cannot read what it was sent ({type(error).__name__}: {one_line(error)})",
            remedy="put your functions and classes into a module that workers can import, or do without workers",
        ) from error


def respond(work: Work | None, message: bytes, send: Callable[[bytes], None]) -> Work | None:
    """What a worker does with a message: it prepares itself by the first, and does the tasks that follow.

    It sends answers; returned is the work that it is prepared for.
    """

    def answer(kind: str, *content: Any) -> None:
        send(answered((kind, *content)))

    try:
        if work is None:
            work = unpacked(message)()
            answer(PREPARED)
        else:
            answer(DONE, work(unpacked(message), partial(answer, SAID)))
    except Exception as error:
        is_ours = isinstance(error, SamplingError)
        said = str(error) if is_ours else f"{type(error).__name__}: {one_line(error)}"
        answer(FAILED, type(error).__name__ if is_ours else "", said, traceback.format_exc())
    return work


def answered(content: Any) -> bytes:
    """What a worker says, as bytes."""
    try:
        return pack(content, name="the answer")
    except SamplingError as error:
        raise SamplingError(
            f"a worker's result cannot be sent ({str(error).partition(';')[0]})",
            remedy="let it be of numbers, words, tensors and arrays, in lists, plain tuples, and dicts by words",
        ) from error


def event_of(worker: int, answer: bytes) -> Event | None:
    """What a worker's answer means for its task; nothing, if it says that it is prepared."""
    kind, *content = unpack(answer)
    if kind == PREPARED:
        return None
    if kind == FAILED:
        name, said, where = content
        return Failed(worker, _error_named(name)(said), where)
    return Said(worker, *content) if kind == SAID else Done(worker, *content)


def _error_named(name: str) -> type[SamplingError]:
    """One of our errors by its name; any other is a SamplingError here."""
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, SamplingError) else SamplingError


def use_one_core() -> None:
    """Let this worker compute on one thread, or on as many as OMP_NUM_THREADS says, as the others do."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
