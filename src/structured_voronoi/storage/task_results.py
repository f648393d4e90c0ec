"""Checkpoints of lists of tasks: an interrupted experiment computes only the tasks that are missing.

Experiments need no code for this: `map_tasks` asks `open_results` for the results that are saved already.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from structured_voronoi.core.errors import SamplingError, one_line
from structured_voronoi.storage.store import Store


class TaskResults:
    """The saved results of a list of tasks. This class saves nothing."""

    def load(self) -> dict[int, Any]:
        """The saved results, by the numbers of their tasks."""
        return {}

    def save(self, number: int, result: Any) -> Any:
        """Save a result, and return it as it will be loaded."""
        return result


class StoredResults(TaskResults):
    """The results of a list of tasks in a checkpoint folder, one file per task."""

    def __init__(self, store: Store, name: str, tasks: Sequence[Any]) -> None:
        self._store, self._name, self._tasks = store, name, tasks

    def load(self) -> dict[int, Any]:
        names = {number: self._file(number) for number in range(len(self._tasks))}
        return {number: self._load(number) for number, name in names.items() if name in self._store}

    def save(self, number: int, result: Any) -> Any:
        data = json.dumps({"task": _describe_task(self._tasks[number]), "result": result})
        done = 1 + len(self._store.run.parts)
        self._store.commit({self._file(number): data.encode()}, progress={"done": done, "unit": "tasks"})
        return json.loads(data)["result"]

    def _load(self, number: int) -> Any:
        saved = json.loads(self._store.read(self._file(number)))
        if saved["task"] != _describe_task(self._tasks[number]):
            raise SamplingError(
                f"{self._store.folder / self._file(number)} holds the result of another task ({saved['task']})",
                remedy="use a new checkpoint folder",
            )
        return saved["result"]

    def _file(self, number: int) -> str:
        return f"{self._name}-{number:06}.json"


def _describe_task(task: Any) -> str:
    """The task as a string, without memory addresses."""
    return one_line(re.sub(r" at 0x[0-9a-f]+", "", repr(task)))


OpenResults = Callable[[str, Sequence[Any]], TaskResults]
_open_results: ContextVar[OpenResults] = ContextVar("open_results", default=lambda label, tasks: TaskResults())


def open_results(label: str, tasks: Sequence[Any]) -> TaskResults:
    """The saved results of the next list of tasks; lists must come in the same order in each run."""
    return _open_results.get()(label, tasks)


@contextlib.contextmanager
def checkpoint_tasks(store: Store, experiment: str) -> Iterator[None]:
    """Save the results of all tasks of an experiment in a folder, and reuse those that are there."""
    lists: Counter[str] = Counter()

    def open_stored(label: str, tasks: Sequence[Any]) -> TaskResults:
        label = re.sub(r"\W+", "-", label, flags=re.ASCII)
        lists[label] += 1
        return StoredResults(store, f"{experiment}/{label}-{lists[label]}", tasks)

    token = _open_results.set(open_stored)
    try:
        yield
    finally:
        _open_results.reset(token)
