"""Results of tasks that are kept as they come, so that a run of them that was stopped goes on where it was.

Experiments know nothing of this: while `keep_results` is in force, `side_by_side` asks here first.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from structured_voronoi.core.errors import SamplingError, one_line
from structured_voronoi.storage.store import Store

KEEPER: ContextVar[ResultKeeper | None] = ContextVar("keeper", default=None)


class ResultKeeper:
    """The results of one experiment in a folder: a part a task, by the name of its list and its place there."""

    def __init__(self, store: Store, experiment: str) -> None:
        self.store, self.experiment = store, experiment
        self._lists: Counter[str] = Counter()

    def open_list(self, label: str, tasks: Sequence[Any]) -> KeptList:
        """The results of the next list of tasks; lists come in the same order in every run."""
        label = re.sub(r"\W+", "-", label, flags=re.ASCII)
        self._lists[label] += 1
        return KeptList(self.store, f"{self.experiment}/{label}-{self._lists[label]}", tasks)


class KeptList:
    """The results of a list of tasks."""

    def __init__(self, store: Store, name: str, tasks: Sequence[Any]) -> None:
        self._store, self._name, self._tasks = store, name, tasks

    def find(self) -> dict[int, Any]:
        """Those that are there, by the numbers of their tasks."""
        names = {number: self._part(number) for number in range(len(self._tasks))}
        return {number: self._read(number) for number, name in names.items() if name in self._store.run.parts}

    def put(self, number: int, result: Any) -> Any:
        """Keep a result; returns it as it will be read again, with lists for tuples."""
        kept = json.dumps({"task": _known_by(self._tasks[number]), "result": result})
        done = 1 + len(self._store.run.parts)
        self._store.commit({self._part(number): kept.encode()}, progress={"done": done, "unit": "tasks"})
        return json.loads(kept)["result"]

    def _read(self, number: int) -> Any:
        kept = json.loads(self._store.read(self._part(number)))
        if kept["task"] != _known_by(self._tasks[number]):
            raise SamplingError(
                f"{self._store.folder / self._part(number)} holds the result of another task ({kept['task']})",
                remedy="begin anew in another folder",
            )
        return kept["result"]

    def _part(self, number: int) -> str:
        return f"{self._name}-{number:06}.json"


def _known_by(task: Any) -> str:
    """The task in words, without addresses in memory."""
    return one_line(re.sub(r" at 0x[0-9a-f]+", "", repr(task)))


@contextlib.contextmanager
def keep_results(store: Store, experiment: str) -> Iterator[None]:
    """Results of all tasks that are done meanwhile are kept in the folder, or taken from there."""
    token = KEEPER.set(ResultKeeper(store, experiment))
    try:
        yield
    finally:
        KEEPER.reset(token)
