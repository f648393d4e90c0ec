"""Models trained for an experiment are kept in the user's cache folder, under the digest of their recipe and texts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from structured_voronoi.models.corpora import Corpus, Labelled
from structured_voronoi.models.encoder_judge import EncoderJudge, EncoderRecipe
from structured_voronoi.models.folders import cache_folder
from structured_voronoi.models.training import REPORT, Recipe, digest, train_language_model


def cached_language_model(name: str, corpus: Corpus, recipe: Recipe, tick: Callable[[str, int], None]) -> Path:
    """The folder of a language model trained on the texts; trained, or its training resumed, if not in the cache."""
    folder = cache_folder() / f"lm-{name}-{digest(corpus, recipe)}"
    if not (folder / REPORT).exists():
        folder.mkdir(parents=True, exist_ok=True)
        train_language_model(corpus, folder, recipe, tick)
    return folder


def cached_judge(name: str, labelled: Labelled, recipe: EncoderRecipe, tick: Callable[[str, int], None]) -> Path:
    """The folder of an encoder fine-tuned on the texts; trained if not in the cache."""
    folder = cache_folder() / f"judge-{name}-{digest(labelled, recipe)}"
    if not folder.is_dir():
        unfinished = folder.with_name(f".{folder.name}-{os.getpid()}")
        EncoderJudge.train(labelled.texts, labelled.labels, recipe, tick).save(unfinished)
        try:
            os.rename(unfinished, folder)
        except OSError:  # somebody else was faster
            shutil.rmtree(unfinished)
    return folder
