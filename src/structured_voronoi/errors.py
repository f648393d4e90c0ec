"""Errors that a user can fix, and the checks of settings that raise them."""

from __future__ import annotations

import difflib
import inspect
import numbers
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, get_args

LIKENESS = 0.85
"""How alike, from 0 to 1, an attribute's name must be to an ability's to be taken for a misspelling of it."""


class SamplingError(Exception):
    """A problem the user can fix: the message names the value, the cause and the remedy."""


class NoStartError(SamplingError):
    """No state of finite energy was found to start from."""


class NoBoundError(SamplingError):
    """Scores have no bound, or exceed the declared one, so that rejection would not be exact."""


def one_line(error: object, longest: int = 200) -> str:
    """The message of somebody else's error, or what else is to be told, on one line, cut where it goes on and on."""
    return " ".join(str(error).split())[:longest]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The tail of an error about an unknown name: the nearest known one, then all of them."""
    names = sorted(known)
    by_lower_case = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), list(by_lower_case), n=1)
    return (f"did you mean {by_lower_case[close[0]]!r}? " if close else "") + "known: " + ", ".join(names)


def check_positive(**values: float | None) -> None:
    """Refuse settings that are not positive finite numbers; None stands for "not set"."""
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < value < float("inf"):
            raise SamplingError(f"{name} = {value!r} is not a positive number; choose one, for example {name}=0.5")


def check_finite(**values: float) -> None:
    """Refuse settings that are not finite numbers."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not abs(value) < float("inf"):
            raise SamplingError(f"{name} = {value!r} is not a finite number; choose one, for example {name}=1.0")


def check_count(**values: int) -> None:
    """Refuse settings that are not whole numbers of at least 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
            raise SamplingError(f"{name} = {value!r} is not a whole number of at least 1; choose one")


def check_choice(literal: object, **values: object) -> None:
    """Refuse settings that are not among the words of a Literal type."""
    for name, value in values.items():
        if value not in get_args(literal):
            raise SamplingError(f"{name} = {value!r} is unknown; {did_you_mean(str(value), get_args(literal))}")


def check_seed(seed: int, option: str = "--seed") -> None:
    """Refuse a negative seed of the command line."""
    if seed < 0:
        raise SamplingError(f"{option} {seed} is negative; use 0 or more")


def refuse_misspelt(owner: object, abilities: Mapping[str, str], role: str) -> None:
    """Refuse an object whose attribute is called almost, but not quite, like an optional ability that it lacks."""
    methods: list[str] = []
    values: list[str] = []
    for name in dir(owner):
        if not name.startswith("_"):
            try:
                attribute = inspect.getattr_static(owner, name)
            except AttributeError:  # listed by a custom __dir__
                continue
            (methods if callable(attribute) else values).append(name)
    for names, kind in ((methods, "method"), (values, "value")):
        known = tuple(ability for ability, its_kind in abilities.items() if its_kind == kind)
        misspelt = _misspelt(tuple(names), known)
        if misspelt is not None:
            written, meant = misspelt
            raise SamplingError(
                f"the {role} {type(owner).__name__} has `{written}`; did you mean `{meant}`? "
                f"Rename it, or call it `_{written}` if it is something else"
            )


@lru_cache(maxsize=256)
def _misspelt(names: tuple[str, ...], abilities: tuple[str, ...]) -> tuple[str, str] | None:
    """The first name that almost equals an ability which is not among the names, and that ability."""
    absent = [ability for ability in abilities if ability not in names]
    for name in names:
        close = difflib.get_close_matches(name.lower(), absent, n=1, cutoff=LIKENESS)
        if close and name not in abilities:
            return name, close[0]
    return None


def usable_device(device: Any) -> Any:
    """The torch device, if this machine has it."""
    import torch

    try:
        return torch.empty(0, device=device).device
    except Exception as error:  # torch raises many kinds
        raise SamplingError(
            f"device {str(device)!r} cannot be used here ({one_line(error, 120)}); use cpu, or a device you have"
        ) from error
