"""Ctrl-C and SIGTERM that wait until the current step is finished and saved."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any, Self


class Stopping:
    """Context manager that holds back the first SIGINT or SIGTERM; a second one takes effect at once.

    It works in the main thread, where Python handles signals, and on signals that would raise an exception.
    """

    def __init__(self) -> None:
        self._signals: list[int] = []
        self._handlers: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal is held back."""
        return bool(self._signals)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            self._handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
            for number in self._handlers:
                signal.signal(number, self._hold_back)
        return self

    def __exit__(self, *_: object) -> None:
        self.deliver()

    def deliver(self) -> None:
        """Restore the previous handlers and raise the signal that was held back."""
        handlers, self._handlers, signals, self._signals = self._handlers, {}, self._signals, []
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if signals:
            signal.raise_signal(signals[-1])

    def _hold_back(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        if len(self._signals) > 1:
            self.deliver()
        else:
            print("\nfinishing the current step; press Ctrl-C again to abort", file=sys.stderr)
