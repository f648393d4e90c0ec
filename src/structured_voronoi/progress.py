"""A progress bar on a terminal; silence in pipes and in CI."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol


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
def progress_bar(total: int, show: bool, label: str = "sampling") -> Iterator[Tick]:
    """Yields a function to call after each step; the bar shows the time left and the last note."""
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

        before = _SHOWN.set(tick)
        try:
            yield tick
        finally:
            _SHOWN.reset(before)
