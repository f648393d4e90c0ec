"""Ctrl-C and SIGTERM that wait until the step under way is done and kept."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any, Self

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """Entered, it holds back the first of these signals; a second one goes through at once.

    Only in the main thread, where Python handles signals, and only those that would end in an exception.
    """

    def __init__(self) -> None:
        self._signals: list[int] = []
        self._handlers: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        """Is a signal waiting?"""
        return bool(self._signals)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in STOPPING}
            self._handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
            for number in self._handlers:
                signal.signal(number, self._hold_back)
        return self

    def __exit__(self, *_: object) -> None:
        self.let_through()

    def let_through(self) -> None:
        """Put the handlers back that were there before, and let them do what they have been kept from."""
        handlers, self._handlers, signals, self._signals = self._handlers, {}, self._signals, []
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if signals:
            signal.raise_signal(signals[-1])

    def _hold_back(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        if len(self._signals) > 1:
            self.let_through()
        else:
            print("\nstopping after the step under way; once more stops at once", file=sys.stderr)
