"""A progress bar on a terminal; silence in pipes and in CI."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from structured_voronoi.base import Info


def wanted() -> bool:
    """Is somebody watching?"""
    return sys.stderr.isatty() and not os.environ.get("CI")


def _silence(info: Info | None = None) -> None:
    pass


@contextlib.contextmanager
def progress_bar(total: int, show: bool, what: str = "sampling") -> Iterator[Callable[[Info | None], None]]:
    """Yields a function to call after each step; it shows the time left and, given an Info, the mean energy."""
    if not (show and wanted()):
        yield _silence
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
        task = bar.add_task(what, total=total, note="")

        def tick(info: Info | None = None) -> None:
            note = "" if info is None else f"energy {float(info.energy.mean()):.2f}"
            bar.update(task, advance=1, note=note)

        yield tick
