"""Workers that are processes on this machine."""

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
from structured_voronoi.workers.messages import Event, Failed, Lost, Reported, handle_message, read_answer

SAFE_PATH = "PYTHONSAFEPATH"


class ProcessWorkers:
    """Processes on this machine. They end with this process, however it ends.

    Parameters
    ----------
    count
        Number of processes.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._processes: dict[int, _Worker] = {}
        self._running: set[int] = set()

    def start_worker(self, worker: int, prepare: bytes) -> None:
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_run_worker, args=(theirs, os.environ.get(SAFE_PATH)), daemon=True)
        _start_without_interrupts(process)
        theirs.close()
        self._processes[worker] = _Worker(process, ours)
        self._send(worker, prepare)

    def submit(self, worker: int, task: bytes) -> None:
        self._running.add(worker)
        self._send(worker, task)

    def _send(self, worker: int, message: bytes) -> None:
        with contextlib.suppress(OSError):  # `wait` finds out that it has died
            self._processes[worker].pipe.send_bytes(message)

    def wait(self) -> list[Event]:
        events: list[Event] = []
        while not events:
            sources: dict[Any, int] = {self._processes[worker].pipe: worker for worker in self._running}
            sources |= {self._processes[worker].process.sentinel: worker for worker in self._running}
            ready = {sources[source] for source in connection.wait(list(sources))}
            events = [event for worker in sorted(ready) if (event := self._receive(worker)) is not None]
        self._running -= {event.worker for event in events if not isinstance(event, Reported)}
        return events

    def _receive(self, worker: int) -> Event | None:
        """The event that a worker reports, or its death; None if it is prepared."""
        found = self._processes[worker]
        try:
            answer = found.pipe.recv_bytes() if found.pipe.poll() else None
        except (EOFError, OSError):
            answer = None
        if answer is None:
            return self._discard_worker(worker)
        event = read_answer(worker, answer)
        if event is None:
            self._processes[worker] = found._replace(is_prepared=True)
        return event

    def _discard_worker(self, worker: int) -> Failed | Lost:
        """Remove a process that has died, and report how."""
        process, pipe, is_prepared = self._processes.pop(worker)
        pipe.close()
        process.join()
        code = process.exitcode or 0
        if not is_prepared and code >= 0:
            error = SamplingError(
                f"a worker process did not start (exit code {code}, see its messages above)",
                remedy="put the code of the script into a file, under `if __name__ == '__main__':`",
            )
            return Failed(worker, error, "")
        return Lost(worker, f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}")

    def stop(self) -> None:
        for process, pipe, _ in self._processes.values():
            process.kill()
            pipe.close()
        for process, *_ in self._processes.values():
            process.join()
        self._processes.clear()
        self._running.clear()


class _Worker(NamedTuple):
    """A process and the pipe to it."""

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
    except RuntimeError as error:  # a worker that is importing the user's script
        raise SamplingError(
            "the script starts workers when it is imported, and each worker imports it",
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


def _run_worker(pipe: Connection, safe_path: str | None) -> None:
    """Run a worker process: prepare, then compute one task after another until the pipe is closed.

    ``safe_path`` is the user's own PYTHONSAFEPATH, for processes that a user's code may start.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _restore_safe_path(safe_path)
    _exit_with_parent()
    work = None
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        work = handle_message(work, message, pipe.send_bytes)


def _exit_with_parent() -> None:
    """End this process when its parent ends: on Linux by a signal of the kernel, elsewhere by a waiting thread."""
    PR_SET_PDEATHSIG = 1
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent.pid:  # it died before
            os._exit(1)


def _exit_after(parent: Any) -> None:
    parent.join()
    os._exit(1)
