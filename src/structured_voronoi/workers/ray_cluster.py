"""Workers that are actors of a Ray cluster. This is the one module that imports Ray.

A cluster that is not there is started on this machine, for this run alone: behind a token that nobody else has, with
all its files in the run's folder, or in a private one where that has too long a name for sockets, and without reports
to Ray's makers. It ends with the run.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from structured_voronoi.core.errors import SamplingError, one_line
from structured_voronoi.storage.store import RAY
from structured_voronoi.workers.pool import Event, Lost, Said, Work, count_cores, event_of, respond

ANSWER_SECONDS = 5.0
"""How long a cluster may take to answer before it is taken to be out of reach."""
LONGEST = 40
"""Characters of the name of Ray's folder: the paths of sockets within have some 60 more, and may have 107."""
MEMORY = 128 * 2**20
"""Bytes of the store of objects of a cluster that is started here; only tasks and parts of checkpoints go there."""


class RayWorkers:
    """Actors, each on one core: ``count`` of them, or as many as the cluster has cores."""

    def __init__(self, address: str | None, count: int | None, folder: Path) -> None:
        """``address`` is that of a cluster. None stands for the one that this process has joined already, for the one
        that RAY_ADDRESS names, or for one that is started here."""
        address = address or os.environ.get("RAY_ADDRESS")
        if address is None and "ray" not in sys.modules:
            os.environ.update(_token())
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        try:
            import ray
        except ImportError as error:
            raise SamplingError(
                "these workers need Ray, which is not installed",
                remedy="pip install 'structured-voronoi[ray]'",
            ) from error
        self._ray: Any = ray
        self._actors: dict[int, Any] = {}
        self._news: dict[Any, int] = {}
        self._cleanup = contextlib.ExitStack()
        try:
            if not ray.is_initialized():
                self._connect(address, count or count_cores(), folder)
            cores = int(ray.cluster_resources().get("CPU", 0))
        except BaseException:
            self.stop()
            raise
        self.count = count or max(1, cores)
        self._actor: Any = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(_Actor)

    def _connect(self, address: str | None, count: int, folder: Path) -> None:
        """Join the cluster, or start one; it is left in the end."""
        settings: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
        if address is None:
            if os.environ.get("RAY_AUTH_MODE") != "token":
                raise SamplingError(
                    "Ray was imported before, and a cluster would be open to everybody",
                    remedy=(
                        "import it later, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before, or call ray.init "
                        "yourself"
                    ),
                )
            own = self._cleanup.enter_context(_short_folder(folder.resolve() / RAY))
            settings |= {"address": "local", "num_cpus": count, "include_dashboard": False, "_temp_dir": str(own)}
            settings |= {"object_store_memory": MEMORY}
        elif address.startswith("ray://"):
            _check_answers(address)
        try:
            with contextlib.chdir(os.sep):  # Ray puts the current folder first on the `sys.path` of its workers
                self._ray.init(**settings)
        except Exception as error:  # Ray raises many kinds
            raise SamplingError(
                f"the Ray cluster {address or 'on this machine'} cannot be used",
                cause=one_line(error),
                remedy="check its address, and that RAY_AUTH_TOKEN is its token",
            ) from error
        self._cleanup.callback(self._ray.shutdown)

    def start(self, worker: int, prepare: bytes) -> None:
        self._actors[worker] = self._actor.remote(prepare, list(sys.path), os.getcwd())

    def give(self, worker: int, task: bytes) -> None:
        self._actors[worker].give.remote(task)
        self._ask(worker)

    def _ask(self, worker: int) -> None:
        self._news[self._actors[worker].news.remote()] = worker

    def wait(self) -> list[Event]:
        events: list[Event] = []
        while not events:
            ready, _ = self._ray.wait(list(self._news), num_returns=1)
            for news in ready:
                worker = self._news.pop(news)
                event = self._hear(worker, news)
                if event is not None:
                    events.append(event)
        return events

    def _hear(self, worker: int, news: Any) -> Event | None:
        try:
            answer = self._ray.get(news)
        except self._ray.exceptions.RayActorError as error:
            del self._actors[worker]
            return Lost(worker, f"what Ray tells of it: {one_line(error)}")
        event = event_of(worker, answer)  # bytes, which Ray has packed in a way of its own
        if event is None or isinstance(event, Said):
            self._ask(worker)
        return event

    def stop(self) -> None:
        for actor in self._actors.values():
            with contextlib.suppress(Exception):  # it may be gone, and the cluster, too
                self._ray.kill(actor)
        self._actors.clear()
        self._news.clear()
        self._cleanup.close()


class _Actor:
    """A worker: the work is done in a thread, and its answers are asked for one by one."""

    def __init__(self, prepare: bytes, path: list[str], folder: str) -> None:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        with contextlib.suppress(OSError):  # on another machine
            os.chdir(folder)
        self._work: Work | None = None
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._messages.put(prepare)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._work = respond(self._work, self._messages.get(), self._answers.put)

    def give(self, task: bytes) -> None:
        self._messages.put(task)

    def news(self) -> bytes:
        return self._answers.get()


def _check_answers(address: str) -> None:
    """Does anybody listen there? Ray itself would try for half a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise SamplingError(
            f"no Ray cluster answers at {address}",
            cause=one_line(error),
            remedy="write ray://HOST:PORT with the address that `ray start --head` names for clients",
        ) from error


def _token() -> dict[str, str]:
    """The user's token, or a new one. Ray reads it when it is imported, and never again."""
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {name: os.environ.get(name, value) for name, value in own.items()}


@contextlib.contextmanager
def _short_folder(folder: Path) -> Iterator[Path]:
    """The folder, empty, or one with a shorter name; it is removed in the end."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    if len(str(folder)) > LONGEST:
        folder = Path(tempfile.mkdtemp(prefix="ray-"))
    try:
        if len(str(folder)) > LONGEST:
            raise SamplingError(
                f"Ray's sockets need a folder with a name of at most {LONGEST} characters, and {folder} has "
                f"{len(str(folder))}",
                remedy="set TMPDIR to one with a short name, such as /tmp",
            )
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
