"""The texts of a request on workers: the plans of prompts and batches of texts are tasks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from structured_voronoi.problem.problem import bind
from structured_voronoi.run.generation import Request, make_targets, plan_prompt
from structured_voronoi.run.presets import Plan
from structured_voronoi.run.spread import SpreadCheckpoint, Task, Ticked, check_same, task_checkpoint, tick_to
from structured_voronoi.run.texts import (
    TextRun,
    batches_of_chains,
    batches_of_prompts,
    draw_together,
    name_of_batch,
    name_of_place,
)
from structured_voronoi.run.workers import Report, Work, use_one_core
from structured_voronoi.targets.controlled import Controlled
from structured_voronoi.targets.language_model import LanguageModel


class ToPlan(NamedTuple):
    """How the texts of a prompt are to be drawn has to be found out."""

    prompt: int
    first: Plan
    """That of the first prompt."""


class ToDraw(NamedTuple):
    """Texts of one prompt, each from a chain."""

    prompt: int
    plan: Plan
    chains: range


class ToDrawTogether(NamedTuple):
    """A text from each of these chains, whose prompts are all as long."""

    chains: list[int]


@contextlib.contextmanager
def spread_texts(
    kept: SpreadCheckpoint,
    request: Request,
    targets: Sequence[LanguageModel | Controlled],
    together: Sequence[LanguageModel] | None,
    plan: Plan,
) -> Iterator[None]:
    """Have the texts drawn, those of all prompts ``together`` or by the plan of each, which the first is.

    The checkpoint waits for those that are asked for, and shows how far they all are.
    """
    kept.employ(partial(_prepare, replace(request, checkpoint=None, workers=1, progress=False), kept.target))

    def assign_batches(number: int, plan: Plan) -> None:
        for chains in batches_of_chains(plan, number * request.n, request.n, kept):
            task, place = ToDraw(number, plan, chains), f"{name_of_place(chains[0])}."
            kept.assign(name_of_batch(chains[0]), task, given=place, is_urgent=number > 0)

    def assign_planned(number: int) -> None:
        assign_batches(number, plan_prompt(request, targets[number], kept, number, plan))

    if together is not None:
        for chains in batches_of_prompts(together, request.n, kept.split):
            kept.assign(name_of_batch(chains[0]), ToDrawTogether(chains))
    else:
        assign_batches(0, plan)
        for number in range(1, len(targets)):
            if not kept.assign(f"plan-{number:06}", ToPlan(number, plan), then=partial(assign_planned, number)):
                assign_planned(number)
    with kept.showing(request.n * len(targets), request.progress, "texts"):
        yield


def _prepare(request: Request, fingerprint: dict[str, Any]) -> Work:
    use_one_core()
    targets = make_targets(request)
    check_same(bind(targets[0]), fingerprint)
    return partial(_work, request, targets)


def _work(request: Request, targets: Any, task: Task, report: Report) -> None:
    kept, asked, seed = task_checkpoint(task, report), task.content, request.seed
    if isinstance(asked, ToPlan):
        plan_prompt(request, targets[asked.prompt], kept, asked.prompt, asked.first)
    elif isinstance(asked, ToDraw):
        share = len(asked.chains) / asked.plan.steps  # of a text, a step
        tick = tick_to(report, share)
        TextRun(targets[asked.prompt], asked.plan, seed, request.start, kept).draw_batch(asked.chains, tick)
        kept.save()
    else:
        draw_together(targets, request.n, asked.chains, seed, kept)
        kept.save()
        report(Ticked(note="", steps=len(asked.chains)))
