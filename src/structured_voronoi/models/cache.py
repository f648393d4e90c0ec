"""Models that experiments train, in the cache folder, each named after the digest of its settings and texts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from structured_voronoi.models.corpora import Corpus, Labelled, digest
from structured_voronoi.models.encoder_judge import EncoderJudge, EncoderSettings
from structured_voronoi.models.folders import cache_folder
from structured_voronoi.models.training import REPORT_FILE, TrainingSettings, train_language_model


def cached_language_model(
    name: str, corpus: Corpus, settings: TrainingSettings, tick: Callable[[str, int], None]
) -> Path:
    """The folder of a language model trained on these texts; it is trained, or its training resumed, if needed."""
    folder = cache_folder() / f"lm-{name}-{digest(corpus, settings)}"
    if not (folder / REPORT_FILE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        train_language_model(corpus, folder, settings, tick)
    return folder


def cached_judge(name: str, labelled: Labelled, settings: EncoderSettings, tick: Callable[[str, int], None]) -> Path:
    """The folder of an encoder fine-tuned on these texts; it is trained if needed."""
    folder = cache_folder() / f"judge-{name}-{digest(labelled, settings)}"
    if not folder.is_dir():
        temporary = folder.with_name(f".{folder.name}-{os.getpid()}")
        EncoderJudge.train(labelled.texts, labelled.labels, settings, tick).save(temporary)
        try:
            os.rename(temporary, folder)
        except OSError:  # another process was faster
            shutil.rmtree(temporary)
    return folder
