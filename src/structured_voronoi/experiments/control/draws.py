"""Texts of one method for one target of controlled generation: drawn, kept in a file, and judged.

What is drawn is saved at once: a run that was stopped goes on where it was, and another judge needs no new draws.
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

FUDGE_LEAST = 1e-4
"""Of the 200 most probable tokens FUDGE's predictor is asked about those at least so probable: a BiLSTM is slow."""


class TaskFolders(NamedTuple):
    """Where everything is that a task of controlled generation needs."""

    model: str
    guide: str
    prefix: str
    judge: str
    draws: str


@dataclass(frozen=True)
class MethodSetting:
    """What the grid search varies."""

    weight: float = 1.5
    """γ of the control"""
    step_size: float = 1.0
    """ε of Langevin, MuCoLa and the paper's SVS; η of COLD; α of p-NCG."""
    start: str = "ancestral"


@dataclass(frozen=True)
class DrawTask:
    """Which texts are to be drawn, and how. Chains end after their steps or their seconds, whichever comes first;
    guided ones, as they know how many choices they need, after these."""

    method: str
    target: str
    count: int
    """Texts, one a chain."""
    length: int
    setting: MethodSetting = field(default_factory=MethodSetting)
    seconds: float | None = None
    """Time of one core for all chains together."""
    steps: int | None = None
    seed: int = 0
    pilot: int = 4096
    """Texts that the lookahead of guided sampling learns from; its seconds are not those of the chains."""
    prompt: str = ""
    pilot_prompt: str = ""
    """The prompt after which that lookahead is fitted; it serves after the others too, where its share is measured."""


Draws = dict[str, Any]
"""The texts of a task and what is known of them."""
DrawAll = Callable[[Sequence[DrawTask], str], list[Draws]]
"""(tasks, what to call them) -> the draws of each."""


def draw_all(
    tasks: Sequence[DrawTask], what: str, folders: TaskFolders, progress: bool, workers: int | None
) -> list[Draws]:
    """The draws of every task, side by side."""
    return map_tasks(partial(draw_texts, folders=folders), tasks, what, progress, workers)


def draw_texts(task: DrawTask, folders: TaskFolders) -> Draws:
    """The draws of one task, from their file or drawn now, and what the judge says of them."""
    draws = _kept_draws(task, folders)
    return {**draws, "judged": _judge(Path(folders.judge)).predict(draws["texts"])}


def _kept_draws(task: DrawTask, folders: TaskFolders) -> Draws:
    sampler = _make_sampler(task, folders)
    path = Path(folders.draws) / _file_name(task, sampler)
    if path.exists():
        kept: Draws = json.loads(path.read_text(encoding="utf-8"))
        return kept
    target, weight = _controlled(task, folders, task.prompt), task.setting.weight
    model = target.text
    begun, pilot, share = time.process_time(), 0.0, None
    if task.method == "guided":
        lookahead = _fit_lookahead(replace(task, prompt="", count=0), folders)
        sampler, share = measure_guided(lookahead, target, task.pilot, task.seed)
        task, pilot, begun = replace(task, steps=1, seconds=None), time.process_time() - begun, time.process_time()
    tokens, info, steps = _run(model if task.method == "ancestral" else target, sampler, task)
    seconds = time.process_time() - begun
    (guide,) = target.control_log_probs(tokens).values()
    log_prob = model.log_prob(tokens)
    asked = info.events if task.method == "fudge" else info.evaluations
    draws = {
        "method": task.method,
        "target": task.target,
        **asdict(task.setting),
        "texts": [task.prompt + model.decode(row) for row in tokens],
        "tokens": tokens.tolist(),
        "log_prob": log_prob.tolist(),
        "energy": (-log_prob - weight * guide).tolist(),
        "guide": guide.exp().tolist(),
        "evaluations": float(info.evaluations.double().mean()),
        "control_evaluations": 0.0 if task.method == "ancestral" else float(asked.double().mean()),
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


def _controlled(task: DrawTask, folders: TaskFolders, prompt: str) -> ControlledTarget:
    text = _language_model(folders.model, task.length)
    guide = label(folders.guide, task.target, weight=task.setting.weight)
    return (text.with_prompt(prompt) if prompt else text).under([guide])


@lru_cache(maxsize=1)
def _fit_lookahead(task: DrawTask, folders: TaskFolders) -> Lookahead:
    """Fitted once for all prompts of a task."""
    return Lookahead.fit(_controlled(task, folders, task.pilot_prompt), task.pilot, task.seed)


_judge = cache(load_judge)


def _make_sampler(task: DrawTask, folders: TaskFolders) -> Sampler:
    if task.method == "fudge":
        predictor = partial(PrefixClassifier.load(Path(folders.prefix)).log_prob, label=task.target)
        return Fudge(predictor, task.setting.weight, min_probability=FUDGE_LEAST)
    sampler: Any = text_sampler(task.method)
    changes = {"step_size": task.setting.step_size} if hasattr(sampler, "step_size") else {}
    if task.method == "svs-paper":
        changes["discontinuity_step"] = 0.3  # the paper's for control; 0.4 is that for plain text
    return replace(sampler, **changes) if changes else sampler  # type: ignore[no-any-return]


def _run(target: Target, sampler: Sampler, task: DrawTask) -> tuple[Tensor, Info, int]:
    """All chains of a task, until its steps or its time are spent."""
    start: Start = None if task.setting.start == "ancestral" else "random"
    begun, infos = time.process_time(), []
    chains = start_chains(target, sampler, task.count, task.seed, start, f"{task.method}/{task.target}")
    for _, info in chains:
        infos.append(info)
        late = task.seconds is not None and time.process_time() - begun >= task.seconds
        if is_independent(sampler) or late or len(infos) == task.steps:
            break
    return chains.state.tokens, reduce(merge_infos, infos), len(infos)
