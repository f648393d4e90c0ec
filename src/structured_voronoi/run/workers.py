"""Tasks on several processes at once. A worker that dies is replaced, and its task is run again.

A worker prepares itself once, by loading a model for example, and then does one task after another. `Crew` hands the
tasks out; where they are done is a matter of `Workers`: processes on this machine (`Processes`), or actors of a Ray
cluster (run/ray_workers.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple, Protocol

from structured_voronoi.errors import SamplingError, one_line
from structured_voronoi.progress import progress_bar
from structured_voronoi.run.kept_results import KEEPER

Report = Callable[[Any], None]
"""Tells the driver something in the middle of a task."""
Work = Callable[[Any, Report], Any]
"""(task, report) -> result."""
Prepare = Callable[[], Work]
"""Called once in every worker; what it returns does each of the worker's tasks."""
RUNS = 3
"""How often a task is begun before it is given up."""
PR_SET_PDEATHSIG = 1
PREPARED, SAID, DONE, FAILED = range(4)
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
                f"{self.name}: its worker died {RUNS} times, at last by {cause}; use fewer workers, so that each has "
                "more memory, and see who ends them"
            )
        return self._replace(runs=self.runs + 1)


class _InWorker(Exception):
    """The traceback of an error that was raised in a worker."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Processes:
    """Workers on this machine, each a process that ends with this one, whatever ends it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._hands: dict[int, _Hand] = {}
        self._given: set[int] = set()

    def start(self, worker: int, prepare: bytes) -> None:
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        _start_without_interrupts(process)
        theirs.close()
        self._hands[worker] = _Hand(process, ours)
        self._send(worker, prepare)

    def give(self, worker: int, task: bytes) -> None:
        self._given.add(worker)
        self._send(worker, task)

    def _send(self, worker: int, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it has died, which `wait` will see
            self._hands[worker].pipe.send_bytes(message)

    def wait(self) -> list[Event]:
        events: list[Event] = []
        while not events:
            sources: dict[Any, int] = {self._hands[worker].pipe: worker for worker in self._given}
            sources |= {self._hands[worker].process.sentinel: worker for worker in self._given}
            ready = {sources[source] for source in connection.wait(list(sources))}
            events = [event for worker in sorted(ready) if (event := self._hear(worker)) is not None]
        self._given -= {event.worker for event in events if not isinstance(event, Said)}
        return events

    def _hear(self, worker: int) -> Event | None:
        """What a worker says, or that it is no more; None if it says that it is prepared."""
        hand = self._hands[worker]
        try:
            answer = pickle.loads(hand.pipe.recv_bytes()) if hand.pipe.poll() else None
        except (EOFError, OSError):
            answer = None
        if answer is None:
            return self._bury(worker)
        if answer[0] == PREPARED:
            self._hands[worker] = hand._replace(is_prepared=True)
        return event_of(worker, answer)

    def _bury(self, worker: int) -> Failed | Lost:
        process, pipe, is_prepared = self._hands.pop(worker)
        pipe.close()
        process.join()
        code = process.exitcode or 0
        if not is_prepared and code >= 0:
            error = SamplingError(
                f"a worker could not be started (exit code {code}; what it said stands above); a script that asks for "
                "workers must be a file, and call them under `if __name__ == '__main__':`"
            )
            return Failed(worker, error, "")
        return Lost(worker, f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}")

    def stop(self) -> None:
        for process, pipe, _ in self._hands.values():
            process.kill()
            pipe.close()
        for process, *_ in self._hands.values():
            process.join()
        self._hands.clear()
        self._given.clear()


class _Hand(NamedTuple):
    """A process and the pipe by which tasks and results go."""

    process: SpawnProcess
    pipe: Connection
    is_prepared: bool = False


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
            f"workers cannot be sent what they need ({type(error).__name__}: {one_line(error)}); define functions and "
            "classes at the top of a module rather than inside functions, or do without workers"
        ) from error


