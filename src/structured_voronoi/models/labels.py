"""Labels of training texts: numbering, checks, held-out texts, and the most probable labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structured_voronoi.core.errors import SamplingError


def number_labels(texts: Sequence[Any], labels: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """The distinct labels, sorted, and the index of each text's label.

    Raises
    ------
    SamplingError
        If there is not one label for each text, or fewer than two distinct labels.
    """
    names = sorted(set(labels))
    if len(texts) != len(labels):
        raise SamplingError(f"{len(texts)} texts have {len(labels)} labels", remedy="give one label for each text")
    if len(names) < 2:
        raise SamplingError(
            f"the {len(texts)} texts have {len(names)} distinct labels", remedy="a classifier needs two or more"
        )
    return names, np.array([names.index(label) for label in labels])


def check_labels(labels: Sequence[str]) -> None:
    """Raise an error unless there are two labels or more, each with two texts or more."""
    counts = Counter(labels)
    if len(counts) < 2:
        raise SamplingError(
            f"all {len(labels)} texts have the label {labels[0]!r}", remedy="a classifier needs two labels or more"
        )
    rare = [label for label, count in counts.items() if count < 2]
    if rare:
        raise SamplingError(
            f"the label {rare[0]!r} has a single text",
            remedy="add a second text, which evaluation needs, or leave the label out",
        )


def split_rows(label_indices: np.ndarray, held_out_share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows for training and held-out rows: the same share of every label, and at least one of each."""
    rng = np.random.default_rng([seed, 1])
    train_rows, held_out_rows = [], []
    for index in np.unique(label_indices):
        rows = rng.permutation(np.flatnonzero(label_indices == index))
        count = max(1, round(held_out_share * len(rows)))
        held_out_rows.append(rows[:count])
        train_rows.append(rows[count:])
    return np.concatenate(train_rows), np.concatenate(held_out_rows)


@torch.no_grad()
def most_probable_labels(
    logits: Callable[[list[list[int]]], Tensor], labels: list[str], rows: list[list[int]], batch_size: int = 64
) -> list[str]:
    """The label with the largest logit for each row of tokens."""
    batches = [rows[begin : begin + batch_size] for begin in range(0, len(rows), batch_size)]
    return [labels[index] for batch in batches for index in logits(batch).argmax(-1).tolist()]
