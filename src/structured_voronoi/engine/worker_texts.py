"""Chains of texts on workers: each task is a batch of chains."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from structured_voronoi.engine.checkpoint import Checkpoint
from structured_voronoi.engine.plan import Plan
from structured_voronoi.engine.request import Request
from structured_voronoi.engine.text_chains import TextChains, batch_name, chain_batches, position_name
from structured_voronoi.engine.worker_tasks import Task, check_same_target, progress_reporter
from structured_voronoi.problem.problem import bind
from structured_voronoi.targets.controlled import ControlledTarget
from structured_voronoi.targets.text import TextTarget
from structured_voronoi.workers.messages import Report, Work, use_one_thread


class TextTask(NamedTuple):
    """A batch of chains of one prompt."""

    prompt_number: int
    plan: Plan
    chains: range


@contextlib.contextmanager
def distribute_texts(
    checkpoint: Checkpoint, request: Request, targets: Sequence[TextTarget | ControlledTarget], plan: Plan
) -> Iterator[None]:
    """Submit the chains of all prompts to workers, if there are any; ``plan`` is that of the first prompt."""
    if not checkpoint.has_workers:
        yield
        return
    local_request = replace(request, checkpoint=None, workers=1, progress=False)
    checkpoint.start_workers(partial(_prepare, local_request, checkpoint.settings["target"]))
    for number, target in enumerate(targets):
        own_plan = request.plan(target, checkpoint, number) if number else plan
        for chains in chain_batches(own_plan, number * request.n, request.n, checkpoint):
            task = TextTask(number, own_plan, chains)
            checkpoint.submit(batch_name(chains), task, given=f"{position_name(chains)}.")
    with checkpoint.worker_progress(request.n * len(targets), request.progress, "texts"):
        yield


def _prepare(request: Request, fingerprint: dict[str, Any]) -> Work:
    use_one_thread()
    targets = request.targets()
    check_same_target(bind(targets[0]), fingerprint)
    return partial(_draw_texts, request, targets)


def _draw_texts(request: Request, targets: Sequence[TextTarget | ControlledTarget], task: Task, report: Report) -> None:
    content, checkpoint = task.content, task.checkpoint(report)
    number, chains = content.prompt_number, content.chains
    run = TextChains(
        targets[number],
        content.plan,
        request.seed,
        request.start,
        checkpoint,
        prompt_number=number,
        first_chain=number * request.n,
    )
    run.draw_batch(chains, progress_reporter(report, len(chains) / content.plan.steps))
    checkpoint.save()
