"""Connections that must keep up: who is slow to ask, or does not read the answer, is cut off.

uvicorn waits for both as long as they take, so that a few hundred such clients would leave no place for others.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE = 20.0
"""Seconds that a connection may be without a whole request or, while it is answered, without being read from."""


class ImpatientProtocol(H11Protocol):
    """That of uvicorn with a clock, which runs whenever it is the client's turn to do something."""

    clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._look_at_the_clock()

    def handle_events(self) -> None:
        super().handle_events()
        self._look_at_the_clock()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look_at_the_clock()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_at_the_clock()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._look_at_the_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_the_clock()

    def _look_at_the_clock(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering and not self.flow.write_paused:
            self._stop_the_clock()
        elif self.clock is None:
            self.clock = self.loop.call_later(PATIENCE, self.transport.abort)

    def _stop_the_clock(self) -> None:
        if self.clock is not None:
            self.clock.cancel()
            self.clock = None
