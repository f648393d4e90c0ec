"""One piece of work on each of many tasks, on as many processes as there are cores: what experiments do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from structured_voronoi.core.errors import one_line
from structured_voronoi.core.progress import progress_bar
from structured_voronoi.storage.packing import unpack
from structured_voronoi.storage.task_results import KEEPER
from structured_voronoi.workers.pool import Crew, Work, answered, count_cores, use_one_core
from structured_voronoi.workers.processes import Processes


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
        tick = stack.enter_context(progress_bar(len(missing), progress, label, stage="experiment"))
        if workers == 1:
            computed: Iterable[tuple[int, Any]] = (
                (number, unpack(answered(work(tasks[number]))))  # what could not be sent is refused here, too
                for number in missing
            )
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
