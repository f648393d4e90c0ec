"""Quality of predicted labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def classification_report(truth: Sequence[str], predicted: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """Return precision, recall, F1 and count of each label, the macro-F1 and the accuracy.

    Parameters
    ----------
    truth, predicted
        True and predicted label of each text.
    labels
        Labels to report.

    Returns
    -------
    dict
        Keys ``classes``, ``macro_f1``, ``accuracy`` and ``count``; ratios with denominator 0 are 0.

    Examples
    --------
    >>> classification_report(["a", "b"], ["a", "a"], ["a", "b"])["classes"]["a"]
    {'precision': 0.5, 'recall': 1.0, 'f1': 0.6666666666666666, 'count': 1}
    """
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
