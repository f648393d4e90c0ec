"""Train a classifier on a frozen language model's tokens, from labelled texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from structured_voronoi.core.validation import check_choice
from structured_voronoi.metrics.classification import classification_report
from structured_voronoi.models.batches import learning_rate
from structured_voronoi.models.classifier_reading import encode_texts, network_logits, text_limit
from structured_voronoi.models.classifiers import NETWORKS, ClassifierSettings, Kind, model_identity, save_classifier
from structured_voronoi.models.corpora import Labelled, digest
from structured_voronoi.models.labels import check_labels, most_probable_labels, number_labels, split_rows
from structured_voronoi.models.loading import Loaded
from structured_voronoi.models.training_run import TrainingCheckpoint, TrainingRun

SHORT_TEXT_TOKENS = 20
"""Classifiers are also evaluated on texts cut to this many tokens, the default length of a sampled text."""
SHORT_TEXT_F1 = f"macro_f1_of_{SHORT_TEXT_TOKENS}_tokens"


@torch.random.fork_rng()
def train_classifier(
    texts: list[str],
    labels: list[str],
    loaded: Loaded,
    out: Path,
    settings: ClassifierSettings,
    tick: Callable[[str, int], None],
    checkpoint: TrainingCheckpoint | None = None,
) -> dict[str, Any]:
    """Train a classifier, or resume its training, and save it.

    Parameters
    ----------
    texts, labels
        The training texts and the label of each.
    loaded
        The language model, which stays frozen.
    out
        Folder for the classifier.
    settings
        Settings of the classifier and of its training.
    tick
        Called as ``tick(note, steps)`` after each step.
    checkpoint
        Where and how often the training is saved.

    Returns
    -------
    dict
        Scores on the held-out texts, whole and cut to `SHORT_TEXT_TOKENS`; they are also in the folder's config.json.

    Raises
    ------
    SamplingError
        If there are too few texts or labels, or a text is empty.
    """
    check_choice(Kind, kind=settings.kind)
    check_labels(labels)
    names, label_indices = number_labels(texts, labels)
    ids, limit = encode_texts(texts, loaded, settings), text_limit(loaded, settings)
    train_rows, held_out_rows = split_rows(label_indices, settings.held_out_share, settings.seed)
    table = loaded.network.get_input_embeddings().weight
    torch.manual_seed(settings.seed)
    scale = 1 / float(table.float().std())
    network = NETWORKS[settings.kind](table.shape[1], settings.hidden, len(names), scale).to(table.device).train()
    optimiser = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, weight_decay=0.01)
    weights = _class_weights(label_indices[train_rows], len(names)).to(table.device)
    rng, steps = np.random.default_rng(settings.seed), settings.steps(len(ids))
    config = {
        "classifier": settings.kind,
        "labels": names,
        "hidden": settings.hidden,
        "model": model_identity(loaded),
        "settings": asdict(settings),
    }
    described = {
        **asdict(settings),
        "model": config["model"],
        "texts": digest(Labelled(texts, labels), settings),
    }
    with TrainingRun(checkpoint or TrainingCheckpoint(), out, described, network, optimiser, steps) as run:
        batches = _augmented_batches(ids, train_rows, settings.batch_size, len(loaded.tokenizer), rng)
        tick("", run.step)
        for rows, augmented in islice(batches, run.step, steps):
            logits = network_logits(network, settings.kind, loaded, [row[:limit] for row in augmented])
            classes = torch.tensor(label_indices[rows], device=table.device)
            loss = nn.functional.cross_entropy(logits, classes, weight=weights)
            rate = learning_rate(settings.learning_rate, run.step, run.step / steps, warmup_steps=50)
            tick(run.advance(loss, rate), 1)
        _round_to_half(network.eval())
        logits_of = partial(network_logits, network, settings.kind, loaded)
        truth = [names[index] for index in label_indices[held_out_rows]]
        whole_report, short_report = (
            classification_report(
                truth, most_probable_labels(logits_of, names, [ids[row][:cut] for row in held_out_rows]), names
            )
            for cut in (None, SHORT_TEXT_TOKENS)
        )
        report = {
            **whole_report,
            SHORT_TEXT_F1: short_report["macro_f1"],
            "texts": len(train_rows),
            "held_out_texts": len(held_out_rows),
            "parameters": sum(parameter.numel() for parameter in network.parameters()),
        }
        save_classifier(network, {**config, "report": report}, out)
        run.remove()
    return report


def _round_to_half(network: nn.Module) -> None:
    """Round the weights to float16, the precision in which they are saved."""
    for parameter in network.parameters():
        parameter.data = parameter.data.half().float()


def _class_weights(label_indices: np.ndarray, classes: int) -> Float[Tensor, " label"]:
    """Weights that balance the labels, at most ten times the equal weights; their mean over the texts is 1."""
    counts = np.bincount(label_indices, minlength=classes)
    weights = np.minimum(len(label_indices) / (classes * np.maximum(counts, 1)), 10.0)
    return torch.tensor(weights / (weights[label_indices].mean()), dtype=torch.float32)


def _augmented_batches(
    ids: list[list[int]], rows: np.ndarray, batch_size: int, vocabulary: int, rng: np.random.Generator
) -> Iterator[tuple[np.ndarray, list[list[int]]]]:
    """Endless batches of row numbers and augmented texts; each epoch contains each row once, in random order."""
    while True:
        order = rng.permutation(rows)
        for i in range(0, len(order), batch_size):
            batch = order[i : i + batch_size]
            yield batch, _augment([ids[row] for row in batch], vocabulary, rng)


def _augment(rows: list[list[int]], vocabulary: int, rng: np.random.Generator) -> list[list[int]]:
    """Texts like those during sampling: half of the batches are cut short, half get random tokens at both ends."""

    def random_tokens() -> list[int]:
        tokens: list[int] = rng.integers(vocabulary, size=rng.integers(9)).tolist()
        return tokens

    if rng.random() < 0.5:
        cut = int(rng.integers(8, max(9, max(map(len, rows)) + 1)))
        rows = [row[:cut] for row in rows]
    if rng.random() < 0.5:
        rows = [random_tokens() + row + random_tokens() for row in rows]
    return rows
