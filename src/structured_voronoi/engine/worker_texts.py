"""Chains of texts on workers: batches of chains are tasks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from structured_voronoi.engine.generation import Request, make_targets, plan_prompt
from structured_voronoi.engine.plan import Plan
from structured_voronoi.engine.text_chains import (
    TextRun,
    batches_of_chains,
    name_of_batch,
    name_of_place,
)
from structured_voronoi.engine.worker_checkpoint import SpreadCheckpoint, Task, check_same, task_checkpoint, tick_to
from structured_voronoi.problem.problem import bind
from structured_voronoi.targets.controlled import Controlled
from structured_voronoi.targets.language_model import LanguageModel
from structured_voronoi.workers.pool import Report, Work, use_one_core


class ToDraw(NamedTuple):
    """Texts of one prompt, each from a chain."""

    prompt: int
    plan: Plan
    chains: range


@contextlib.contextmanager
def spread_texts(
    kept: SpreadCheckpoint, request: Request, targets: Sequence[LanguageModel | Controlled], plan: Plan
) -> Iterator[None]:
    """Have the chains of all prompts advanced by workers; the checkpoint waits for those that are asked for."""
    kept.employ(partial(_prepare, replace(request, checkpoint=None, workers=1, progress=False), kept.target))
    for number, target in enumerate(targets):
        own_plan = plan_prompt(request, target, kept, number) if number else plan
        for chains in batches_of_chains(own_plan, number * request.n, request.n, kept):
            task, place = ToDraw(number, own_plan, chains), f"{name_of_place(chains[0])}."
            kept.assign(name_of_batch(chains[0]), task, given=place)
    with kept.showing(request.n * len(targets), request.progress, "texts"):
        yield


def _prepare(request: Request, fingerprint: dict[str, Any]) -> Work:
    use_one_core()
    targets = make_targets(request)
    check_same(bind(targets[0]), fingerprint)
    return partial(_work, request, targets)


def _work(request: Request, targets: Any, task: Task, report: Report) -> None:
    kept, asked = task_checkpoint(task, report), task.content
    tick = tick_to(report, len(asked.chains) / asked.plan.steps)
    TextRun(targets[asked.prompt], asked.plan, request.seed, request.start, kept).draw_batch(asked.chains, tick)
    kept.save()
