"""A few processes that compute for the page.

A job that takes long waits for its turn; one that takes moments finds a process that is kept free for it. A job whose
client has left, or whose time is over, is interrupted; a process that does not heed that within seconds is ended, and
another takes its place, so that nothing a client sends can stop the page.
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

LONG = ("text", "race")
"""Kinds of jobs that take long."""
MOMENTS = 10.0
"""Seconds that any other may take."""
MOST_WAITING = 16
"""Long jobs that may wait for their turn, and others that may wait for a process."""
LOADING = 120.0
"""Seconds in which a process must have loaded what it needs, which takes about three."""
GRACE = 5.0
"""Seconds in which a process must heed an interruption."""
HEARTBEAT = 2.0
"""Seconds of silence after which a client is told that the job goes on."""
LONGEST_LINE, MOST_UNREAD = 2**22, 500
"""Bytes of a line, and lines of a job that its client has not read."""
MOST_ORDERS = 500
"""Of one process, which then makes way for a fresh one."""


class Busy(Exception):
    """More jobs wait than may."""


@dataclass
class _Process:
    """A worker, and what it was asked; first of all it loads what it needs."""

    process: asyncio.subprocess.Process
    orders: int = 0
    is_at_work: bool = True

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
            limit=LONGEST_LINE,
            start_new_session=True,  # Ctrl-C is for the server, which ends the others
        )
        return cls(process)

    async def _load(self) -> None:
        async with asyncio.timeout(LOADING):
            await self.read()

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(ConnectionError):  # its output has ended, too: the reader sees that
            self.process.stdin.write(json.dumps(message).encode() + b"\n")

    def order(self, kind: str, form: Form) -> None:
        self.orders += 1
        self.is_at_work = True
        self.send({"number": self.orders, "kind": kind, "form": form.model_dump()})

    async def read(self) -> bytes | None:
        """The next line of the job; None at its end."""
        assert self.process.stdout is not None
        while (line := await self.process.stdout.readline()) == b"\n":
            pass
        if not line:
            raise EOFError
        self.is_at_work = line != END
        return line if self.is_at_work else None

    async def interrupt(self) -> bool:
        """Stop the job; says whether the process can be used again."""
        self.send({"stop": self.orders})
        try:
            async with asyncio.timeout(GRACE):
                while self.is_at_work:
                    await self.read()
        except (TimeoutError, EOFError):
            return False
        return True

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


@dataclass
class Pool:
    """At most ``jobs`` long ones at a time, each for at most ``seconds``."""

    jobs: int = 2
    seconds: float = 600.0
    _idle: list[_Process] = field(default_factory=list)
    _busy: list[_Process] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._turns = asyncio.Semaphore(self.jobs)
        self._places = asyncio.Semaphore(self.jobs + 1)
        self._waiting = {"turn": 0, "place": 0}

    async def open(self) -> None:
        """Start a process for a long job, then one for moments, so that the first of them need not wait."""
        self._idle = [await _Process.start(self._threads)]
        self._in_background(self._start_another(self._idle[0]))

    async def close(self) -> None:
        """End all processes, and then what waits for them."""
        await asyncio.gather(*(process.end() for process in [*self._idle, *self._busy]))
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def run(self, kind: str, form: Form) -> AsyncGenerator[bytes]:
        """The lines of a job, as they come; an empty one now and then, where nothing else comes."""
        is_long = kind in LONG
        queue: Literal["turn", "place"] = "turn" if is_long else "place"
        before, turn = self._waiting[queue], None
        if before >= MOST_WAITING:
            raise Busy(f"the server is busy, and {before} others wait already; try again in a moment")
        self._waiting[queue] += 1  # before anything is awaited: many may ask at once
        try:
            if is_long:
                if self._turns.locked():
                    yield _line(kind="waiting", before=before)
                await self._turns.acquire()
                turn = self._turns
            await self._places.acquire()
        except BaseException:
            if turn is not None:
                turn.release()
            raise
        finally:
            self._waiting[queue] -= 1
        lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        work = self._in_background(self._work(kind, form, lines, turn))
        try:
            while (line := await lines.get()) is not None:
                yield line
        finally:
            work.cancel()

    async def _work(
        self, kind: str, form: Form, lines: asyncio.Queue[bytes | None], turn: asyncio.Semaphore | None
    ) -> None:
        """Do a job, whether or not its lines are read: a client that does not read them must not hold a process."""
        process: _Process | None = None
        try:
            process = self._idle.pop() if self._idle else await _Process.start(self._threads)
            self._busy.append(process)
            await asyncio.shield(process.loading)
            process.order(kind, form)
            async for line in _read_until(process, monotonic() + (MOMENTS if turn is None else self.seconds)):
                lines.put_nowait(line)
                if lines.qsize() >= MOST_UNREAD:
                    while not lines.empty():  # they would be kept as long as the client stays
                        lines.get_nowait()
                    lines.put_nowait(_line(kind="error", words="the page did not keep up, and this was stopped"))
                    return
        except (EOFError, TimeoutError):
            words = "the process that computed this has ended, perhaps for want of memory; try again"
            lines.put_nowait(_line(kind="error", words=words))
        finally:
            lines.put_nowait(None)
            if process is None or not process.loading.done() or not process.is_at_work:
                self._put_back(process, turn)
            else:
                self._in_background(self._stop(process, turn))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _start_another(self, first: _Process) -> None:
        """Once the first is loaded: two at a time would only slow each other down."""
        await asyncio.shield(first.loading)
        if len(self._idle) + len(self._busy) < 2:
            self._idle.append(await _Process.start(self._threads))

    async def _stop(self, process: _Process, turn: asyncio.Semaphore | None) -> None:
        """Interrupt the job, or end its process."""
        if await process.interrupt():
            self._put_back(process, turn)
            return
        await process.end()
        self._busy.remove(process)
        self._put_back(None, turn)

    def _put_back(self, process: _Process | None, turn: asyncio.Semaphore | None) -> None:
        """Now it is somebody else's turn."""
        if process is not None:
            self._busy.remove(process)
            if process.orders < MOST_ORDERS:
                self._idle.append(process)
            else:
                self._in_background(process.end())
        self._places.release()
        if turn is not None:
            turn.release()

    @property
    def _threads(self) -> int:
        return max(1, (os.cpu_count() or 1) // self.jobs)


async def _read_until(process: _Process, deadline: float) -> AsyncIterator[bytes]:
    """The lines of a job, and words where it ends otherwise than it should."""
    while True:
        left = deadline - monotonic()
        if left <= 0:
            yield _line(kind="error", words="this took longer than the server allows and was stopped; ask for less")
            return
        try:
            async with asyncio.timeout(min(left, HEARTBEAT)):  # wait_for would lose a cancellation that meets a line
                line = await process.read()
        except TimeoutError:
            yield b""
            continue
        if line is None:
            return
        yield line


def _line(**event: Any) -> bytes:
    return json.dumps(event).encode() + b"\n"
