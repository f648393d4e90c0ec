"""A progress bar on a terminal; silence in pipes and in CI."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Protocol


def is_watched() -> bool:
    """Is stderr a terminal, outside CI?"""
    return sys.stderr.isatty() and not os.environ.get("CI")


def silence(note: str = "", steps: float = 1) -> None:
    pass


class Tick(Protocol):
    """Called after each step, with a note that the bar shows."""

    def __call__(self, note: str = "", steps: float = 1) -> None: ...


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
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total, note="")

        def tick(note: str = "", steps: float = 1) -> None:
            bar.update(task, advance=steps, note=note)

        yield tick
