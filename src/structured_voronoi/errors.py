"""Errors that a user can fix; the checks of settings and files, and the calls of a user's own code, that raise them."""

from __future__ import annotations

import difflib
import inspect
import numbers
import os
import signal
import stat
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

LIKENESS = 0.85
"""How alike, from 0 to 1, an attribute's name must be to an ability's to be taken for a misspelling of it."""
MOST_COUNT = 10**9
"""The largest count that anybody can mean: nothing of which there are more would ever be done."""
SMALLEST, LARGEST = 1e-12, 1e12
"""Settings lie between these: beyond them squares and quotients leave single precision."""
MOST_SEED = 2**63 - 1
"""The largest seed that fits into 64 bits, which is what files have."""
MOST_BYTES = 2 * 2**30
"""Of a file of texts, which is read into memory."""
CONTROL_SECONDS = 60.0
"""How long a control may take for the texts that it is asked about at a time."""
OURS = str(Path(__file__).parent)
LIBRARIES = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})
"""Where code lies that is not the user's."""


class SamplingError(Exception):
    """A problem the user can fix: the message names the value, the cause and the remedy."""


class NoStartError(SamplingError):
    """No state of finite energy was found to start from."""


class NoBoundError(SamplingError):
    """Scores have no bound, or exceed the declared one, so that rejection would not be exact."""


class OutOfTimeError(SamplingError):
    """A control took longer for some texts than it may."""


def one_line(error: object, longest: int = 200) -> str:
    """The message of somebody else's error, or what else is to be told, on one line, cut where it goes on and on."""
    return " ".join(str(error).split())[:longest]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The tail of an error about an unknown name: the nearest known one, then all of them."""
    names = sorted(known)
    by_lower_case = {known.lower(): known for known in names}
    close = difflib.get_close_matches(str(name).lower(), list(by_lower_case), n=1)
    return (f"did you mean {by_lower_case[close[0]]!r}? " if close else "") + "known: " + ", ".join(names)


def check_positive(**values: float | None) -> None:
    """Refuse settings that are not positive numbers of a size to compute with; None stands for "not set"."""
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < value < float("inf"):
            raise SamplingError(f"{name} = {value!r} is not a positive number; choose one, for example {name}=0.5")
        if not SMALLEST <= value <= LARGEST:
            raise SamplingError(
                f"{name} = {value!r} is beyond what can be computed with; choose a number from {SMALLEST:g} to "
                f"{LARGEST:g}, for example {name}=0.5"
            )


def check_finite(**values: float) -> None:
    """Refuse settings that are not finite numbers."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not abs(value) < float("inf"):
            raise SamplingError(f"{name} = {value!r} is not a finite number; choose one, for example {name}=1.0")


def check_count(least: int = 1, most: int = MOST_COUNT, **values: int) -> None:
    """Refuse settings that are not whole numbers of at least so much, or that are absurdly large."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
            raise SamplingError(f"{name} = {value!r} is not a whole number of at least {least}; choose one")
        if value > most:
            raise SamplingError(f"{name} = {value} is more than {most:,}; choose a smaller number")


def check_memory(needed: float, what: str) -> None:
    """Refuse what would take more memory than this machine has, before the work starts; ``what`` names it."""
    if not hasattr(os, "sysconf"):  # Windows does not say
        return
    present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > present:
        raise SamplingError(
            f"{what} would take about {needed / 2**30:,.0f} GiB of memory, and this machine has "
            f"{present / 2**30:,.0f}; ask for less at a time"
        )


def check_choice(literal: object, **values: object) -> None:
    """Refuse settings that are not among the words of a Literal type."""
    for name, value in values.items():
        if value not in get_args(literal):
            raise SamplingError(f"{name} = {value!r} is unknown; {did_you_mean(str(value), get_args(literal))}")


def check_seed(seed: int, option: str = "--seed") -> None:
    """Refuse a seed of the command line that is negative or has more than 63 bits."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise SamplingError(f"{option} {seed!r} is not a whole number; use 0 or more")
    if seed < 0:
        raise SamplingError(f"{option} {seed} is negative; use 0 or more")
    if seed > MOST_SEED:
        raise SamplingError(f"{option} {seed} has more than 63 bits; use a number below 2**63")


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
        tensor = torch.zeros(1, device=device)
        tensor.item()  # the device `meta` makes tensors, but there is nothing in them
        return tensor.device
    except Exception as error:  # torch raises many kinds
        raise SamplingError(
            f"device {str(device)!r} cannot be used here ({one_line(error, 120)}); use cpu, or a device you have"
        ) from error


