"""The checkpoint that the arguments of a run name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from structured_voronoi.engine.checkpoint import Checkpoint, CheckpointSettings, NoCheckpoint

if TYPE_CHECKING:
    from structured_voronoi.workers.selection import WorkerChoice


def open_checkpoint(
    location: str | Path | CheckpointSettings | None, resume: bool, workers: WorkerChoice, kind: str
) -> Checkpoint:
    """The checkpoint of a run of some kind.

    A run is resumed as it was begun: one without workers has none later, and one with workers is split as before.

    Parameters
    ----------
    location
        The checkpoint folder, or settings that name it.
    resume
        Without it, a folder that holds a run is refused.
    workers
        The workers that compute the run; 1 for this process.
    kind
        The kind of the run. A folder with a run of another kind is refused.
    """
    settings = location if isinstance(location, CheckpointSettings) else CheckpointSettings(location)
    if settings.folder is None and workers == 1:
        return NoCheckpoint()
    from structured_voronoi.engine.folder_checkpoint import FolderCheckpoint
    from structured_voronoi.engine.worker_checkpoint import SPLIT, WorkerCheckpoint
    from structured_voronoi.storage.store import Store, TemporaryStore
    from structured_voronoi.workers.selection import select_workers

    store = TemporaryStore() if settings.folder is None else Store(settings.folder, resume)
    try:
        store.check_kind(kind)
        if SPLIT in store or (workers != 1 and not store.has_files):
            return WorkerCheckpoint(store, select_workers(workers, store.folder), settings)
    except BaseException:
        store.close()
        raise
    return FolderCheckpoint(store, settings)
