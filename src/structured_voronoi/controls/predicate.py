"""Any Python function of the text as a control; keywords and regular expressions are two such functions."""

from __future__ import annotations

import math
import numbers
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import Pattern
from structured_voronoi.core.errors import SamplingError, did_you_mean, one_line
from structured_voronoi.core.user_code import user_code

Kind = Literal["auto", "probability", "log_score"]


@dataclass(frozen=True, eq=False)
class Predicate:
    """A function of the text: True or False, a probability, or a log-score.

    ``kind`` says how to read a number: a ``probability`` in [0, 1], or a ``log_score``, which is added to log p(m) as
    it is. ``auto`` takes True, False and probabilities. NaN counts as impossible. ``bound`` is
    the largest possible log-score; without it rejection sampling is not possible.

    >>> short = Predicate(lambda text: len(text) < 80, name="short")
    >>> (~short).name
    'not short'
    """

    function: Callable[[str], Any]
    name: str = ""
    kind: Kind = "auto"
    bound: float = math.nan
    pattern: Pattern | None = None
    """What the function looks for, if that is a regular expression: a lookahead compiles it."""

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

    @classmethod
    def keyword(cls, words: str) -> Predicate:
        """Does the text hold this word or phrase, case-insensitive?"""
        parts = [re.escape(part) for part in words.split()]
        if not parts:
            raise SamplingError(
                f"the keyword {words!r} is empty",
                remedy="give a word or a phrase, for example keyword=river",
            )
        pattern = Pattern(r"(?<!\w)" + r"\s+".join(parts) + r"(?!\w)", ignore_case=True)
        return cls._matching(pattern, f"keyword={words}")

    @classmethod
    def regex(cls, pattern: str, whole: bool = False) -> Predicate:
        """Does the regular expression match somewhere in the text, or the ``whole`` of it?

        One that `re` could take for ever to match is matched by an automaton, which says the same.
        """
        from structured_voronoi.automata.expressions import CannotCompile, CharacterAutomaton, may_take_for_ever

        if not pattern:
            raise SamplingError(
                "the regular expression is empty, so every text matches",
                remedy="give one, for example regex=^The",
            )
        wanted, name = Pattern(pattern, whole=whole), f"regex={pattern}"
        try:
            matching = cls._matching(wanted, name)
            if not may_take_for_ever(wanted):
                return matching
            return cls(CharacterAutomaton(wanted).matches, name, pattern=wanted)
        except RecursionError as error:
            raise SamplingError(
                f"{shortened(pattern)} is nested too deeply", remedy="write it with fewer groups"
            ) from error
        except (re.error, OverflowError) as error:
            raise SamplingError(
                f"{shortened(pattern)} is not a regular expression",
                cause=one_line(error),
                remedy="correct it, or escape special characters with \\",
            ) from error
        except CannotCompile as error:
            raise SamplingError(
                f"{shortened(pattern)} could take for ever to match: it has choices inside repeats, and no automaton "
                f"({error})",
                remedy="simplify it, or give a Python function of the text",
            ) from error

    @classmethod
    def words(cls, least: int = 0, most: int | None = None) -> Predicate:
        """Has the text so many words? They are what spaces separate, as in ``len(text.split())``."""
        name = _bounds_name("words", least, most)
        more = f"{{{max(least, 1) - 1},{'' if most is None else max(most, 1) - 1}}}"
        some = rf"\S+(?:\s+\S+){more}"
        expression = r"\s*" if most == 0 else rf"\s*{some}\s*" if least else rf"\s*(?:{some})?\s*"
        pattern = Pattern(expression, whole=True)
        return cls(partial(_has_words, least=least, most=most), name, pattern=pattern)

    @classmethod
    def characters(cls, least: int = 0, most: int | None = None) -> Predicate:
        """Has the text so many characters? Spaces count, one at the beginning too."""
        name = _bounds_name("characters", least, most)
        pattern = Pattern(f"(?s:.{{{least},{'' if most is None else most}}})", whole=True)
        return cls(partial(_has_characters, least=least, most=most), name, pattern=pattern)

    @classmethod
    def only(cls, words: Iterable[str]) -> Predicate:
        """Are all words of the text among these, case-insensitive? Whatever is no letter, digit or _ is free."""
        if isinstance(words, str):
            raise SamplingError(f"only({words!r}) needs a list of words", remedy=f"write only({words.split()!r})")
        given = list(words)
        parts = list(dict.fromkeys(part for word in given for part in re.findall(r"\w+", word)))
        if not parts:
            raise SamplingError(
                f"only={','.join(given)} names no word",
                remedy="give some, for example only=a,cheap,pub",
            )
        pattern = Pattern(rf"(?:\W|(?<!\w)(?:{'|'.join(parts)})(?!\w))*", ignore_case=True, whole=True)
        return cls._matching(pattern, f"only={','.join(given)}")

    @classmethod
    def _matching(cls, pattern: Pattern, name: str) -> Predicate:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what a later Python may read otherwise
            compiled = re.compile(pattern.expression, re.IGNORECASE if pattern.ignore_case else 0)
        return cls(partial(_matches, compiled.fullmatch if pattern.whole else compiled.search), name, pattern=pattern)

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
        )

    def _opposite(self, text: str) -> float:
        return 1.0 - self._answer(text)

    def log_prob(self, tokens: Int[Tensor, "chain n"], texts: list[str]) -> Float[Tensor, " chain"]:
        return torch.tensor([self._score(text) for text in texts], dtype=torch.float64, device=tokens.device)

    def _score(self, text: str) -> float:
        value = self._answer(text)
        if math.isnan(value):
            return -math.inf
        if self.kind == "log_score":
            return value if value < math.inf else -math.inf
        return math.log(value) if value > 0 else -math.inf

    def _answer(self, text: str) -> float:
        """The function's value for the text: a probability, a log-score or NaN."""
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


def shortened(written: str, longest: int = 80) -> str:
    """An expression as errors name it: cut where it goes on and on."""
    return repr(written if len(written) <= longest else f"{written[: longest - 1]}…")


# functions with a name rather than lambdas, so that controls can be sent to other processes


def _matches(match: Callable[[str], Any], text: str) -> bool:
    return match(text) is not None


def _has_words(text: str, least: int, most: int | None) -> bool:
    return _is_between(len(text.split()), least, most)


def _has_characters(text: str, least: int, most: int | None) -> bool:
    return _is_between(len(text), least, most)


def _is_between(count: int, least: int, most: int | None) -> bool:
    return least <= count and (most is None or count <= most)


def _bounds_name(counted: str, least: int, most: int | None) -> str:
    """The name of a control that bounds a count; refuses bounds that are none, or that no text keeps."""
    for bound in (least, most):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int) or bound < 0):
            raise SamplingError(
                f"{counted} cannot be {bound!r}",
                remedy=f"give whole numbers, for example {counted}=5..12",
            )
    if most is None and least == 0:
        raise SamplingError(
            f"{counted} without a bound allow every text",
            remedy=f"give one, for example {counted}=5..12",
        )
    if most is not None and most < least:
        raise SamplingError(f"{counted}={least}..{most} leaves nothing", remedy=f"write {counted}={most}..{least}")
    return f"{counted}={least or ''}..{'' if most is None else most}"
