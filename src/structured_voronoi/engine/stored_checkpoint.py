"""Checkpoints whose values are files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from time import monotonic
from typing import Any, Protocol

import torch

from structured_voronoi.core.stopping import Stopping
from structured_voronoi.engine.checkpoint import Checkpoint, CheckpointSettings
from structured_voronoi.storage.packing import check_storable, pack, unpack

SUFFIX = ".safetensors"
"""Suffix of the files of a checkpoint."""


class PartStore(Protocol):
    """Where a checkpoint writes its files."""

    @property
    def is_finished(self) -> bool: ...
    def __contains__(self, name: str) -> bool: ...
    def names(self, prefix: str) -> list[str]: ...
    def read(self, name: str) -> bytes: ...
    def commit(
        self,
        new: Mapping[str, bytes],
        drop: Iterable[str] = (),
        progress: dict[str, Any] | None = None,
        finished: bool = False,
    ) -> None: ...


class StoredCheckpoint(Checkpoint):
    """A checkpoint whose values are files of a store."""

    def __init__(self, store: PartStore, settings: CheckpointSettings | None = None) -> None:
        self.timing = settings or CheckpointSettings()
        self._parts = store
        self._new: dict[str, bytes] = {}
        self._dropped: list[str] = []
        self._wait, self._saved = min(self.timing.first_interval, self.timing.interval), monotonic()
        self._progress: dict[str, Any] | None = None
        self._stopping = Stopping()

    @property
    def is_finished(self) -> bool:
        return self._parts.is_finished

    @property
    def is_complete(self) -> bool:
        """True if the recorded progress says that everything is done."""
        return self._progress is not None and self._progress["done"] == self._progress["of"]

    @property
    def is_due(self) -> bool:
        return self._stopping.requested or self.is_complete or monotonic() - self._saved >= self._wait

    def names(self, prefix: str) -> list[str]:
        files = {*self._parts.names(prefix), *self._new} - {*self._dropped}
        return sorted(file.removesuffix(SUFFIX) for file in files if file.startswith(prefix))

    def get(self, name: str, template: Any = None, device: torch.device | str = "cpu") -> Any:
        file = name + SUFFIX
        return unpack(self._parts.read(file), template, device) if file in self._parts else None

    def put(self, name: str, value: Any, template: Any = None) -> None:
        self._new[name + SUFFIX] = pack(value, template, name)

    def drop(self, name: str) -> None:
        if self._new.pop(name + SUFFIX, None) is None:
            self._dropped.append(name + SUFFIX)

    def check_storable(self, value: Any, name: str) -> None:
        check_storable(value, name)

    def record_progress(self, done: int, total: int, unit: str) -> None:
        self._progress = {"done": done, "of": total, "unit": unit}

    def save(self) -> None:
        if self._new or self._dropped or not self.is_finished:
            began = monotonic()
            self._parts.commit(self._new, self._dropped, self._progress, self.is_complete)
            self._new, self._dropped, self._saved = {}, [], monotonic()
            cost = self._saved - began
            self._wait = max(min(2 * self._wait, self.timing.interval), cost / self.timing.max_time_share)
        if self._stopping.requested:
            self._stopping.deliver()

    def finish_step(self) -> contextlib.AbstractContextManager[Any]:
        return self._stopping
