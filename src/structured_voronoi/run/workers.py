"""Independent pieces of an experiment on all cores, each on one thread."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from typing import Any

import torch

from structured_voronoi.run.progress import progress_bar


def side_by_side(work: Callable[[Any], Any], tasks: Sequence[Any], what: str, progress: bool) -> list[Any]:
    """``work`` on each task, as many at a time as there are cores, each on one thread; results in the tasks' order."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # else it would be started, and would change the mask, in between
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a Ctrl-C that comes meanwhile waits
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)  # workers inherit this: Ctrl-C is for the parent alone
    try:
        pool = context.Pool(min(len(tasks), cores), torch.set_num_threads, (1,))
    finally:
        signal.signal(signal.SIGINT, usual)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with pool, progress_bar(len(tasks), progress, what) as tick:
        results = []
        for result in pool.imap(work, tasks):
            results.append(result)
            tick()
        return results
