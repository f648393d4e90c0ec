"""Lookaheads are kept in the user's cache folder, under a fingerprint of everything that they depend on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from structured_voronoi.errors import SamplingError
from structured_voronoi.lookahead.lookahead import Lookahead, identify
from structured_voronoi.models.folders import cache_folder
from structured_voronoi.problem.problem import Problem

FITTING = 5
"""Raised when lookaheads are fitted otherwise, so that old ones are not found."""


LONGEST = 90.0
"""Seconds that are spent on one: a pilot of a large model has fewer texts."""


def kept_lookahead(problem: Problem, texts: int, seed: int, progress: bool) -> Lookahead:
    """The lookahead of a target from the cache, or a new one that is put there; a damaged one is made anew."""
    folder = kept_folder(problem, texts, seed)
    if folder.is_dir():
        try:
            return Lookahead.load(folder, problem)
        except SamplingError:
            shutil.rmtree(folder, ignore_errors=True)
    lookahead = Lookahead.fit(problem, texts=texts, seed=seed, progress=progress, seconds=LONGEST)
    _put(lookahead, folder)
    return lookahead


def kept_folder(problem: Problem, texts: int, seed: int) -> Path:
    """Where the lookahead of this target is in the cache, if it is there."""
    whole = json.dumps([FITTING, identify(problem), texts, seed], sort_keys=True)
    return cache_folder() / f"lookahead-{hashlib.sha256(whole.encode()).hexdigest()[:16]}"


def _put(lookahead: Lookahead, folder: Path) -> None:
    """Written beside and renamed, so that no reader sees half of it; a cache that cannot be written is done without."""
    unfinished = folder.with_suffix(f".{os.getpid()}")
    try:
        lookahead.save(unfinished)
        os.replace(unfinished, folder)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
