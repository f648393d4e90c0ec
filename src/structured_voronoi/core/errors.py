"""Errors that a user can fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class SamplingError(Exception):
    """A problem that the user can fix.

    Parameters
    ----------
    message
        What happened, with the value at fault. If ``argument`` is given, the message continues its name: "-1 is
        negative".
    remedy
        What to do.
    cause
        The reason that another library or the system gives.
    argument
        The name of the Python argument at fault.

    Examples
    --------
    >>> error = SamplingError("-1 is negative", argument="seed", remedy="use 0 or more")
    >>> str(error), error.message, error.remedy
    ('seed = -1 is negative; use 0 or more', 'seed = -1 is negative', 'use 0 or more')
    """

    def __init__(self, message: str, *, remedy: str = "", cause: object = "", argument: str = "") -> None:
        super().__init__(message)
        self.predicate, self.remedy, self.cause, self.argument = message, remedy, str(cause), argument

    @property
    def message(self) -> str:
        """What happened."""
        return f"{self.argument} = {self.predicate}" if self.argument else self.predicate

    def written(self, option: str = "") -> str:
        """The error in one sentence; ``option`` replaces the name of the argument."""
        what = f"{option} {self.predicate}" if option else self.message
        cause = f" ({self.cause})" if self.cause else ""
        return f"{what}{cause}; {self.remedy}" if self.remedy else f"{what}{cause}"

    def __str__(self) -> str:
        return self.written()

    def with_message(self, prefix: str) -> SamplingError:
        """The same error, told of a part: "prompt 2: …"."""
        return type(self)(f"{prefix}{self.message}", remedy=self.remedy, cause=self.cause)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.predicate, self.remedy, self.cause, self.argument)


def _restored(kind: type[SamplingError], predicate: str, remedy: str, cause: str, argument: str) -> SamplingError:
    return kind(predicate, remedy=remedy, cause=cause, argument=argument)


class NoStartError(SamplingError):
    """No possible state was found, or no text satisfied the controls."""


class NoBoundError(SamplingError):
    """Scores have no bound, or exceed the declared one, so that rejection would not be exact."""


class OutOfTimeError(SamplingError):
    """A control took longer than its time limit."""


def one_line(error: object, longest: int = 200) -> str:
    """A message on one line, shortened if it is long."""
    return " ".join(str(error).split())[:longest]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The remedy for an unknown name: the nearest known one, and all of them."""
    names = sorted(known)
    by_lower_case = {known.lower(): known for known in names}
    close = difflib.get_close_matches(str(name).lower(), list(by_lower_case), n=1)
    return (f"did you mean {by_lower_case[close[0]]!r}? " if close else "") + "known: " + ", ".join(names)
