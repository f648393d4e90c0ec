"""Workers that are actors of a Ray cluster. No other module imports Ray.

Without an address, a cluster is started on this machine for this run alone. It requires a random token, has its files
in the checkpoint folder (or in a temporary folder if that path is too long for sockets), sends no usage statistics, and
ends with the run.
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
from structured_voronoi.storage.store import RAY_FOLDER
from structured_voronoi.workers.messages import (
    Event,
    Lost,
    Reported,
    Work,
    count_cores,
    handle_message,
    read_answer,
)


class RayWorkers:
    """Actors of a Ray cluster, each on one core.

    Parameters
    ----------
    address
        Address of the cluster. None for the cluster that this process has joined, the one that RAY_ADDRESS names, or
        a new one on this machine.
    count
        Number of actors; None for one per core of the cluster.
    folder
        The checkpoint folder.
    """

    def __init__(self, address: str | None, count: int | None, folder: Path) -> None:
        address = address or os.environ.get("RAY_ADDRESS")
        if address is None and "ray" not in sys.modules:
            os.environ.update(_token())
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        try:
            import ray
        except ImportError as error:
            raise SamplingError(
                "Ray is not installed",
                remedy="pip install 'structured-voronoi[ray]'",
            ) from error
        self._ray: Any = ray
        self._actors: dict[int, Any] = {}
        self._answers: dict[Any, int] = {}
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
        """Join a cluster or start one, until `stop`."""
        settings: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
        if address is None:
            if os.environ.get("RAY_AUTH_MODE") != "token":
                raise SamplingError(
                    "Ray was imported without RAY_AUTH_MODE=token, so that a new cluster would be open to everybody",
                    remedy="import it later, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before, or call ray.init",
                )
            own = self._cleanup.enter_context(_short_folder(folder.resolve() / RAY_FOLDER))
            settings |= {"address": "local", "num_cpus": count, "include_dashboard": False, "_temp_dir": str(own)}
            settings |= {"object_store_memory": 128 * 2**20}  # bytes, for tasks and parts of checkpoints
        elif address.startswith("ray://"):
            _check_address(address)
        try:
            with contextlib.chdir(os.sep):  # Ray puts the current folder first on the `sys.path` of its workers
                self._ray.init(**settings)
        except Exception as error:  # Ray raises many kinds
            raise SamplingError(
                f"the Ray cluster {address or 'on this machine'} cannot be used",
                cause=one_line(error),
                remedy="check the address, and that RAY_AUTH_TOKEN is the token of the cluster",
            ) from error
        self._cleanup.callback(self._ray.shutdown)

    def start_worker(self, worker: int, prepare: bytes) -> None:
        self._actors[worker] = self._actor.remote(prepare, list(sys.path), os.getcwd())

    def submit(self, worker: int, task: bytes) -> None:
        self._actors[worker].submit.remote(task)
        self._request_answer(worker)

    def _request_answer(self, worker: int) -> None:
        self._answers[self._actors[worker].next_answer.remote()] = worker

    def wait(self) -> list[Event]:
        events: list[Event] = []
        while not events:
            ready, _ = self._ray.wait(list(self._answers), num_returns=1)
            events = [event for answer in ready if (event := self._receive(answer)) is not None]
        return events

    def _receive(self, answer: Any) -> Event | None:
        """The event that an answer reports, or the loss of its worker; None if the worker is prepared."""
        worker = self._answers.pop(answer)
        try:
            data = self._ray.get(answer)
        except self._ray.exceptions.RayActorError as error:
            del self._actors[worker]
            return Lost(worker, one_line(error))
        event = read_answer(worker, data)
        if event is None or isinstance(event, Reported):
            self._request_answer(worker)
        return event

    def stop(self) -> None:
        for actor in self._actors.values():
            with contextlib.suppress(Exception):  # the actor or the cluster may have ended
                self._ray.kill(actor)
        self._actors.clear()
        self._answers.clear()
        self._cleanup.close()


class _Actor:
    """A worker. A thread computes tasks; their answers are requested one by one."""

    def __init__(self, prepare: bytes, path: list[str], folder: str) -> None:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        with contextlib.suppress(OSError):  # another machine may not have the folder
            os.chdir(folder)
        self._work: Work | None = None
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._messages.put(prepare)
        threading.Thread(target=self._handle_messages, daemon=True).start()

    def _handle_messages(self) -> None:
        while True:
            self._work = handle_message(self._work, self._messages.get(), self._answers.put)

    def submit(self, task: bytes) -> None:
        self._messages.put(task)

    def next_answer(self) -> bytes:
        return self._answers.get()


def _check_address(address: str) -> None:
    """Raise an error if nothing listens at an address; Ray itself would try for half a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except (OSError, ValueError, OverflowError) as error:
        raise SamplingError(
            f"no Ray cluster answers at {address}",
            cause=one_line(error),
            remedy="use ray://HOST:PORT with the address that `ray start --head` prints for clients",
        ) from error


def _token() -> dict[str, str]:
    """The user's token, or a new one. Ray reads it only when it is imported."""
    new = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {name: os.environ.get(name, value) for name, value in new.items()}


@contextlib.contextmanager
def _short_folder(folder: Path) -> Iterator[Path]:
    """An empty folder for Ray, or a temporary one if its path is too long; removed at the end."""
    max_length = 40  # paths of sockets in it have some 60 more characters and may have 107
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    if len(str(folder)) > max_length:
        folder = Path(tempfile.mkdtemp(prefix="ray-"))
    try:
        if len(str(folder)) > max_length:
            raise SamplingError(
                f"the path of the temporary folder {folder} is longer than {max_length} characters, too long for Ray",
                remedy="set TMPDIR to a folder with a short path, such as /tmp",
            )
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
