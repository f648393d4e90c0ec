"""Connections with a timeout: slow clients are disconnected.

uvicorn waits without limit for requests and for clients to read the response, so a few hundred slow clients would use
up all connections.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

CLIENT_TIMEOUT = 20.0
"""Seconds that a client has to send a complete request, and to read when the write buffer is full."""


class TimeoutProtocol(H11Protocol):
    """uvicorn's HTTP protocol with a timer that runs while the server waits for the client."""

    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._update_timer()

    def handle_events(self) -> None:
        super().handle_events()
        self._update_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._update_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _update_timer(self) -> None:
        is_responding = self.cycle is not None and not self.cycle.response_complete
        if is_responding and not self.flow.write_paused:
            self._stop_timer()
        elif self.timer is None:
            self.timer = self.loop.call_later(CLIENT_TIMEOUT, self.transport.abort)

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
