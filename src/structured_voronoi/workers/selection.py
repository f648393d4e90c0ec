"""The workers that the argument `workers` names."""

from __future__ import annotations

import re
from pathlib import Path

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.workers.pool import Workers
from structured_voronoi.workers.processes import ProcessWorkers

WorkerChoice = int | str | Workers
"""A number of processes, "ray", "ray:NUMBER", "ray://HOST:PORT", or an object with the methods of `Workers`."""


def select_workers(workers: WorkerChoice, folder: Path) -> Workers:
    """The workers that an argument names; a Ray cluster that is started has its files in ``folder``."""
    if isinstance(workers, Workers):
        return workers
    found = re.fullmatch(r"([0-9]{1,6})|(ray)(?::([0-9]{1,6})|://(.+))?", str(workers))
    if found is None or isinstance(workers, bool) or (found[1] and not int(found[1])):
        raise SamplingError(
            f"{workers!r} names no workers",
            argument="workers",
            remedy="give a number of processes, or ray, ray:NUMBER, or ray://HOST:PORT",
        )
    if found[1]:
        return ProcessWorkers(int(found[1]))
    from structured_voronoi.workers.ray_cluster import RayWorkers

    return RayWorkers(f"ray://{found[4]}" if found[4] else None, int(found[3]) if found[3] else None, folder)
