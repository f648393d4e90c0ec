"""Where the engine's tries are drawn: in this process or by workers; a checkpoint holds those that are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from structured_voronoi.core.contracts import Target
from structured_voronoi.engine.checkpoint import NO_CHECKPOINT, Checkpoint
from structured_voronoi.engine.rounds import Work
from structured_voronoi.engine.settings import EngineSettings
from structured_voronoi.engine.source import LocalSource
from structured_voronoi.engine.tries import Tries
from structured_voronoi.engine.worker_tasks import Task, TaskProgress, check_same_target
from structured_voronoi.lookahead.lookahead import Lookahead, restore, untrained
from structured_voronoi.problem.problem import Problem
from structured_voronoi.workers.messages import Report, use_one_thread
from structured_voronoi.workers.messages import Work as WorkerFunction


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
            assert self.make_targets is not None
            job = Job(self.make_targets, self.checkpoint.settings["target"], self.seed, self.settings)
            self.checkpoint.start_workers(partial(_prepare, job))

    def announce(self, works: Sequence[Work], lookahead: Lookahead) -> None:
        """Submit the batches of a round to the workers, if there are any."""
        if self.checkpoint.has_workers:
            sizes = {name: head.reader.size for name, head in lookahead.heads.items()}
            heads = Heads(sizes, lookahead.weights() if lookahead.learned else None, bool(lookahead.heads))
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

    def part_name(self, work: Work) -> str:
        """The name of a batch in a checkpoint."""
        return f"{self.stream}-{work.name}"

    def learnt(self, name: str, make: Callable[[], Lookahead]) -> Lookahead:
        """A lookahead from the checkpoint, or a new one."""
        return self.checkpoint.lookahead(name, self.problems[0], make)


class Job(NamedTuple):
    """What all batches have in common."""

    make_targets: Callable[[], Sequence[Target]]
    fingerprint: dict[str, Any]
    seed: int
    settings: EngineSettings


class Heads(NamedTuple):
    """A lookahead without what a worker can compute."""

    sizes: dict[str, Any]
    weights: dict[str, Tensor] | None
    """None for the model restricted to possible tokens."""
    has_heads: bool

    def lookahead(self, problem: Problem, settings: EngineSettings) -> Lookahead:
        if self.weights is None:
            return plain_proposal(problem, settings, self.has_heads)
        return restore(problem, self.sizes, self.weights, settings.lookahead)


def plain_proposal(problem: Problem, settings: EngineSettings, has_heads: bool = True) -> Lookahead:
    """The model, restricted to tokens after which patterns can still match if it has heads."""
    if has_heads:
        return untrained(problem, settings=settings.lookahead)
    return Lookahead({}, settings.lookahead, {}, learned=False)


class ToDraw(NamedTuple):
    """The task of a worker."""

    work: Work
    heads: Heads
    stream: str


def _prepare(job: Job) -> WorkerFunction:
    use_one_thread()
    source = TrySource(job.make_targets(), job.seed, job.settings)
    check_same_target(source.problems[0], job.fingerprint)
    return partial(_draw_batch, source, {})


def _draw_batch(source: TrySource, known: dict[tuple[str, str], Lookahead], task: Task, report: Report) -> None:
    work, heads, source.stream = task.content
    key = source.stream, work.label
    if key not in known:
        known[key] = heads.lookahead(source.problems[0], source.settings)
    checkpoint = task.checkpoint(report)
    checkpoint.put(source.part_name(work), source.compute(work, known[key]).as_data())
    checkpoint.save()
    report(TaskProgress(note="", steps=0))
