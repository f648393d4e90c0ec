"""How well predicted labels fit the true ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def classification_report(truth: Sequence[str], predicted: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """Precision, recall, F1 and count of each label, and the mean of their F1, each label weighing the same.

    A share of nothing is 0.
    """
    pairs = list(zip(truth, predicted, strict=True))
    classes = {}
    for label in labels:
        right = sum(true == guess == label for true, guess in pairs)
        count, guesses = sum(true == label for true, _ in pairs), sum(guess == label for _, guess in pairs)
        classes[label] = {
            "precision": _share(right, guesses),
            "recall": _share(right, count),
            "f1": _share(2 * right, count + guesses),
            "count": count,
        }
    return {
        "classes": classes,
        "macro_f1": _share(sum(one["f1"] for one in classes.values()), len(classes)),
        "accuracy": _share(sum(true == guess for true, guess in pairs), len(pairs)),
        "count": len(pairs),
    }


def _share(part: float, whole: int) -> float:
    return part / whole if whole else 0.0
