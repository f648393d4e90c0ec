"""The chains of `sample` on workers, a group of them each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from structured_voronoi.core.contracts import Sampler, Start, Target
from structured_voronoi.core.streams import Rng
from structured_voronoi.engine.sampling import Recorder, advance
from structured_voronoi.engine.worker_checkpoint import SpreadCheckpoint, Task, check_same, task_checkpoint, tick_to
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.workers.pool import Report, Work, use_one_core


@dataclass(frozen=True)
class Job:
    """What all groups have in common."""

    target: Target
    fingerprint: dict[str, Any]
    sampler: Sampler
    seed: int
    draws: int
    warmup: int
    thin: int
    keep_warmup: bool


def spread_chains(
    kept: SpreadCheckpoint,
    sampler: Sampler,
    problem: Problem,
    rng: Rng,
    start: Start,
    recorder: Recorder,
    progress: bool,
) -> bool:
    """Record the draws of all chains; those that every chain has, where the run is interrupted. Was it?"""
    shape = (recorder.draws, recorder.warmup, recorder.thin, recorder.warm > 0)
    job = Job(problem.target, kept.target, sampler, rng.seed, *shape)
    kept.employ(partial(_prepare, job))
    groups = split_chains(len(rng), kept.split)
    for folder, numbers in groups.items():
        own_start = start[list(numbers)] if isinstance(start, Tensor) else start
        kept.assign("counted", (numbers, own_start), folder=folder, given="")
    interrupted = False
    steps = recorder.all_steps * len(groups)
    with kept.showing(steps, progress, "sampling"):
        try:
            while kept.wait():
                pass
        except KeyboardInterrupt:
            interrupted = True
    if not interrupted and not kept.is_finished:
        kept.reach(steps, steps, "steps")
        kept.save()
    _gather(kept, list(groups), recorder)
    return interrupted


def split_chains(chains: int, parts: int) -> dict[str, range]:
    """Chains in so many groups, as equal as can be, by the folders in which they are kept."""
    parts = min(chains, parts)
    ends = [chains * i // parts for i in range(parts + 1)]
    return {f"group-{i:06}/": range(ends[i], ends[i + 1]) for i in range(parts)}


def _prepare(job: Job) -> Work:
    use_one_core()
    problem = bind(job.target)
    check_same(problem, job.fingerprint)
    return partial(_sample_group, job, problem)


def _sample_group(job: Job, problem: Problem, task: Task, report: Report) -> None:
    numbers, start = task.content
    recorder, tick = Recorder(job.draws, job.warmup, job.thin, job.keep_warmup), tick_to(report)
    rng, kept = Rng(job.seed, numbers, device=problem.device), task_checkpoint(task, report)
    for info in advance(job.sampler, problem, rng, start, recorder, kept):
        tick(f"energy {float(info.energy.mean()):.2f}")


def _gather(kept: SpreadCheckpoint, folders: list[str], recorder: Recorder) -> None:
    """The draws that all groups have."""
    groups = []
    for folder in folders:
        parts = [kept.get(name) for name in kept.names(f"{folder}draws-")]
        recorder.warmup_cost += _counted(kept, folder).get("warmup_cost", 0)
        if not parts:
            return
        groups.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    common = min(len(group["tokens"]) for group in groups)
    recorder.append({name: torch.cat([group[name][:common] for group in groups], dim=1) for name in groups[0]})


def _counted(kept: SpreadCheckpoint, folder: str) -> dict[str, Any]:
    """What a group has counted when it was done, or when it last said so."""
    if kept.names(f"{folder}counted"):
        counted: dict[str, Any] = kept.get(f"{folder}counted")
        return counted
    *_, last = [None, *kept.names(f"{folder}chains.")]
    return {} if last is None else dict(kept.get(last)[2])
