"""Texts of one method for one target of controlled generation: drawn, saved and judged.

Draws are saved in the cache as soon as they are complete, so that an interrupted run resumes and a new judge needs no
new draws.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache, partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from structured_voronoi.baselines.fudge import Fudge
from structured_voronoi.controls.labels import label
from structured_voronoi.core.contracts import Sampler, Start, Target, is_independent
from structured_voronoi.core.info import Info, merge_infos
from structured_voronoi.engine.sampling import start_chains
from structured_voronoi.experiments.control.guiding import measure_guided
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.models.encoder_judge import load_judge
from structured_voronoi.models.prefix_classifier import PrefixClassifier
from structured_voronoi.samplers.registry import text_sampler
from structured_voronoi.targets.controlled import ControlledTarget
from structured_voronoi.targets.language_model import load
from structured_voronoi.targets.text import TextTarget
from structured_voronoi.workers.parallel import map_tasks


class TaskFolders(NamedTuple):
    """Folders of the models and draws of a task of controlled generation."""

    model: str
    guide: str
    prefix: str
    judge: str
    draws: str


@dataclass(frozen=True)
class MethodSetting:
    """The settings that the grid search varies."""

    weight: float = 1.5
    """Weight γ of the control."""
    step_size: float = 1.0
    """ε of Langevin, MuCoLa and the paper's SVS; η of COLD; α of p-NCG; ignored by other methods."""
    start: str = "ancestral"


@dataclass(frozen=True)
class DrawTask:
    """Which texts to draw, and how. Chains end after ``steps`` or ``seconds``, whichever comes first."""

    method: str
    target: str
    count: int
    """Number of texts, one per chain."""
    length: int
    setting: MethodSetting = field(default_factory=MethodSetting)
    seconds: float | None = None
    """Seconds of one core for all chains together."""
    steps: int | None = None
    seed: int = 0
    pilot: int = 4096
    """Texts on which the lookahead of guided sampling is fitted; the time is reported separately."""
    prompt: str = ""
    pilot_prompt: str = ""
    """Prompt for which the lookahead is fitted; the lookahead is used for all prompts."""


Draws = dict[str, Any]
"""The texts of a task with their scores and costs."""
DrawAll = Callable[[Sequence[DrawTask], str], list[Draws]]
"""(tasks, label of the progress bar) -> the draws of each task."""


def draw_all(
    tasks: Sequence[DrawTask], label: str, folders: TaskFolders, progress: bool, workers: int | None
) -> list[Draws]:
    """The draws of all tasks, computed in parallel."""
    return map_tasks(partial(draw_texts, folders=folders), tasks, label, progress, workers)


def draw_texts(task: DrawTask, folders: TaskFolders) -> Draws:
    """The draws of one task, from the cache if they are there, and the labels by the judge."""
    draws = _cached_draws(task, folders)
    return {**draws, "judged": _judge(Path(folders.judge)).predict(draws["texts"])}


def _cached_draws(task: DrawTask, folders: TaskFolders) -> Draws:
    sampler = _make_sampler(task, folders)
    path = Path(folders.draws) / _file_name(task, sampler)
    if path.exists():
        cached: Draws = json.loads(path.read_text(encoding="utf-8"))
        return cached
    target, weight = _make_target(task, folders, task.prompt), task.setting.weight
    text = target.text
    began, pilot, share = time.process_time(), 0.0, None
    if task.method == "guided":
        lookahead = _fit_lookahead(replace(task, prompt="", count=0), folders)
        sampler, share = measure_guided(lookahead, target, task.pilot, task.seed)
        task, pilot, began = replace(task, steps=1, seconds=None), time.process_time() - began, time.process_time()
    tokens, info, steps = _run(text if task.method == "ancestral" else target, sampler, task)
    seconds = time.process_time() - began
    (guide,) = target.control_log_probs(tokens).values()
    log_prob = text.log_prob(tokens)
    control_evaluations = info.events if task.method == "fudge" else info.evaluations
    draws = {
        "method": task.method,
        "target": task.target,
        **asdict(task.setting),
        "texts": [task.prompt + text.decode(row) for row in tokens],
        "tokens": tokens.tolist(),
        "log_prob": log_prob.tolist(),
        "energy": (-log_prob - weight * guide).tolist(),
        "guide": guide.exp().tolist(),
        "evaluations": float(info.evaluations.double().mean()),
        "control_evaluations": 0.0 if task.method == "ancestral" else float(control_evaluations.double().mean()),
        "steps_taken": steps,
        "seconds_taken": seconds,
        "pilot_seconds": pilot,
        "share": share,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(draws), encoding="utf-8")
    os.replace(unfinished, path)
    return draws


def _file_name(task: DrawTask, sampler: Sampler) -> str:
    settings = asdict(task)
    prompts = [settings.pop(name) for name in ("prompt", "pilot_prompt")]
    key = json.dumps([settings, repr(sampler), *(prompts if task.prompt else [])], sort_keys=True)
    return f"{task.method}-{task.target}-{hashlib.sha256(key.encode()).hexdigest()[:10]}.json"


@cache
def _language_model(folder: str, length: int) -> TextTarget:
    return TextTarget(load(folder), max_tokens=length)


def _make_target(task: DrawTask, folders: TaskFolders, prompt: str) -> ControlledTarget:
    text = _language_model(folders.model, task.length)
    guide = label(folders.guide, task.target, weight=task.setting.weight)
    return (text.with_prompt(prompt) if prompt else text).under([guide])


@lru_cache(maxsize=1)
def _fit_lookahead(task: DrawTask, folders: TaskFolders) -> Lookahead:
    """The lookahead for all prompts of a task."""
    return Lookahead.fit(_make_target(task, folders, task.pilot_prompt), task.pilot, task.seed)


_judge = cache(load_judge)


def _make_sampler(task: DrawTask, folders: TaskFolders) -> Sampler:
    if task.method == "fudge":
        return fudge_sampler(folders.prefix, task.target, task.setting.weight)
    sampler: Any = text_sampler(task.method)
    changes = {"step_size": task.setting.step_size} if hasattr(sampler, "step_size") else {}
    if task.method == "svs-paper":
        changes["discontinuity_step"] = 0.3  # the paper uses 0.3 with controls, 0.4 without
    return replace(sampler, **changes) if changes else sampler  # type: ignore[no-any-return]


def fudge_sampler(prefix: str, target: str, weight: float) -> Fudge:
    """FUDGE with a prefix classifier.

    To save time, the classifier is evaluated only for those of the 200 most probable tokens whose probability is at
    least 1e-4.
    """
    predictor = partial(PrefixClassifier.load(Path(prefix)).log_prob, label=target)
    return Fudge(predictor, weight, min_probability=1e-4)


def _run(target: Target, sampler: Sampler, task: DrawTask) -> tuple[Tensor, Info, int]:
    """Run all chains of a task until its steps or seconds are used up."""
    start: Start = None if task.setting.start == "ancestral" else "random"
    began, infos = time.process_time(), []
    chains = start_chains(target, sampler, task.count, task.seed, start, f"{task.method}/{task.target}")
    for _, info in chains:
        infos.append(info)
        is_late = task.seconds is not None and time.process_time() - began >= task.seconds
        if is_independent(sampler) or is_late or len(infos) == task.steps:
            break
    return chains.state.tokens, reduce(merge_infos, infos), len(infos)
