"""Texts that were drawn: their data, and how rows of tokens are made into them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.core.streams import widened
from structured_voronoi.targets.controlled import Controlled
from structured_voronoi.targets.language_model import LanguageModel

Ended = Literal["end", "stop", "no"]
"""How a text ends: with the end-of-text token, with a stop string, or not at all."""


class Text(NamedTuple):
    """One draw, as it is written to a JSONL file."""

    chain: int
    draw: int
    prompt: str
    text: str
    tokens: list[int]
    """With its end and without padding."""
    ended: Ended
    log_prob: float
    """log p under the language model alone."""
    energy: float
    """U(m) of the target, with suffix, end and controls."""
    controls: dict[str, float]
    """p(t | m) of every control, by name."""
    log_weight: float | None = None
    """log of the importance weight, where weighted texts were asked for."""

    def line(self) -> dict[str, Any]:
        """The keys and values of its JSONL line: one key a control, at the end. What is no finite number is null."""
        parts = {**self._asdict(), **self.controls}
        del parts["controls"]
        if self.log_weight is None:
            del parts["log_weight"]
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in parts.items()
        }


def make_texts(
    target: LanguageModel | Controlled,
    numbers: Sequence[int],
    tokens: Tensor,
    log_prob: Float[Tensor, " text"],
    log_target: Float[Tensor, " text"],
) -> list[Text]:
    """Rows of tokens as texts, with the scores of every control."""
    language_model = target.model if isinstance(target, Controlled) else target
    scores = target.control_log_probs(tokens) if isinstance(target, Controlled) else {}
    columns = {control.name: widened(score).exp().tolist() for control, score in scores.items()}
    lengths = language_model.text_lengths(tokens).tolist()
    return [
        Text(
            chain=number,
            draw=0,
            prompt=language_model.prompt,
            text=target.decode(row),
            tokens=row[: lengths[i]].tolist(),
            ended=_how_it_ended(language_model, row[: lengths[i]]),
            log_prob=float(log_prob[i]),
            energy=-float(log_target[i]),
            controls={name: values[i] for name, values in columns.items()},
        )
        for i, (number, row) in enumerate(zip(numbers, tokens, strict=True))
    ]


def _how_it_ended(model: LanguageModel, tokens: Int[Tensor, " n"]) -> Ended:
    if model.ends == "never":
        return "no"
    return "end" if model.ending is None or int(tokens[-1]) in model.ending.tokens else "stop"
