"""Lookaheads are kept in the user's cache folder, under a fingerprint of everything that they depend on.

A function may be another one under its old name, which no fingerprint sees. So each is kept with some of its texts and
what the controls say of them, and is of use as long as they say the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.errors import SamplingError
from structured_voronoi.lookahead.lookahead import Lookahead
from structured_voronoi.lookahead.reading import identify
from structured_voronoi.models.folders import cache_folder
from structured_voronoi.problem.problem import Problem
from structured_voronoi.streams import Rng, in_blocks, widened

FITTING = 8
"""Raised when lookaheads are fitted otherwise, so that old ones are not found."""
MOST_SECONDS = 90.0
"""Seconds that are spent on one: a pilot of a large model has fewer texts."""
TEXTS, COUNT = "texts.json", 8
"""The file of texts that are kept with a lookahead, and how many they are."""


def kept_lookahead(problem: Problem, texts: int, seed: int, progress: bool) -> Lookahead:
    """The lookahead of a target from the cache, or a new one that is put there."""
    folder = kept_folder(problem, texts, seed)
    return find_kept(problem, folder) or fit_to_keep(problem, folder, texts, seed, progress)


def kept_folder(problem: Problem, texts: int, seed: int) -> Path:
    """Where the lookahead of this target is in the cache, if it is there."""
    whole = json.dumps([FITTING, identify(problem), texts, seed], sort_keys=True)
    return cache_folder() / f"lookahead-{hashlib.sha256(whole.encode()).hexdigest()[:16]}"


def find_kept(problem: Problem, folder: Path) -> Lookahead | None:
    """The lookahead that is there, if its texts still score the same; one that is of no use is removed."""
    if not folder.is_dir():
        return None
    try:
        kept = json.loads((folder / TEXTS).read_text(encoding="utf-8"))
        tokens = torch.tensor(kept["tokens"], device=problem.device)
        scored = torch.tensor(kept["scores"], dtype=torch.float64)
        if torch.allclose(_scores(problem, tokens), scored, rtol=1e-3, atol=1e-2, equal_nan=True):
            return Lookahead.load(folder, problem)
    except (SamplingError, OSError, ValueError, KeyError, TypeError, RuntimeError, IndexError):  # damaged, or not ours
        pass
    shutil.rmtree(folder, ignore_errors=True)
    return None


def fit_to_keep(problem: Problem, folder: Path, texts: int, seed: int, progress: bool) -> Lookahead:
    """A new lookahead, which is put there."""
    lookahead = Lookahead.fit(problem, texts=texts, seed=seed, progress=progress, seconds=MOST_SECONDS)
    _put(lookahead, folder, problem)
    return lookahead


def _scores(problem: Problem, tokens: Int[Tensor, "text n"]) -> Float[Tensor, " text"]:
    """log p of each text with everything that weighs on it."""
    return widened(in_blocks(problem.target.log_prob, tokens)).cpu()


def _put(lookahead: Lookahead, folder: Path, problem: Problem) -> None:
    """Written beside and renamed, so that no reader sees half of it; a cache that cannot be written is done without."""
    unfinished = folder.with_suffix(f".{os.getpid()}")
    levels = Rng(0, COUNT, "lookahead texts", problem.device).uniform(problem.length)
    tokens = lookahead.draw(problem, levels).tokens
    scored = {"tokens": tokens.tolist(), "scores": _scores(problem, tokens).tolist()}
    try:
        lookahead.save(unfinished)
        (unfinished / TEXTS).write_text(json.dumps(scored), encoding="utf-8")
        os.replace(unfinished, folder)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