def is_folder(name: str | Path) -> bool:
    """Is there such a folder? Of a name that no folder can have, too long for example, there is none."""
    return _mode(name, stat.S_ISDIR)


def is_file(name: str | Path) -> bool:
    """Is there such a file? Of a name that no file can have there is none."""
    return _mode(name, stat.S_ISREG)


def check_text_file(path: Path, option: str, most: int = MOST_BYTES) -> None:
    """Refuse what is no file, or no ordinary one: pipes and devices may never end; and what is too large to read."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # a ValueError where the name holds a NUL
        reason = getattr(error, "strerror", None) or error
        raise SamplingError(f"{option} {str(path)[:200]} cannot be read ({reason}); give another file") from error
    if stat.S_ISDIR(found.st_mode):
        raise SamplingError(f"{option} {path} is a folder; give a file")
    if not stat.S_ISREG(found.st_mode):
        raise SamplingError(f"{option} {path} is a pipe or a device, which may never end; write it to a file first")
    if found.st_size > most:
        raise SamplingError(
            f"{option} {path} has {found.st_size / 2**20:,.0f} MiB, and at most {most / 2**20:,.0f} are read; "
            "give a part of it"
        )


def _mode(name: str | Path, is_kind: Callable[[int], bool]) -> bool:
    try:
        return is_kind(Path(name).stat().st_mode)
    except (OSError, ValueError):
        return False


class _Alarm(BaseException):
    """Raised inside code that takes too long; not an Exception, as that code may catch those."""


@contextmanager
def user_code(who: str, remedy: str, seconds: float | None = None, what: str = "failed") -> Iterator[None]:
    """Errors and exits in this block become a SamplingError that says ``what`` befell ``who``; Ctrl-C stays Ctrl-C.

    After so many ``seconds`` the block is ended by an alarm, in the main thread and where the system has alarms
    (POSIX); in other threads and on Windows it is waited for. A call into C that never looks for signals is waited for
    everywhere.
    """
    can_end = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    try:
        if seconds is None or not can_end:
            yield
        else:
            with _alarm(seconds):
                yield
    except SamplingError:
        raise
    except _Alarm as alarm:
        if seconds is None:  # it is meant for the block around this one
            raise
        raise OutOfTimeError(
            f"{who} took more than {seconds:g} s ({_place(alarm)}still at work); make it faster, or give it more time "
            "(--control-timeout on the command line, timeout= in Python)"
        ) from None
    except (Exception, SystemExit) as error:  # an exit would end the command without a word
        raise SamplingError(
            f"{who} {what} ({_place(error)}{type(error).__name__}: {one_line(error)}); {remedy}"
        ) from error


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raises `_Alarm` in the block after so many seconds; an alarm that somebody else has set goes on after it."""

    def stop(*_: object) -> None:
        raise _Alarm

    handler, began = signal.signal(signal.SIGALRM, stop), time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))  # 0 would be none
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), interval)


def _place(error: BaseException) -> str:
    """The last line of the user's own files on the way to an error."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((OURS, *LIBRARIES, "<")):
            return f"{Path(frame.filename).name}, line {frame.lineno}: "
    return ""


def check_tolerance(tolerance: float) -> None:
    """Raise an error unless 0 <= tolerance < 0.5."""
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < 0.5:
        raise SamplingError(
            f"tolerance = {tolerance!r} is not a distance between distributions; use a number of at least 0 and below "
            "0.5, for example 0.003"
        )
