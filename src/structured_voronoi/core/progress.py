"""Progress of long work: a bar on a terminal, nothing in pipes and in CI, or calls of a listener."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, Protocol

Stage = Literal["sampling", "texts", "weighted_texts", "training", "loading", "downloading", "verifying", "experiment"]
"""Codes for what is being done."""


@dataclass(frozen=True)
class Progress:
    """One report of progress to a listener."""

    stage: Stage
    done: int
    total: int
    note: str = ""
    """Detail of a step that takes long; empty where the step is done."""


Listener = Callable[[Progress], None]


class Tick(Protocol):
    """Function to call after each step, with a note that is shown beside the bar."""

    def __call__(self, note: str = "", steps: float = 1) -> None: ...


def ignore_progress(note: str = "", steps: float = 1) -> None:
    """Do nothing."""


_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
_current_tick: ContextVar[Tick] = ContextVar("current_tick", default=ignore_progress)


def is_interactive() -> bool:
    """Return whether stderr is a terminal, outside CI."""
    return sys.stderr.isatty() and not os.environ.get("CI")


def show_note(note: str) -> None:
    """Show a note beside the innermost progress bar, if there is one."""
    _current_tick.get()(note, 0)


@contextlib.contextmanager
def report_progress_to(listener: Listener) -> Iterator[None]:
    """Call ``listener`` instead of showing progress bars.

    Parameters
    ----------
    listener
        Called at the beginning of each stage, after each step and with each note.

    Examples
    --------
    >>> reports = []
    >>> with report_progress_to(reports.append), progress_bar(2, show=True, stage="texts") as tick:
    ...     tick()
    >>> reports[-1]
    Progress(stage='texts', done=1, total=2, note='')
    """
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)


@contextlib.contextmanager
def progress_bar(total: int, show: bool, label: str = "", *, stage: Stage = "sampling") -> Iterator[Tick]:
    """Show a progress bar with the remaining time and the last note.

    Parameters
    ----------
    total
        Number of steps.
    show
        Whether to show anything. In pipes and in CI nothing is shown.
    label
        Text beside the bar; by default the stage.
    stage
        Code of the stage for listeners.

    Yields
    ------
    Tick
        Function to call after each step.
    """
    listener = _listener.get()
    if show and listener is not None:
        with _as_current(_listener_tick(listener, stage, total)) as tick:
            yield tick
        return
    if not (show and is_interactive()):
        yield ignore_progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label or stage.replace("_", " "), total=total, note="")

        def tick(note: str = "", steps: float = 1) -> None:
            bar.update(task, advance=steps, note=note)

        with _as_current(tick):
            yield tick


@contextlib.contextmanager
def _as_current(tick: Tick) -> Iterator[Tick]:
    """Send notes to this tick."""
    before = _current_tick.set(tick)
    try:
        yield tick
    finally:
        _current_tick.reset(before)


def _listener_tick(listener: Listener, stage: Stage, total: int) -> Tick:
    """Return a tick that reports to a listener, and report the beginning."""
    done = 0.0

    def tick(note: str = "", steps: float = 1) -> None:
        nonlocal done
        done += steps
        listener(Progress(stage, round(done), total, "" if steps else note))

    listener(Progress(stage, 0, total))
    return tick