def unpacked(message: bytes) -> Any:
    """What another process has sent."""
    try:
        return pickle.loads(message)
    except Exception as error:
        raise SamplingError(
            f"a worker cannot read what it was sent ({type(error).__name__}: {one_line(error)}); put your functions "
            "and classes into a module that workers can import, or do without workers"
        ) from error


def sendable_error(error: Exception) -> SamplingError:
    """The error as another process can raise it: one of ours as it is, any other by its name and message."""
    if type(error).__module__ == SamplingError.__module__ and isinstance(error, SamplingError):
        return error
    return SamplingError(f"{type(error).__name__}: {one_line(error)}")


def respond(work: Work | None, message: bytes, send: Callable[[bytes], None]) -> Work | None:
    """What a worker does with a message: it prepares itself by the first, and does the tasks that follow.

    It sends answers; returned is the work that it is prepared for.
    """

    def answer(kind: int, *content: Any) -> None:
        send(packed((kind, *content)))

    try:
        if work is None:
            work = unpacked(message)()
            answer(PREPARED)
        else:
            answer(DONE, work(unpacked(message), partial(answer, SAID)))
    except Exception as error:
        answer(FAILED, sendable_error(error), traceback.format_exc())
    return work


def event_of(worker: int, answer: tuple[Any, ...]) -> Event | None:
    """What a worker's answer means for its task; nothing, if it says that it is prepared."""
    kind, *content = answer
    if kind == PREPARED:
        return None
    event: Event = {SAID: Said, DONE: Done, FAILED: Failed}[kind](worker, *content)
    return event


def _start_without_interrupts(process: SpawnProcess) -> None:
    """Started with Ctrl-C blocked, which it inherits: that is this process's to deal with."""
    resource_tracker.ensure_running()  # else it would be started, and would change the mask, in between
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    except RuntimeError as error:  # a worker that is just importing the user's script
        raise SamplingError(
            "workers are asked for when the script is imported, which every worker does; put the call under "
            "`if __name__ == '__main__':`"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection) -> None:
    """The life of a worker process: prepare, then one task after another until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    work = None
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        work = respond(work, message, pipe.send_bytes)


def _end_with_parent() -> None:
    """On Linux by a signal of the kernel, which nothing can hold up; elsewhere by a thread that waits for the end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent.pid:  # it died before
            os._exit(1)


def _end_after(parent: Any) -> None:
    parent.join()
    os._exit(1)


def side_by_side(
    work: Callable[[Any], Any], tasks: Sequence[Any], label: str, progress: bool, workers: int | None = None
) -> list[Any]:
    """``work`` on each task; results in the tasks' order. Those that are kept already are not computed again.

    ``workers`` is the number of processes, each on one thread: None for one per core; with 1 the work is done in
    this process.
    """
    keeper = KEEPER.get()
    kept = keeper.open_list(label, tasks) if keeper is not None else None
    results = kept.find() if kept is not None else {}
    missing = [number for number in range(len(tasks)) if number not in results]
    with contextlib.ExitStack() as stack:
        tick = stack.enter_context(progress_bar(len(missing), progress, label))
        if workers == 1:
            computed: Iterable[tuple[int, Any]] = ((number, work(tasks[number])) for number in missing)
        else:
            count = max(1, min(len(missing), workers or count_cores()))
            crew = stack.enter_context(Crew(Processes(count), partial(_on_one_thread, work)))
            for number in missing:
                crew.add(number, partial(tasks.__getitem__, number), f"{label} {one_line(tasks[number], 60)}")
            computed = crew.results()
        for number, result in computed:
            results[number] = kept.put(number, result) if kept is not None else result
            tick()
    return [results[number] for number in range(len(tasks))]


def _on_one_thread(work: Callable[[Any], Any]) -> Work:
    """The preparation of work that has nothing to report."""
    use_one_core()
    return lambda task, report: work(task)


def use_one_core() -> None:
    """Let this worker compute on one thread, or on as many as OMP_NUM_THREADS says, as the others do."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
