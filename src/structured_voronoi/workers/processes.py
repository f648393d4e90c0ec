"""Workers that are processes on this machine. They end with the process that started them, whatever ends it."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.workers.pool import Event, Failed, Lost, Said, event_of, respond

PR_SET_PDEATHSIG = 1
SAFE_PATH = "PYTHONSAFEPATH"


class Processes:
    """Workers on this machine, each a process that ends with this one, whatever ends it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._hands: dict[int, _Hand] = {}
        self._given: set[int] = set()

    def start(self, worker: int, prepare: bytes) -> None:
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_serve, args=(theirs, os.environ.get(SAFE_PATH)), daemon=True)
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
            answer = hand.pipe.recv_bytes() if hand.pipe.poll() else None
        except (EOFError, OSError):
            answer = None
        if answer is None:
            return self._bury(worker)
        event = event_of(worker, answer)
        if event is None:
            self._hands[worker] = hand._replace(is_prepared=True)
        return event

    def _bury(self, worker: int) -> Failed | Lost:
        process, pipe, is_prepared = self._hands.pop(worker)
        pipe.close()
        process.join()
        code = process.exitcode or 0
        if not is_prepared and code >= 0:
            error = SamplingError(
                f"a worker could not be started (exit code {code}; what it said stands above)",
                remedy=(
                    "a script that asks for workers must be a file, and call them under `if __name__ == '__main__':`"
                ),
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


def _start_without_interrupts(process: SpawnProcess) -> None:
    """Start a process with Ctrl-C blocked, which it inherits: this process handles Ctrl-C."""
    before = None
    try:
        with _safe_path():
            resource_tracker.ensure_running()  # `start` would start it with the changed signal mask
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            process.start()
    except RuntimeError as error:  # a worker that is just importing the user's script
        raise SamplingError(
            "workers are asked for when the script is imported, which every worker does",
            remedy="put the call under `if __name__ == '__main__':`",
        ) from error
    finally:
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Start Python processes in this block without the current folder on their initial ``sys.path``.

    A new process imports standard modules before it receives the ``sys.path`` of this one. Without this, files in the
    current folder with the names of those modules would be imported in their place.
    """
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        _restore_safe_path(before)


def _restore_safe_path(value: str | None) -> None:
    if value is None:
        os.environ.pop(SAFE_PATH, None)
    else:
        os.environ[SAFE_PATH] = value


def _serve(pipe: Connection, safe_path: str | None) -> None:
    """Run a worker process: prepare, then do one task after another until the pipe is closed.

    ``safe_path`` is the user's own PYTHONSAFEPATH, for processes that a user's code may start.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _restore_safe_path(safe_path)
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
