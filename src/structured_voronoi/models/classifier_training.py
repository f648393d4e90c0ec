"""Train a classifier on a language model's own tokens, from labelled texts; the language model is frozen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.metrics.classification import classification_report
from structured_voronoi.models.batches import descend
from structured_voronoi.models.classifier_reading import encode_texts, most_probable_labels, network_logits, text_limit
from structured_voronoi.models.classifiers import NETWORKS, ClassifierRecipe, Kind, identity_of, save_classifier
from structured_voronoi.models.corpora import Labelled
from structured_voronoi.models.loading import Loaded
from structured_voronoi.models.training import UNFINISHED, digest
from structured_voronoi.models.unfinished import Unfinished

SHORT, SHORT_F1 = 20, "macro_f1_of_20_tokens"
"""Texts are judged whole and cut to this many tokens, the default length of a sampled text."""


@torch.random.fork_rng()
def train_classifier(
    texts: list[str],
    labels: list[str],
    loaded: Loaded,
    out: Path,
    recipe: ClassifierRecipe,
    tick: Callable[[str, int], None],
    checkpoint: Path | None = None,
    resume: bool = True,
) -> dict[str, Any]:
    """Train, or resume training, into the folder ``out``, with ``tick(note, steps)`` called after each step.

    What is unfinished is kept in ``checkpoint``, or in a folder of ``out``. Returns the report, which is also kept in
    the folder's config.json.
    """
    if recipe.kind not in get_args(Kind):
        raise SamplingError(f"kind {recipe.kind!r} is unknown", remedy=f"choose {' or '.join(get_args(Kind))}")
    check_labels(labels)
    names = sorted(set(labels))
    ids, limit = encode_texts(texts, loaded, recipe), text_limit(loaded, recipe)
    label_indices = np.array([names.index(label) for label in labels])
    train_rows, held_out_rows = split_rows(label_indices, recipe.held_out, recipe.seed)
    table = loaded.model.get_input_embeddings().weight
    torch.manual_seed(recipe.seed)
    scale = 1 / float(table.float().std())
    network = NETWORKS[recipe.kind](table.shape[1], recipe.hidden, len(names), scale).to(table.device).train()
    optimiser = torch.optim.AdamW(network.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    weights = _class_weights(label_indices[train_rows], len(names)).to(table.device)
    source, steps = np.random.default_rng(recipe.seed), recipe.steps(len(ids))
    described = {**asdict(recipe), "model": identity_of(loaded), "texts": digest(Labelled(texts, labels), recipe)}
    with Unfinished(checkpoint or out / UNFINISHED, described, network, optimiser, steps, resume) as unfinished:
        varied_batches = _varied_batches(ids, train_rows, recipe.batch, len(loaded.tokenizer), source)
        tick("", unfinished.step)
        for rows, varied in islice(varied_batches, unfinished.step, steps):
            step = unfinished.step
            optimiser.param_groups[0]["lr"] = recipe.learning_rate * min(1.0, (step + 1) / 50) * (1 - step / steps)
            logits = network_logits(network, recipe.kind, loaded, [row[:limit] for row in varied])
            classes = torch.tensor(label_indices[rows], device=table.device)
            loss = nn.functional.cross_entropy(logits, classes, weight=weights)
            tick(descend(loss, network, optimiser), 1)
            unfinished.advance(0.0)
        report = _judge(network, recipe, names, loaded, ids, label_indices, train_rows, held_out_rows)
        config = {
            "classifier": recipe.kind,
            "labels": names,
            "hidden": recipe.hidden,
            "model": identity_of(loaded),
            "recipe": asdict(recipe),
            "report": report,
        }
        save_classifier(network, config, out)
        unfinished.remove()
    return report


def _judge(
    network: nn.Module,
    recipe: ClassifierRecipe,
    names: list[str],
    loaded: Loaded,
    ids: list[list[int]],
    label_indices: np.ndarray,
    train_rows: np.ndarray,
    held_out_rows: np.ndarray,
) -> dict[str, Any]:
    """How the network does on held-out texts, with its weights rounded as they are saved."""
    network.eval()
    for parameter in network.parameters():
        parameter.data = parameter.data.half().float()

    true_labels = [names[index] for index in label_indices[held_out_rows]]
    whole_report, short_report = (
        classification_report(
            true_labels,
            most_probable_labels(network, recipe.kind, names, loaded, [ids[row][:cut] for row in held_out_rows]),
            names,
        )
        for cut in (None, SHORT)
    )
    return {
        **whole_report,
        SHORT_F1: short_report["macro_f1"],
        "texts": len(train_rows),
        "held_out_texts": len(held_out_rows),
        "parameters": sum(part.numel() for part in network.parameters()),
    }


def check_labels(labels: list[str]) -> None:
    """Refuse labels that no classifier can be trained on."""
    counts = Counter(labels)
    if len(counts) < 2:
        raise SamplingError(
            f"all {len(labels)} texts have the label {labels[0]!r}",
            remedy="a classifier needs two classes or more",
        )
    rare = [label for label, count in counts.items() if count < 2]
    if rare:
        raise SamplingError(
            f"the label {rare[0]!r} has a single text",
            remedy="give it two or more (one is to judge by), or leave it out",
        )


def split_rows(label_indices: np.ndarray, held_out: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and rows held out: the same share of every class, and at least one of each."""
    source = np.random.default_rng([seed, 1])
    train_rows, held_out_rows = [], []
    for index in np.unique(label_indices):
        rows = source.permutation(np.flatnonzero(label_indices == index))
        count = max(1, round(held_out * len(rows)))
        held_out_rows.append(rows[:count])
        train_rows.append(rows[count:])
    return np.concatenate(train_rows), np.concatenate(held_out_rows)


def _class_weights(label_indices: np.ndarray, classes: int) -> Float[Tensor, " label"]:
    """Weights that balance the classes, at most ten times as much as equal weights; their mean over texts is 1."""
    counts = np.bincount(label_indices, minlength=classes)
    weights = np.minimum(len(label_indices) / (classes * np.maximum(counts, 1)), 10.0)
    return torch.tensor(weights / (weights[label_indices].mean()), dtype=torch.float32)


def _varied_batches(
    ids: list[list[int]], rows: np.ndarray, size: int, vocabulary: int, source: np.random.Generator
) -> Iterator[tuple[np.ndarray, list[list[int]]]]:
    """Endless batches: every row once an epoch, in random order, and what is made of its text."""
    while True:
        order = source.permutation(rows)
        for i in range(0, len(order), size):
            yield order[i : i + size], _vary([ids[row] for row in order[i : i + size]], vocabulary, source)


def _vary(rows: list[list[int]], vocabulary: int, source: np.random.Generator) -> list[list[int]]:
    """Texts as samplers meet them: half of the time cut short, half of the time between a few random tokens."""
    if source.random() < 0.5:
        cut = int(source.integers(8, max(9, max(map(len, rows)) + 1)))
        rows = [row[:cut] for row in rows]
    if source.random() < 0.5:
        rows = [_random_tokens(vocabulary, source) + row + _random_tokens(vocabulary, source) for row in rows]
    return rows


def _random_tokens(vocabulary: int, source: np.random.Generator) -> list[int]:
    tokens: list[int] = source.integers(vocabulary, size=source.integers(9)).tolist()
    return tokens
