"""Batches of tries that workers draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

from torch import Tensor

from structured_voronoi.core.contracts import Target
from structured_voronoi.engine.rounds import Work
from structured_voronoi.engine.settings import EngineSettings
from structured_voronoi.engine.source import LocalSource, plain_proposal
from structured_voronoi.engine.worker_tasks import Task, TaskProgress, check_same_target
from structured_voronoi.lookahead.lookahead import Lookahead, restore
from structured_voronoi.problem.problem import Problem
from structured_voronoi.workers.messages import Report, use_one_thread
from structured_voronoi.workers.messages import Work as WorkerFunction


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

    @classmethod
    def of(cls, lookahead: Lookahead) -> Self:
        sizes = {name: head.reader.size for name, head in lookahead.heads.items()}
        return cls(sizes, lookahead.weights() if lookahead.learned else None, bool(lookahead.heads))

    def lookahead(self, problem: Problem, settings: EngineSettings) -> Lookahead:
        if self.weights is None:
            return plain_proposal(problem, settings, self.has_heads)
        return restore(problem, self.sizes, self.weights, settings.lookahead)


class ToDraw(NamedTuple):
    """The task of a worker."""

    work: Work
    heads: Heads
    stream: str


def prepare(job: Job) -> WorkerFunction:
    use_one_thread()
    source = LocalSource(job.make_targets(), job.seed, job.settings)
    check_same_target(source.problems[0], job.fingerprint)
    return partial(_draw_batch, source, {})


def _draw_batch(source: LocalSource, known: dict[tuple[str, str], Lookahead], task: Task, report: Report) -> None:
    work, heads, source.stream = task.content
    key = source.stream, work.label
    if key not in known:
        known[key] = heads.lookahead(source.problems[0], source.settings)
    checkpoint = task.checkpoint(report)
    checkpoint.put(source.part_name(work), source.compute(work, known[key]).as_data())
    checkpoint.save()
    report(TaskProgress(note="", steps=0))
