"""Independent pieces of an experiment on all cores, each on one thread."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.pool import Pool
from typing import Any

import torch

from structured_voronoi.progress import Tick, progress_bar


def side_by_side(
    work: Callable[[Any], Any], tasks: Sequence[Any], label: str, progress: bool, workers: int | None = None
) -> list[Any]:
    """``work`` on each task; results in the tasks' order.

    ``workers`` is the number of processes, each on one thread: None for one per core; with 1 the work is done in
    this process.
    """
    if workers == 1:
        with progress_bar(len(tasks), progress, label) as tick:
            return _collect(map(work, tasks), tick)
    processes = max(1, min(len(tasks), workers or _count_cores()))
    with _start_pool(processes) as pool, progress_bar(len(tasks), progress, label) as tick:
        return _collect(pool.imap(work, tasks), tick)


def _collect(results: Iterable[Any], tick: Tick) -> list[Any]:
    """The results as they come, each with a tick of the progress bar."""
    collected = []
    for result in results:
        collected.append(result)
        tick()
    return collected


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start_pool(processes: int) -> Pool:
    """A pool whose workers leave Ctrl-C to this process."""
    resource_tracker.ensure_running()  # else it would be started, and would change the mask, in between
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a Ctrl-C that comes meanwhile waits
    previous_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # workers inherit this
    try:
        return multiprocessing.get_context("spawn").Pool(processes, torch.set_num_threads, (1,))
    finally:
        signal.signal(signal.SIGINT, previous_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
