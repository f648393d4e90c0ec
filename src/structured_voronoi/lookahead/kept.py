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
from structured_voronoi.lookahead.lookahead import Lookahead, identify
from structured_voronoi.models.folders import cache_folder
from structured_voronoi.problem.problem import Problem
from structured_voronoi.streams import Rng, in_blocks, widened

FITTING = 5
"""Raised when lookaheads are fitted otherwise, so that old ones are not found."""
LONGEST = 90.0
"""Seconds that are spent on one: a pilot of a large model has fewer texts."""
EXAMPLES, COUNT = "texts.json", 8
"""The file of texts that are kept with a lookahead, and how many they are."""


def kept_lookahead(problem: Problem, texts: int, seed: int, progress: bool) -> Lookahead:
    """The lookahead of a target from the cache, or a new one that is put there; a damaged one is made anew."""
    folder = kept_folder(problem, texts, seed)
    if is_kept(problem, folder):
        try:
            return Lookahead.load(folder, problem)
        except SamplingError:
            shutil.rmtree(folder, ignore_errors=True)
    lookahead = Lookahead.fit(problem, texts=texts, seed=seed, progress=progress, seconds=LONGEST)
    _put(lookahead, folder, problem)
    return lookahead


def kept_folder(problem: Problem, texts: int, seed: int) -> Path:
    """Where the lookahead of this target is in the cache, if it is there."""
    whole = json.dumps([FITTING, identify(problem), texts, seed], sort_keys=True)
    return cache_folder() / f"lookahead-{hashlib.sha256(whole.encode()).hexdigest()[:16]}"


def is_kept(problem: Problem, folder: Path) -> bool:
    """Is a lookahead there, and do its texts still score the same? One of which they do not is removed."""
    if not folder.is_dir():
        return False
    try:
        kept = json.loads((folder / EXAMPLES).read_text(encoding="utf-8"))
        tokens = torch.tensor(kept["tokens"], device=problem.device)
        scored = torch.tensor(kept["scores"], dtype=torch.float64)
        if torch.allclose(_scores(problem, tokens), scored, rtol=1e-3, atol=1e-2, equal_nan=True):
            return True
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, IndexError):  # damaged, or of another shape
        pass
    shutil.rmtree(folder, ignore_errors=True)
    return False


def _scores(problem: Problem, tokens: Int[Tensor, "text n"]) -> Float[Tensor, " text"]:
    """log p of each text with everything that weighs on it."""
    return widened(in_blocks(problem.target.log_prob, tokens)).cpu()


def _put(lookahead: Lookahead, folder: Path, problem: Problem) -> None:
    """Written beside and renamed, so that no reader sees half of it; a cache that cannot be written is done without."""
    unfinished = folder.with_suffix(f".{os.getpid()}")
    levels = Rng(0, COUNT, "lookahead texts", problem.device).uniform(problem.length)
    tokens = lookahead.draw(problem, levels).tokens
    examples = {"tokens": tokens.tolist(), "scores": _scores(problem, tokens).tolist()}
    try:
        lookahead.save(unfinished)
        (unfinished / EXAMPLES).write_text(json.dumps(examples), encoding="utf-8")
        os.replace(unfinished, folder)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
