"""Checks of arguments and files; they raise a `SamplingError`."""

from __future__ import annotations

import difflib
import inspect
import numbers
import os
import stat
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

from structured_voronoi.core.errors import SamplingError, did_you_mean, one_line

MAX_COUNT = 10**9
"""Largest count that is accepted."""
MAX_SEED = 2**63 - 1
"""Largest seed: files hold 64 bits."""


def check_positive(**values: float | None) -> None:
    """Raise an error for settings that are not positive numbers within single precision; None means "not set"."""
    smallest, largest = 1e-12, 1e12  # squares and quotients of others leave single precision
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < value < float("inf"):
            raise SamplingError(f"{value!r} is not a positive number", argument=name, remedy="choose a positive number")
        if not smallest <= value <= largest:
            raise SamplingError(
                f"{value!r} is out of range",
                argument=name,
                remedy=f"choose a number from {smallest:g} to {largest:g}",
            )


def check_finite(**values: float) -> None:
    """Raise an error for settings that are not finite numbers."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not abs(value) < float("inf"):
            raise SamplingError(f"{value!r} is not a finite number", argument=name, remedy="choose a finite number")


def check_count(least: int = 1, most: int = MAX_COUNT, **values: int) -> None:
    """Raise an error for settings that are not whole numbers of at least ``least``, or that are absurdly large."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
            raise SamplingError(
                f"{value!r} is not a whole number of at least {least}",
                argument=name,
                remedy=f"use {least} or more",
            )
        if value > most:
            raise SamplingError(f"{value} is more than {most:,}", argument=name, remedy="choose a smaller number")


def check_memory(needed: float, what: str) -> None:
    """Raise an error for what would take more memory than this machine has; ``what`` names it."""
    if not hasattr(os, "sysconf"):  # Windows does not say
        return
    present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > present:
        raise SamplingError(
            f"{what} would take about {needed / 2**30:,.0f} GiB of memory, and this machine has {present / 2**30:,.0f}",
            remedy="ask for less at a time",
        )


def check_choice(literal: object, **values: object) -> None:
    """Raise an error for settings that are not among the words of a Literal type."""
    for name, value in values.items():
        if value not in get_args(literal):
            remedy = did_you_mean(str(value), get_args(literal))
            raise SamplingError(f"{value!r} is unknown", argument=name, remedy=remedy)


def check_seed(seed: int) -> None:
    """Raise an error for a seed that is negative or has more than 63 bits."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise SamplingError(f"{seed!r} is not a whole number", argument="seed", remedy="use 0 or more")
    if seed < 0:
        raise SamplingError(f"{seed} is negative", argument="seed", remedy="use 0 or more")
    if seed > MAX_SEED:
        raise SamplingError(f"{seed} has more than 63 bits", argument="seed", remedy="use a number below 2**63")


def check_tolerance(tolerance: float) -> None:
    """Raise an error unless 0 <= tolerance < 0.5."""
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < 0.5:
        raise SamplingError(
            f"{tolerance!r} is not a distance between distributions",
            argument="tolerance",
            remedy="use a number of at least 0 and below 0.5, for example 0.003",
        )


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
                f"the {role} {type(owner).__name__} has `{written}`",
                remedy=f"did you mean `{meant}`? Rename it, or call it `_{written}` if it is something else",
            )


@lru_cache(maxsize=256)
def _misspelt(names: tuple[str, ...], abilities: tuple[str, ...]) -> tuple[str, str] | None:
    """The first name that almost equals an ability which is not among the names, and that ability."""
    absent = [ability for ability in abilities if ability not in names]
    for name in names:
        close = difflib.get_close_matches(name.lower(), absent, n=1, cutoff=0.85)
        if close and name not in abilities:
            return name, close[0]
    return None


def usable_device(device: Any) -> Any:
    """The torch device, if this machine has it."""
    import torch

    try:
        tensor = torch.zeros(1, device=device)
        tensor.item()  # the device `meta` makes tensors, but there is nothing in them
        return tensor.device
    except Exception as error:  # torch raises many kinds
        raise SamplingError(
            f"device {str(device)!r} cannot be used here",
            cause=one_line(error, 120),
            remedy="use cpu, or a device you have",
        ) from error


def is_folder(name: str | Path) -> bool:
    """Is there such a folder? Of a name that no folder can have, too long for example, there is none."""
    return _mode(name, stat.S_ISDIR)


def is_file(name: str | Path) -> bool:
    """Is there such a file? Of a name that no file can have there is none."""
    return _mode(name, stat.S_ISREG)


def check_text_file(path: Path, argument: str, max_bytes: int = 2 * 2**30) -> None:
    """Raise an error unless the path is an ordinary file of at most ``max_bytes``; pipes and devices may never end."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # a ValueError where the name holds a NUL
        raise SamplingError(
            f"{str(path)[:200]} cannot be read",
            cause=getattr(error, "strerror", None) or error,
            argument=argument,
            remedy="give another file",
        ) from error
    if stat.S_ISDIR(status.st_mode):
        raise SamplingError(f"{path} is a folder", argument=argument, remedy="give a file")
    if not stat.S_ISREG(status.st_mode):
        raise SamplingError(
            f"{path} is a pipe or a device, which may never end", argument=argument, remedy="write it to a file first"
        )
    if status.st_size > max_bytes:
        raise SamplingError(
            f"{path} has {status.st_size / 2**20:,.0f} MiB, and at most {max_bytes / 2**20:,.0f} are read",
            argument=argument,
            remedy="give a part of it",
        )


def _mode(name: str | Path, is_kind: Callable[[int], bool]) -> bool:
    try:
        return is_kind(Path(name).stat().st_mode)
    except (OSError, ValueError):
        return False
