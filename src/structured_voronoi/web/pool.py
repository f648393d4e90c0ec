"""Worker processes of the page.

Long jobs wait for a slot; one more process is reserved for short jobs. A job is interrupted when its client disconnects
or its time limit is over. A process that does not stop within a few seconds is killed and replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal

from structured_voronoi.web.forms import Form
from structured_voronoi.web.worker import END

LONG_KINDS = ("text", "race")
"""Kinds of long jobs."""
SHORT_JOB_SECONDS = 10.0
"""Time limit of a short job."""
MAX_WAITING_JOBS = 16
"""Maximum number of waiting long jobs, and of waiting short jobs."""
LOADING_TIMEOUT = 120.0
"""Seconds within which a process must load its modules; it takes about three."""
STOP_TIMEOUT = 5.0
"""Seconds within which an interrupted process must stop."""
HEARTBEAT_SECONDS = 2.0
"""Seconds without an event after which an empty line is sent."""
MAX_LINE_BYTES = 2**22
MAX_UNREAD_LINES = 500
"""Lines that a client may leave unread before its job is stopped."""
MAX_JOBS_PER_PROCESS = 500
"""Jobs after which a process is replaced."""


class Busy(Exception):
    """Too many jobs are waiting."""


@dataclass
class _Process:
    """A worker process and the state of its current job; at first it loads modules."""

    process: asyncio.subprocess.Process
    jobs: int = 0
    is_working: bool = True

    def __post_init__(self) -> None:
        self.loading = asyncio.create_task(self._load())

    @classmethod
    async def start(cls, threads: int) -> _Process:
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # modules in the current folder must not replace installed ones
            "-m",
            "structured_voronoi.web.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            limit=MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C reaches only the server, which ends the workers
        )
        return cls(process)

    async def _load(self) -> None:
        async with asyncio.timeout(LOADING_TIMEOUT):
            await self.read()

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(ConnectionError):  # read() reports the end of the process
            self.process.stdin.write(json.dumps(message).encode() + b"\n")

    def start_job(self, kind: str, form: Form) -> None:
        self.jobs += 1
        self.is_working = True
        self.send({"number": self.jobs, "kind": kind, "form": form.model_dump()})

    async def read(self) -> bytes | None:
        """Return the next line of the job, or None at its end."""
        assert self.process.stdout is not None
        while (line := await self.process.stdout.readline()) == b"\n":
            pass
        if not line:
            raise EOFError
        self.is_working = line != END
        return line if self.is_working else None

    async def interrupt(self) -> bool:
        """Interrupt the job; return whether the process stopped in time."""
        self.send({"stop": self.jobs})
        try:
            async with asyncio.timeout(STOP_TIMEOUT):
                while self.is_working:
                    await self.read()
        except (TimeoutError, EOFError):
            return False
        return True

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


@dataclass
class Pool:
    """Runs at most ``jobs`` long jobs at a time, each for at most ``seconds``."""

    jobs: int = 2
    seconds: float = 600.0
    _idle: list[_Process] = field(default_factory=list)
    _busy: list[_Process] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.jobs)
        self._processes = asyncio.Semaphore(self.jobs + 1)
        self._waiting = {"slot": 0, "process": 0}

    async def open(self) -> None:
        """Start a process for long jobs, then one for short jobs."""
        self._idle = [await _Process.start(self._threads)]
        self._in_background(self._start_another(self._idle[0]))

    async def close(self) -> None:
        """End all processes, and then what waits for them."""
        await asyncio.gather(*(process.kill() for process in [*self._idle, *self._busy]))
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def run(self, kind: str, form: Form) -> AsyncGenerator[bytes]:
        """Yield the lines of a job; an empty line after each pause without events."""
        is_long = kind in LONG_KINDS
        queue: Literal["slot", "process"] = "slot" if is_long else "process"
        before, slot = self._waiting[queue], None
        if before >= MAX_WAITING_JOBS:
            raise Busy(f"the server is busy, {before} jobs are waiting; try again later")
        self._waiting[queue] += 1  # before the first await, so that concurrent requests count each other
        try:
            if is_long:
                if self._slots.locked():
                    yield _line(kind="waiting", before=before)
                await self._slots.acquire()
                slot = self._slots
            await self._processes.acquire()
        except BaseException:
            if slot is not None:
                slot.release()
            raise
        finally:
            self._waiting[queue] -= 1
        lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        work = self._in_background(self._work(kind, form, lines, slot))
        try:
            while (line := await lines.get()) is not None:
                yield line
        finally:
            work.cancel()

    async def _work(
        self, kind: str, form: Form, lines: asyncio.Queue[bytes | None], slot: asyncio.Semaphore | None
    ) -> None:
        """Run a job; a client that does not read its lines must not block the process."""
        process: _Process | None = None
        try:
            process = self._idle.pop() if self._idle else await _Process.start(self._threads)
            self._busy.append(process)
            await asyncio.shield(process.loading)
            process.start_job(kind, form)
            async for line in _read_until(process, monotonic() + (SHORT_JOB_SECONDS if slot is None else self.seconds)):
                lines.put_nowait(line)
                if lines.qsize() >= MAX_UNREAD_LINES:
                    while not lines.empty():  # free their memory
                        lines.get_nowait()
                    message = "the client did not read the events in time; the job was stopped"
                    lines.put_nowait(_line(kind="error", code="unread-events", message=message))
                    return
        except (EOFError, TimeoutError):
            message = "the worker process ended unexpectedly, perhaps out of memory; try again"
            lines.put_nowait(_line(kind="error", code="worker-ended", message=message))
        finally:
            lines.put_nowait(None)
            if process is None or not process.loading.done() or not process.is_working:
                self._release(process, slot)
            else:
                self._in_background(self._stop(process, slot))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _start_another(self, first: _Process) -> None:
        """Start a second process after the first one is loaded."""
        await asyncio.shield(first.loading)
        if len(self._idle) + len(self._busy) < 2:
            self._idle.append(await _Process.start(self._threads))

    async def _stop(self, process: _Process, slot: asyncio.Semaphore | None) -> None:
        """Interrupt the job; kill the process if it does not stop."""
        if await process.interrupt():
            self._release(process, slot)
            return
        await process.kill()
        self._busy.remove(process)
        self._release(None, slot)

    def _release(self, process: _Process | None, slot: asyncio.Semaphore | None) -> None:
        """Return the process to the pool and release the slot of its job."""
        if process is not None:
            self._busy.remove(process)
            if process.jobs < MAX_JOBS_PER_PROCESS:
                self._idle.append(process)
            else:
                self._in_background(process.kill())
        self._processes.release()
        if slot is not None:
            slot.release()

    @property
    def _threads(self) -> int:
        return max(1, (os.cpu_count() or 1) // self.jobs)


async def _read_until(process: _Process, deadline: float) -> AsyncIterator[bytes]:
    """Yield the lines of a job, and an error at the time limit."""
    while True:
        left = deadline - monotonic()
        if left <= 0:
            message = "the job reached the time limit of the server; use smaller settings"
            yield _line(kind="error", code="time-limit", message=message)
            return
        try:
            async with asyncio.timeout(min(left, HEARTBEAT_SECONDS)):  # wait_for can lose a cancellation
                line = await process.read()
        except TimeoutError:
            yield b""
            continue
        if line is None:
            return
        yield line


def _line(**event: Any) -> bytes:
    return json.dumps(event).encode() + b"\n"
