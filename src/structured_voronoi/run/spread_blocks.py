"""The texts of `probability` on workers, a range of them at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from structured_voronoi.contracts import Target
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.problem.problem import bind
from structured_voronoi.run.probability import AT_A_TIME, Blocks, prefix_of
from structured_voronoi.run.spread import SpreadCheckpoint, Task, Ticked, check_same, task_checkpoint
from structured_voronoi.run.workers import Report, Work, use_one_core
from structured_voronoi.streams import BLOCK


@dataclass(frozen=True)
class Job:
    """What all ranges have in common."""

    target: Target
    fingerprint: dict[str, Any]
    lookahead: Lookahead
    seed: int


class Range(NamedTuple):
    """Texts of a stream, and the part into which goes what is found of them."""

    stream: str
    numbers: range
    part: str


def spread_blocks(kept: SpreadCheckpoint, blocks: Blocks, texts: dict[str, int]) -> None:
    """Have so many texts of each stream looked at; what is found is in the checkpoint then."""
    kept.employ(partial(_prepare, Job(blocks.problem.target, kept.target, blocks.lookahead, blocks.seed)))
    for stream, count in texts.items():
        for task in _split(stream, count, kept.split):
            kept.assign(task.part, task)
    with kept.showing(sum(texts.values()), blocks.progress, "texts"):
        while kept.wait():
            pass
    if not kept.is_finished:
        kept.reach(blocks.all_texts, blocks.all_texts, "texts")
        kept.save()


def _split(stream: str, texts: int, parts: int) -> Iterator[Range]:
    """Ranges of whole blocks, at least one for each worker where there are so many."""
    size = min(AT_A_TIME, -(-texts // (parts * BLOCK)) * BLOCK)
    for number, begin in enumerate(range(0, texts, size) if texts else ()):
        yield Range(stream, range(begin, min(begin + size, texts)), f"{prefix_of(stream)}{number:06}")


def _prepare(job: Job) -> Work:
    use_one_core()
    problem = bind(job.target)
    check_same(problem, job.fingerprint)
    return partial(_look, Blocks(problem, job.lookahead, job.seed, False, None, 0))


def _look(blocks: Blocks, task: Task, report: Report) -> None:
    asked, kept = task.content, task_checkpoint(task, report)
    kept.put(asked.part, blocks.find(asked.stream, asked.numbers))
    kept.save()
    report(Ticked(note="", steps=len(asked.numbers)))
