"""The same computation for many tasks, on several processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from structured_voronoi.core.errors import one_line
from structured_voronoi.core.progress import progress_bar
from structured_voronoi.storage.packing import unpack
from structured_voronoi.storage.task_results import open_results
from structured_voronoi.workers.messages import Work, count_cores, pack_answer, use_one_thread
from structured_voronoi.workers.pool import WorkerPool
from structured_voronoi.workers.processes import ProcessWorkers


def map_tasks(
    function: Callable[[Any], Any], tasks: Sequence[Any], label: str, progress: bool, workers: int | None = None
) -> list[Any]:
    """Compute a function of each task on several processes.

    Results that a checkpoint holds are not computed again.

    Parameters
    ----------
    function
        Takes a task and returns data: numbers, strings, tensors and arrays, in lists, tuples and dicts. It must be
        defined at the top of a module.
    tasks
        The tasks.
    label
        Names the tasks in progress bars, errors and checkpoints.
    progress
        Show a progress bar.
    workers
        Number of processes, each with one thread; None for one per core. With 1, everything is computed in this
        process.

    Returns
    -------
    list
        The results, in the order of the tasks.
    """
    saved = open_results(label, tasks)
    results = saved.load()
    missing = [number for number in range(len(tasks)) if number not in results]
    with contextlib.ExitStack() as stack:
        tick = stack.enter_context(progress_bar(len(missing), progress, label, stage="experiment"))
        if workers == 1:
            computed: Iterable[tuple[int, Any]] = (
                (number, unpack(pack_answer(function(tasks[number]))))  # the same data as from a worker
                for number in missing
            )
        else:
            count = max(1, min(len(missing), workers or count_cores()))
            pool = stack.enter_context(WorkerPool(ProcessWorkers(count), partial(_prepare, function)))
            for number in missing:
                pool.submit(number, partial(tasks.__getitem__, number), f"{label} {one_line(tasks[number], 60)}")
            computed = pool.results()
        for number, result in computed:
            results[number] = saved.save(number, result)
            tick()
    return [results[number] for number in range(len(tasks))]


def _prepare(function: Callable[[Any], Any]) -> Work:
    use_one_thread()
    return lambda task, report: function(task)
