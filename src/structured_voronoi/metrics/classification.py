"""How well predicted labels fit the true ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def classification_report(truth: Sequence[str], predicted: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """Precision, recall, F1 and count of each label, their macro-F1, and the accuracy; 0 where a denominator is 0."""
    pairs = list(zip(truth, predicted, strict=True))
    classes = {}
    for label in labels:
        correct = sum(true == guess == label for true, guess in pairs)
        count, guesses = sum(true == label for true, _ in pairs), sum(guess == label for _, guess in pairs)
        classes[label] = {
            "precision": _ratio(correct, guesses),
            "recall": _ratio(correct, count),
            "f1": _ratio(2 * correct, count + guesses),
            "count": count,
        }
    return {
        "classes": classes,
        "macro_f1": _ratio(sum(scores["f1"] for scores in classes.values()), len(classes)),
        "accuracy": _ratio(sum(true == guess for true, guess in pairs), len(pairs)),
        "count": len(pairs),
    }


def _ratio(part: float, total: int) -> float:
    return part / total if total else 0.0
