"""A Python function of the text as a control."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import Pattern
from structured_voronoi.core.errors import SamplingError, did_you_mean
from structured_voronoi.core.user_code import user_code

Kind = Literal["auto", "probability", "log_score"]


@dataclass(frozen=True, eq=False)
class Predicate:
    """A function of the text: True or False, a probability, or a log-score.

    Plain functions in a list of controls become predicates. NaN counts as impossible.

    Parameters
    ----------
    function
        Takes the text, returns a value.
    name
        The key of the control in results; the function's name by default.
    kind
        ``"probability"``: values in [0, 1]. ``"log_score"``: values are added to the log-probability. ``"auto"``: True,
        False or probabilities.
    bound
        The largest possible log-score; infinite by default, with which rejection is not possible.
    pattern
        The regular expression that the function looks for, if that is all it does: a lookahead compiles it.
    weight
        The exponent of the control.

    Examples
    --------
    >>> short = Predicate(lambda text: len(text) < 80, name="short")
    >>> (~short).name
    'not short'
    """

    function: Callable[[str], Any]
    name: str = ""
    kind: Kind = "auto"
    bound: float = math.nan
    pattern: Pattern | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise SamplingError(f"a predicate needs a function of the text, not {self.function!r}", remedy="give one")
        if self.kind not in get_args(Kind):
            raise SamplingError(
                f"kind = {self.kind!r} is unknown",
                remedy=did_you_mean(str(self.kind), get_args(Kind)),
            )
        if not self.name:
            function_name = getattr(self.function, "__name__", type(self.function).__name__)
            object.__setattr__(self, "name", "predicate" if function_name == "<lambda>" else function_name)
        if math.isnan(self.bound):
            object.__setattr__(self, "bound", math.inf if self.kind == "log_score" else 0.0)

    def __invert__(self) -> Predicate:
        if self.kind == "log_score":
            raise SamplingError(
                f"{self.name} gives log-scores, which have no opposite",
                remedy="negate the function itself",
            )
        pattern = None if self.pattern is None else replace(self.pattern, negated=not self.pattern.negated)
        return Predicate(
            self._opposite,
            f"not {self.name}",
            "probability",
            pattern=pattern,
            weight=self.weight,
        )

    def _opposite(self, text: str) -> float:
        return 1.0 - self.value(text)

    def log_prob(self, tokens: Int[Tensor, "chain n"], texts: list[str]) -> Float[Tensor, " chain"]:
        return torch.tensor([self._score(text) for text in texts], dtype=torch.float64, device=tokens.device)

    def _score(self, text: str) -> float:
        value = self.value(text)
        if math.isnan(value):
            return -math.inf
        if self.kind == "log_score":
            return value if value < math.inf else -math.inf
        return math.log(value) if value > 0 else -math.inf

    def value(self, text: str) -> float:
        """The value of a text: a probability, a log-score or NaN."""
        remedy = "make the function answer for every text"
        with user_code(f"the control {self.name}", remedy, what=f"failed on the text {text!r}"):
            answer = self.function(text)
            if hasattr(answer, "item"):
                answer = answer.item()  # a number of numpy's or torch's
            if not isinstance(answer, (bool, numbers.Real)):
                raise SamplingError(
                    f"the control {self.name} gave {repr(answer)[:80]} for the text {text!r}",
                    remedy="return True, False or a number",
                )
            value = float(answer)
        if self.kind == "log_score":
            if isinstance(answer, bool):
                value = 0.0 if answer else -math.inf
            if value > self.bound:
                raise SamplingError(
                    f"the control {self.name} gave {value} for the text {text!r}, above its bound of {self.bound}",
                    remedy="raise the bound",
                )
        elif not (0 <= value <= 1 or math.isnan(value)):
            remedy = "" if self.kind == "probability" else ", or say kind='log_score' if it is one"
            raise SamplingError(
                f"the control {self.name} gave {value} for the text {text!r}, which is no probability",
                remedy=f"return a number from 0 to 1{remedy}",
            )
        return value
