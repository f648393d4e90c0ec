"""The chains of `sample` on workers: each task is a group of chains."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from structured_voronoi.core.contracts import Chains, Sampler, Start, Target
from structured_voronoi.core.streams import Rng
from structured_voronoi.engine.chains import advance_chains
from structured_voronoi.engine.recorder import COUNTS, DRAWS, Recorder
from structured_voronoi.engine.worker_checkpoint import WorkerCheckpoint
from structured_voronoi.engine.worker_tasks import Task, check_same_target, progress_reporter
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.workers.messages import Report, Work, use_one_thread


@dataclass(frozen=True)
class ChainJob:
    """What all groups of chains have in common."""

    target: Target
    fingerprint: dict[str, Any]
    sampler: Sampler
    seed: int
    draws: int
    warmup: int
    thin: int
    keep_warmup: bool


def distribute_chains(
    checkpoint: WorkerCheckpoint,
    sampler: Sampler,
    problem: Problem,
    rng: Rng,
    start: Start,
    recorder: Recorder,
    progress: bool,
) -> bool:
    """Record the draws of all chains; after Ctrl-C, as many as every chain has. Returns True if interrupted."""
    counts = (recorder.draws, recorder.warmup, recorder.thin, recorder.warmup_rows > 0)
    job = ChainJob(problem.target, checkpoint.settings["target"], sampler, rng.seed, *counts)
    checkpoint.start_workers(partial(_prepare, job))
    groups = split_chains(len(rng), checkpoint.split)
    for folder, numbers in groups.items():
        group_start = start[list(numbers)] if isinstance(start, Tensor) else start
        checkpoint.submit(COUNTS, (numbers, group_start), folder=folder, given="")
    steps = recorder.all_steps * len(groups)
    interrupted = False
    with checkpoint.worker_progress(steps, progress, "sampling"):
        try:
            while checkpoint.wait():
                pass
        except KeyboardInterrupt:
            interrupted = True
    if not interrupted:
        checkpoint.record_progress(steps, steps, "steps")
        checkpoint.save()
    _join_groups(checkpoint, list(groups), recorder)
    return interrupted


def split_chains(chains: int, parts: int) -> dict[str, range]:
    """Split chains into groups of nearly equal size, by the folders in which they are saved."""
    parts = min(chains, parts)
    ends = [chains * i // parts for i in range(parts + 1)]
    return {f"group-{i:06}/": range(ends[i], ends[i + 1]) for i in range(parts)}


def _prepare(job: ChainJob) -> Work:
    use_one_thread()
    problem = bind(job.target)
    check_same_target(problem, job.fingerprint)
    return partial(_sample_group, job, problem)


def _sample_group(job: ChainJob, problem: Problem, task: Task, report: Report) -> None:
    numbers, start = task.content
    recorder = Recorder(job.draws, job.warmup, job.thin, job.keep_warmup)
    chains = Chains(job.sampler, problem, Rng(job.seed, numbers, device=problem.device), start)
    tick = progress_reporter(report)
    for _, info in advance_chains(chains, recorder, recorder.all_steps, task.checkpoint(report)):
        tick(f"log p {-float(info.energy.mean()):.2f}")


def _join_groups(checkpoint: WorkerCheckpoint, folders: list[str], recorder: Recorder) -> None:
    """Record the draws that all groups have."""
    groups = []
    for folder in folders:
        parts = [checkpoint.get(name) for name in checkpoint.names(f"{folder}{DRAWS}")]
        recorder.warmup_cost += _saved_counts(checkpoint, folder).get("warmup_cost", 0)
        if not parts:
            return
        groups.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    common = min(len(group["tokens"]) for group in groups)
    recorder.append({name: torch.cat([group[name][:common] for group in groups], dim=1) for name in groups[0]})


def _saved_counts(checkpoint: WorkerCheckpoint, folder: str) -> dict[str, Any]:
    """The counts of a group when it was finished, or last saved."""
    if checkpoint.names(f"{folder}{COUNTS}"):
        counts: dict[str, Any] = checkpoint.get(f"{folder}{COUNTS}")
        return counts
    positions = checkpoint.names(f"{folder}chains.")
    return dict(checkpoint.get(positions[-1])[2]) if positions else {}
