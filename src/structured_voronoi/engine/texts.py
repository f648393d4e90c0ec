"""Texts that were drawn, and how rows of tokens become texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from structured_voronoi.core.streams import widened
from structured_voronoi.targets.controlled import ControlledTarget
from structured_voronoi.targets.text import TextTarget

FinishReason = Literal["stop", "length"]
"""A text ends by itself, with the end-of-text token or a stop string, or is cut at the maximum number of tokens."""


@dataclass(frozen=True)
class Text:
    """A text that was drawn. ``str(text)`` is the text itself, without the prompt.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> text = next(sv.stream("bundled", "Near the", n=1, max_tokens=8, seed=0))
    >>> text.prompt, text.index, str(text) == text.text
    ('Near the', 0, True)
    """

    prompt: str
    index: int
    """Number of the text among those of its prompt."""
    text: str
    tokens: list[int]
    """With the end and without padding."""
    finish_reason: FinishReason
    log_prob: float
    """log p of the language model, without controls."""
    log_target: float
    """log p of the target, with suffix and controls, not normalised."""
    controls: dict[str, float] = field(default_factory=dict)
    """Probability that each control gives to the text, by name; for hard controls 1."""
    log_weight: float | None = None
    """log of the importance weight, of weighted texts."""
    prompt_number: int = 0
    """Position of the prompt in the list of prompts."""

    def __str__(self) -> str:
        return self.text

    def line(self) -> dict[str, Any]:
        """The keys and values of its line in a JSONL file; numbers that are not finite are None."""
        parts = {name: value for name, value in vars(self).items() if name not in ("controls", "prompt_number")}
        if self.log_weight is None:
            del parts["log_weight"]
        parts |= self.controls
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in parts.items()
        }


LINE_KEYS = tuple(one.name for one in fields(Text) if one.name not in ("controls", "prompt_number"))
"""Keys of a line besides the names of controls."""


def make_texts(
    target: TextTarget | ControlledTarget,
    indices: Sequence[int],
    tokens: Tensor,
    log_prob: Float[Tensor, " text"],
    log_target: Float[Tensor, " text"],
    prompt_number: int = 0,
) -> list[Text]:
    """Rows of tokens as texts, with the scores of every control."""
    text_target = target.text if isinstance(target, ControlledTarget) else target
    scores = target.control_log_probs(tokens) if isinstance(target, ControlledTarget) else {}
    columns = {name: widened(score).exp().tolist() for name, score in scores.items()}
    lengths, complete = text_target.text_lengths(tokens).tolist(), text_target.is_complete(tokens).tolist()
    return [
        Text(
            prompt=text_target.prompt,
            index=index,
            text=target.decode(row),
            tokens=row[: lengths[i]].tolist(),
            finish_reason="stop" if complete[i] else "length",
            log_prob=float(log_prob[i]),
            log_target=float(log_target[i]),
            controls={name: values[i] for name, values in columns.items()},
            prompt_number=prompt_number,
        )
        for i, (index, row) in enumerate(zip(indices, tokens, strict=True))
    ]
