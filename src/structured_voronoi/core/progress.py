"""A progress bar on a terminal; silence in pipes and in CI; or somebody else who listens."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Protocol

Listener = Callable[[str, int, int, str], None]
"""Told what is being done, how many of its steps are, how many there are, and what is noted within a step."""
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def is_watched() -> bool:
    """Is stderr a terminal, outside CI?"""
    return sys.stderr.isatty() and not os.environ.get("CI")


def silence(note: str = "", steps: float = 1) -> None:
    pass


class Tick(Protocol):
    """Called after each step, with a note that the bar shows."""

    def __call__(self, note: str = "", steps: float = 1) -> None: ...


_SHOWN: ContextVar[Tick] = ContextVar("shown", default=silence)
"""The bar that is on the screen."""


def show_note(note: str) -> None:
    """Shown beside the bar that is on the screen, if there is one: by work that takes long within one of its steps."""
    _SHOWN.get()(note, 0)


@contextlib.contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Within it progress is told to the listener instead of being shown on a terminal."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)


@contextlib.contextmanager
def progress_bar(total: int, show: bool, label: str = "sampling") -> Iterator[Tick]:
    """Yields a function to call after each step; the bar shows the time left and the last note."""
    listener = _listener.get()
    if show and listener is not None:
        with _showing(_telling(listener, label, total)) as tick:
            yield tick
        return
    if not (show and is_watched()):
        yield silence
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total, note="")

        def tick(note: str = "", steps: float = 1) -> None:
            bar.update(task, advance=steps, note=note)

        with _showing(tick):
            yield tick


@contextlib.contextmanager
def _showing(tick: Tick) -> Iterator[Tick]:
    """Within it notes are shown by this tick."""
    before = _SHOWN.set(tick)
    try:
        yield tick
    finally:
        _SHOWN.reset(before)


def _telling(listener: Listener, label: str, total: int) -> Tick:
    """A tick that tells a listener: once at the beginning, after each step, and of what is noted within one."""
    done = 0.0

    def tick(note: str = "", steps: float = 1) -> None:
        nonlocal done
        done += steps
        listener(label, round(done), total, "" if steps else note)

    listener(label, 0, total, "")
    return tick
