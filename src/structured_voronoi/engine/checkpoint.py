"""Checkpoints of runs: what a run needs in order to resume with the same results, saved at intervals."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from structured_voronoi.core.contracts import Sampler, Start, tune
from structured_voronoi.core.validation import check_positive
from structured_voronoi.problem.problem import Problem

if TYPE_CHECKING:
    from structured_voronoi.core.progress import Stage
    from structured_voronoi.engine.plan import Plan
    from structured_voronoi.lookahead.lookahead import Lookahead
    from structured_voronoi.samplers.registry import Scale
    from structured_voronoi.workers.messages import Prepare


@dataclass(frozen=True)
class CheckpointSettings:
    """Where a run is saved, and how often.

    Parameters
    ----------
    folder
        The checkpoint folder; None for a run that cannot be resumed.
    first_interval
        Seconds before the first save. Each further interval is twice as long as the one before, up to ``interval``.
    interval
        Longest interval between two saves, in seconds.
    max_time_share
        Largest share of the time that is spent on saving. On a slow disk intervals become longer.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> every_minute = sv.CheckpointSettings("my-run", interval=60.0)
    >>> every_minute.first_interval
    1.0
    """

    folder: str | Path | None = None
    first_interval: float = 1.0
    interval: float = 30.0
    max_time_share: float = 0.02

    def __post_init__(self) -> None:
        check_positive(max_time_share=self.max_time_share)


class Checkpoint:
    """What loops may ask of a checkpoint. This class itself does nothing and holds nothing."""

    split = 1
    """Number of workers for which the run was split when it began."""
    has_workers = False
    """True if workers compute what the loops ask for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object = None, error: BaseException | None = None, trace: object = None) -> None:
        """Close the checkpoint."""

    @property
    def folder(self) -> Path | None:
        """The folder of the checkpoint."""
        return None

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the saved run."""
        return {}

    @property
    def is_finished(self) -> bool:
        """True if the saved run is complete."""
        return False

    @property
    def is_due(self) -> bool:
        """True if it is time to save: the interval has passed, the run is complete, or Ctrl-C was pressed."""
        return False

    @property
    def changed_versions(self) -> str:
        """Libraries whose versions differ from those with which the run was begun."""
        return ""

    def begin(self, kind: str, problem: Problem, settings: Mapping[str, Any], growing: str | None = None) -> None:
        """Begin or resume a run. A run of another kind, target or settings is refused.

        The number called ``growing`` among the settings may be larger than in the saved run, which is then extended.
        """

    def stages(self, count: int) -> list[range]:
        """The numbers below ``count``, split where a run was extended."""
        return [range(count)]

    def names(self, prefix: str) -> list[str]:
        """Names of the values that begin with ``prefix``, sorted."""
        return []

    def get(self, name: str, template: Any = None, device: torch.device | str = "cpu") -> Any:
        """A saved value; None if there is none of this name."""
        return None

    def put(self, name: str, value: Any, template: Any = None) -> None:
        """Add a value to the next save. A name stands for one value; it cannot be replaced."""

    def drop(self, name: str) -> None:
        """Remove a value with the next save."""

    def check_storable(self, value: Any, name: str) -> None:
        """Raise an error if `put` would refuse the value."""

    def record_progress(self, done: int, total: int, unit: str) -> None:
        """Record how much of the run is done, for the next save."""

    def save(self) -> None:
        """Save all changes at once; then stop, if Ctrl-C was pressed."""

    def finish_step(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which the first Ctrl-C waits for the next `save`."""
        return contextlib.nullcontext()

    def tuned_sampler(self, sampler: Sampler, problem: Problem, seed: int, start: Start) -> Sampler:
        """The sampler with tuned settings, tuned once per run."""
        return tune(sampler, problem, seed, start)

    def plan(self, name: str, problem: Problem, scale: Scale, make: Callable[[], Plan]) -> Plan:
        """The plan of the chains of texts, made once per run."""
        return make()

    def lookahead(self, name: str, problem: Problem, make: Callable[[], Lookahead]) -> Lookahead:
        """A lookahead, fitted once per run."""
        return make()

    def start_workers(self, prepare: Prepare) -> None:
        """Have workers prepare for the tasks that are going to be submitted."""

    def submit(self, name: str, content: Any, *, folder: str = "", given: str | None = None) -> None:
        """Have a worker compute the value ``name``, if there are workers and it is not saved already."""

    def worker_progress(self, total: int, progress: bool, stage: Stage) -> contextlib.AbstractContextManager[None]:
        """A context in which one progress bar is shown for all workers."""
        return contextlib.nullcontext()


class NoCheckpoint(Checkpoint):
    """The checkpoint of a run that has none."""


NO_CHECKPOINT = NoCheckpoint()
