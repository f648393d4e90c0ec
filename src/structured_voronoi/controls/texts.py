"""Controls that look for words and patterns, or count them; scores; either of two controls."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from structured_voronoi.controls.predicate import Predicate
from structured_voronoi.core.contracts import Pattern
from structured_voronoi.core.errors import SamplingError, one_line


def keyword(text: str, *, weight: float = 1.0) -> Predicate:
    """Texts that contain a word or phrase, in upper or lower case.

    Parameters
    ----------
    text
        A word, or words separated by spaces. Parts of longer words do not count.
    weight
        Exponent of the control; 0 turns it off. It makes no other difference to a control that is true or false.

    Returns
    -------
    Predicate

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> river = sv.keyword("river")
    >>> river.function("by the River."), river.function("riverside")
    (True, False)
    """
    parts = [re.escape(part) for part in text.split()] if isinstance(text, str) else []
    if not parts:
        raise SamplingError(
            f"the keyword {text!r} is empty", remedy="give a word or a phrase, for example keyword=river"
        )
    pattern = Pattern(r"(?<!\w)" + r"\s+".join(parts) + r"(?!\w)", ignore_case=True)
    return _matching(pattern, f"keyword={text}", weight)


def regex(pattern: str, *, full: bool = False, weight: float = 1.0) -> Predicate:
    """Texts in which a regular expression matches, as in Python's `re`.

    Expressions on which `re` could take exponential time are matched by an automaton with the same meaning.

    Parameters
    ----------
    pattern
        A regular expression.
    full
        The whole text must match.
    weight
        Exponent of the control.

    Returns
    -------
    Predicate

    Raises
    ------
    SamplingError
        If this is not a regular expression, or one that could take too long.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> sv.regex("^ ?The").function(" The pub")
    True
    """
    from structured_voronoi.automata.expressions import CannotCompile, CharacterAutomaton, may_backtrack_for_long

    if not pattern or not isinstance(pattern, str):
        raise SamplingError(
            f"the regular expression {pattern!r} is empty or not a text", remedy="give one, for example regex=^The"
        )
    wanted, name = Pattern(pattern, whole=full), f"regex={pattern}"
    try:
        matching = _matching(wanted, name, weight)
        if not may_backtrack_for_long(wanted):
            return matching
        return Predicate(CharacterAutomaton(wanted).matches, name, pattern=wanted, weight=weight)
    except RecursionError as error:
        raise SamplingError(
            f"{_shortened(pattern)} is nested too deeply", remedy="write it with fewer groups"
        ) from error
    except (re.error, OverflowError) as error:
        raise SamplingError(
            f"{_shortened(pattern)} is not a regular expression",
            cause=one_line(error),
            remedy="correct it, or escape special characters with \\",
        ) from error
    except CannotCompile as error:
        raise SamplingError(
            f"{_shortened(pattern)} could take exponential time to match, and cannot be compiled",
            cause=error,
            remedy="simplify it, or give a Python function of the text",
        ) from error


def words(least: int = 0, most: int | None = None, *, weight: float = 1.0) -> Predicate:
    """Texts with a number of words, separated by spaces as in ``len(text.split())``.

    Parameters
    ----------
    least, most
        Smallest and largest number; ``most=None`` for no limit.
    weight
        Exponent of the control.

    Returns
    -------
    Predicate

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> sv.words(2, 3).function("a pub")
    True
    """
    name = _bounds_name("words", least, most)
    more = f"{{{max(least, 1) - 1},{'' if most is None else max(most, 1) - 1}}}"
    some = rf"\S+(?:\s+\S+){more}"
    expression = r"\s*" if most == 0 else rf"\s*{some}\s*" if least else rf"\s*(?:{some})?\s*"
    has_words = partial(_has_words, least=least, most=most)
    return Predicate(has_words, name, pattern=Pattern(expression, whole=True), weight=weight)


def characters(least: int = 0, most: int | None = None, *, weight: float = 1.0) -> Predicate:
    """Texts with a number of characters, spaces included, also one at the beginning.

    Parameters
    ----------
    least, most
        Smallest and largest number; ``most=None`` for no limit.
    weight
        Exponent of the control.

    Returns
    -------
    Predicate

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> sv.characters(most=80).name
    'characters=..80'
    """
    name = _bounds_name("characters", least, most)
    pattern = Pattern(f"(?s:.{{{least},{'' if most is None else most}}})", whole=True)
    return Predicate(partial(_has_characters, least=least, most=most), name, pattern=pattern, weight=weight)


def only(words: Iterable[str], *, weight: float = 1.0) -> Predicate:
    """Texts that have no other words than these, in upper or lower case.

    Parameters
    ----------
    words
        The words; other characters than letters, digits and _ are free.
    weight
        Exponent of the control.

    Returns
    -------
    Predicate

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> sv.only(["a", "cheap", "pub"]).function("A cheap, cheap pub!")
    True
    """
    if isinstance(words, str):
        raise SamplingError(f"only({words!r}) needs a list of words", remedy=f"write only({words.split()!r})")
    given = list(words)
    parts = list(dict.fromkeys(part for word in given for part in re.findall(r"\w+", word)))
    if not parts:
        raise SamplingError(f"only={','.join(given)} names no word", remedy="give some, for example only=a,cheap,pub")
    pattern = Pattern(rf"(?:\W|(?<!\w)(?:{'|'.join(parts)})(?!\w))*", ignore_case=True, whole=True)
    return _matching(pattern, f"only={','.join(given)}", weight)


def score(
    function: Callable[[str], Any], *, bound: float | None = 0.0, name: str = "", weight: float = 1.0
) -> Predicate:
    """A function of the text whose value is added to the log-probability of the text.

    Parameters
    ----------
    function
        Takes a text, returns a number; -inf for impossible texts.
    bound
        The largest value that the function returns; None if there is no bound, with which texts come from chains.
    name
        The key of the control in results; the function's name by default.
    weight
        Factor of the value.

    Returns
    -------
    Predicate

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> shorter = sv.score(lambda text: -0.05 * len(text), name="shorter")
    >>> shorter.bound
    0.0
    """
    return Predicate(function, name, "log_score", math.inf if bound is None else bound, weight=weight)


def any_of(*controls: Predicate | Callable[[str], Any], weight: float = 1.0) -> Predicate:
    """Texts that satisfy at least one of some controls; for probabilities, the largest of them.

    Parameters
    ----------
    controls
        Controls on the text such as `keyword`, or functions of the text; not classifiers.
    weight
        Exponent of the control.

    Returns
    -------
    Predicate

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> either = sv.any_of(sv.keyword("river"), sv.keyword("bridge"))
    >>> either.name, either.function("a bridge")
    ('keyword=river or keyword=bridge', 1.0)
    """
    parts = [as_control(control) for control in controls]
    unfit = [part for part in parts if not isinstance(part, Predicate) or part.kind == "log_score"]
    if unfit or not parts:
        raise SamplingError(
            f"any_of takes controls that are true, false or a probability of the text, not {_names(controls)}",
            remedy="give keywords, patterns or functions of the text",
        )
    name = " or ".join(part.name for part in parts)
    return Predicate(
        partial(_largest, parts), name, "probability", pattern=_either([p.pattern for p in parts]), weight=weight
    )


def as_control(control: Any) -> Any:
    """A control as it is; a function of the text as a predicate."""
    from structured_voronoi.core.contracts import Control

    if isinstance(control, (type, Control)) or not callable(control):
        return control
    return Predicate(control)


def with_weight(control: Any, weight: float) -> Any:
    """A copy of a control with another weight."""
    made = copy.copy(as_control(control))
    object.__setattr__(made, "weight", weight)
    return made


def _either(patterns: list[Pattern | None]) -> Pattern | None:
    """One pattern for several that are alike, so that a lookahead can compile it."""
    first = patterns[0]
    if (
        first is None
        or first.negated
        or any(other is None or replace(other, expression="") != replace(first, expression="") for other in patterns)
    ):
        return None
    expression = "|".join(f"(?:{pattern.expression})" for pattern in patterns if pattern is not None)
    try:
        re.compile(expression)
    except re.error:  # names of groups that occur twice, for example
        return None
    return replace(first, expression=expression)


def _matching(pattern: Pattern, name: str, weight: float) -> Predicate:
    """The control of a pattern that `re` matches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a later Python may read some expressions differently
        compiled = re.compile(pattern.expression, re.IGNORECASE if pattern.ignore_case else 0)
    match = compiled.fullmatch if pattern.whole else compiled.search
    return Predicate(partial(_matches, match), name, pattern=pattern, weight=weight)


def _names(controls: Iterable[Any]) -> str:
    found = ", ".join(str(getattr(control, "name", type(control).__name__)) for control in controls)
    return found or "none"


def _largest(parts: list[Predicate], text: str) -> float:
    values = [part.value(text) for part in parts]
    return max(0.0 if math.isnan(value) else value for value in values)


def _shortened(written: str, longest: int = 80) -> str:
    """An expression for an error message."""
    return repr(written if len(written) <= longest else f"{written[: longest - 1]}…")


# named functions rather than lambdas, so that controls can be sent to other processes


def _matches(match: Callable[[str], Any], text: str) -> bool:
    return match(text) is not None


def _has_words(text: str, least: int, most: int | None) -> bool:
    return _is_between(len(text.split()), least, most)


def _has_characters(text: str, least: int, most: int | None) -> bool:
    return _is_between(len(text), least, most)


def _is_between(count: int, least: int, most: int | None) -> bool:
    return least <= count and (most is None or count <= most)


def _bounds_name(counted: str, least: int, most: int | None) -> str:
    """The name of a control that counts; an error for bounds that are not numbers, or that no text satisfies."""
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
