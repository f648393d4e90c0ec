"""One cell of a table of controlled generation: a method, its setting, a target; drawn, judged, and kept in a file.

A finished cell is saved at once, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structured_voronoi.base import Info, Rng, Sampler, Start, Target, added, is_independent
from structured_voronoi.controls.classifier import Classifier
from structured_voronoi.experiments.text_models import LENGTH
from structured_voronoi.models.judge import Judge
from structured_voronoi.models.prefix_classifier import PrefixClassifier
from structured_voronoi.samplers.choices import text_sampler
from structured_voronoi.samplers.fudge import Fudge
from structured_voronoi.targets.controlled import Controlled
from structured_voronoi.targets.language_model import LanguageModel

FUDGE_LEAST = 1e-4
"""Of the 200 most probable tokens FUDGE's predictor is asked about those at least so probable: a BiLSTM is slow."""


class Task(NamedTuple):
    """Where everything is that a task of controlled generation needs; all are paths of folders."""

    model: str
    guide: str
    prefix: str
    judge: str
    cells: str


@dataclass(frozen=True)
class Cell:
    """What is to be drawn."""

    method: str
    target: str
    count: int
    """Texts, one a chain."""
    weight: float = 1.5
    """γ of the control"""
    step_size: float = 1.0
    """ε of Langevin, MuCoLa and the paper's SVS; α of p-NCG."""
    start: str = "ancestral"
    seconds: float | None = None
    """Chains run for so much time of one core …"""
    steps: int | None = None
    """… or for so many steps."""
    seed: int = 0


def draw_cell(cell: Cell, task: Task) -> dict[str, Any]:
    """The texts of a cell and what is known of them: from its file, or drawn now."""
    sampler = _sampler(cell, task)
    path = Path(task.cells) / _file(cell, sampler)
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    model = _language_model(task.model)
    target = Controlled(model, {Classifier.load(task.guide, cell.target): cell.weight})
    begun = time.process_time()
    tokens, info, steps = _run(model if cell.method == "ancestral" else target, sampler, cell)
    seconds = time.process_time() - begun
    texts = [model.decode(row) for row in tokens]
    (guide,) = target.control_log_probs(tokens).values()
    log_prob = model.log_prob(tokens)
    found = {
        **asdict(cell),
        "texts": texts,
        "tokens": tokens.tolist(),
        "log_prob": log_prob.tolist(),
        "energy": (-log_prob - cell.weight * guide).tolist(),
        "guide": guide.exp().tolist(),
        "judged": Judge.load(Path(task.judge)).predict(texts),
        "evaluations": float(info.evaluations.double().mean()),
        "control_evaluations": float((info.events if cell.method == "fudge" else info.evaluations).double().mean())
        * (cell.method != "ancestral"),
        "steps_taken": steps,
        "seconds_taken": seconds,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(found), encoding="utf-8")
    os.replace(unfinished, path)
    return found


def _file(cell: Cell, sampler: Sampler) -> str:
    whole = json.dumps([asdict(cell), LENGTH, repr(sampler)], sort_keys=True)
    return f"{cell.method}-{cell.target}-{hashlib.sha256(whole.encode()).hexdigest()[:10]}.json"


@cache
def _language_model(folder: str) -> LanguageModel:
    return LanguageModel.load(folder, length=LENGTH)


def _sampler(cell: Cell, task: Task) -> Sampler:
    if cell.method == "fudge":
        predictor = partial(PrefixClassifier.load(Path(task.prefix)).log_prob, label=cell.target)
        return Fudge(predictor, cell.weight, least=FUDGE_LEAST)
    sampler: Any = text_sampler(cell.method)
    settings = {"step_size": cell.step_size} if hasattr(sampler, "step_size") else {}
    if cell.method == "svs-paper":
        settings["discontinuity_step"] = 0.3  # the paper's for control; 0.4 is that for plain text
    return replace(sampler, **settings) if settings else sampler  # type: ignore[no-any-return]


def _run(target: Target, sampler: Sampler, cell: Cell) -> tuple[Tensor, Info, int]:
    """All chains of a cell, until its steps or its time are spent."""
    rng = Rng(cell.seed, cell.count, f"{cell.method}/{cell.target}", target.embeddings.device)
    start: Start = None if cell.start == "ancestral" else "random"
    begun = time.process_time()
    state, total, count = sampler.init(target, rng, start), None, 0
    while True:
        state, info = sampler.step(target, rng, state)
        total, count = info if total is None else added(total, info), count + 1
        late = cell.seconds is not None and time.process_time() - begun >= cell.seconds
        if is_independent(sampler) or late or count == cell.steps:
            return torch.as_tensor(state.tokens), total, count
