"""Where the engine's tries are drawn: in this process or by workers; a checkpoint holds those that are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from structured_voronoi.core.contracts import Target
from structured_voronoi.engine.checkpoint import NO_CHECKPOINT, Checkpoint
from structured_voronoi.engine.rounds import Work
from structured_voronoi.engine.source import LocalSource
from structured_voronoi.engine.tries import Tries
from structured_voronoi.lookahead.lookahead import Lookahead


@dataclass
class TrySource(LocalSource):
    """Draws batches in this process or by workers; a checkpoint holds those that were drawn."""

    checkpoint: Checkpoint = NO_CHECKPOINT
    make_targets: Callable[[], Sequence[Target]] | None = None
    """How a worker makes the same targets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.split = self.checkpoint.split
        if self.checkpoint.has_workers:
            from structured_voronoi.engine.worker_tries import Job, prepare

            assert self.make_targets is not None
            job = Job(self.make_targets, self.checkpoint.settings["target"], self.seed, self.settings)
            self.checkpoint.start_workers(partial(prepare, job))

    def announce(self, works: Sequence[Work], lookahead: Lookahead) -> None:
        """Submit the batches of a round to the workers, if there are any."""
        if self.checkpoint.has_workers:
            from structured_voronoi.engine.worker_tries import Heads, ToDraw

            heads = Heads.of(lookahead)
            for work in works:
                self.checkpoint.submit(self.part_name(work), ToDraw(work, heads, self.stream))

    def draw(self, work: Work, lookahead: Lookahead) -> Tries:
        """The tries of one batch, from the checkpoint if they are there."""
        checkpoint, name = self.checkpoint, self.part_name(work)
        saved = checkpoint.get(name)
        if saved is not None and (saved["observed"] is not None or not work.is_observed):
            return Tries.from_data(saved)
        with checkpoint.finish_step():
            drawn = self.compute(work, lookahead)
            checkpoint.put(name, drawn.as_data())
            if checkpoint.is_due:
                checkpoint.save()
        return drawn

    def learnt(self, name: str, make: Callable[[], Lookahead]) -> Lookahead:
        """A lookahead from the checkpoint, or a new one."""
        return self.checkpoint.lookahead(name, self.problems[0], make)
