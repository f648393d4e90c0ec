"""Calls of a user's own code: errors, exits and time limits."""

from __future__ import annotations

import signal
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from structured_voronoi.core.errors import OutOfTimeError, SamplingError, one_line

CONTROL_SECONDS = 60.0
"""Default time limit of one call of a control."""


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
            f"{who} took more than {seconds:g} s ({_place(alarm)}still at work)",
            remedy="make it faster, or give it more time (--control-timeout on the command line, timeout= in Python)",
        ) from None
    except (Exception, SystemExit) as error:  # an exit would end the command without a word
        raise SamplingError(
            f"{who} {what} ({_place(error)}{type(error).__name__}: {one_line(error)})",
            remedy=f"{remedy}",
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
    package = str(Path(__file__).parents[1])
    libraries = {sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((package, *libraries, "<")):
            return f"{Path(frame.filename).name}, line {frame.lineno}: "
    return ""
