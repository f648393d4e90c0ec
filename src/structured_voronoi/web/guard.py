"""Who may ask: checks of every request before anything else looks at it, and headers of every answer.

A page of another site may send requests to this one from the reader's browser, and by rebinding a name of its own to
127.0.0.1 it may even read the answers. So the Host must be this machine's own, where the server is bound to it, and the
Origin of what changes or costs anything must be the page itself. Bound elsewhere, everyone needs the token.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LARGEST_BODY = 32 * 1024
BODY_SECONDS = 10.0
"""In which a request must have arrived."""
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Access:
    """Where the server is bound, and the token that is needed, if any."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = field(default=None, repr=False)

    @classmethod
    def bound_to(cls, host: str, port: int) -> Access:
        """With a new token, unless only this machine can reach it."""
        return cls(host, port, None if host in LOOPBACK else secrets.token_urlsafe(24))

    @property
    def cookie(self) -> str:
        """Browsers keep one jar for all ports of a host."""
        return f"svs-{self.port}"


@dataclass(frozen=True)
class Guard:
    """Wraps an application."""

    app: App
    access: Access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refuse(scope["method"], scope["path"], headers)
        if refusal is not None:
            await _answer(send, *refusal)
            return
        if self.access.token is not None and not self._has_cookie(headers):
            if self._is_token(parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]):
                await self._let_in(send)
            else:
                await _answer(send, 403, "the token is missing or wrong; open the address that `svs serve` has printed")
            return
        body = await _read_body(receive)
        if body is None:
            await _answer(send, 413, f"more than {LARGEST_BODY} bytes, or too slow to arrive; send less")
            return
        await self.app(scope, _replay(body, receive), _with_headers(send))

    def _refuse(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        """The status and the reason, if this is a stranger's request."""
        host = headers.get("host", "")
        if self.access.host in LOOPBACK and _name_of(host) not in LOOPBACK:
            return 421, f"this server is not {host[:100]!r}; open the address that `svs serve` has printed"
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none") and path != "/":
            return 403, "another site has sent this request; open the page itself"
        if method not in ("GET", "HEAD"):
            if headers.get("origin") not in (f"http://{host}", f"https://{host}"):
                return 403, "the request does not come from the page of this server (Origin); open the page itself"
            if headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
                return 415, "the body must be application/json"
        return None

    def _has_cookie(self, headers: dict[str, str]) -> bool:
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self.access.cookie)
        except CookieError:
            return False
        return cookie is not None and self._is_token(cookie.value)

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), (self.access.token or "").encode())

    async def _let_in(self, send: Send) -> None:
        """The token goes from the address, which others may see, into a cookie, which only this page sends."""
        cookie = f"{self.access.cookie}={self.access.token}; HttpOnly; SameSite=Strict; Path=/"
        await _answer(send, 303, "come in", {"location": "/", "set-cookie": cookie})


def _name_of(host: str) -> str:
    """Without its port."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    return name.strip("[]").lower()


async def _read_body(receive: Receive) -> bytes | None:
    """The whole of it; None if it is too large, too slow, or its sender has gone."""
    body: bytes = b""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                body += message.get("body", b"")
                if message["type"] != "http.request" or len(body) > LARGEST_BODY:
                    return None
                if not message.get("more_body"):
                    return body
    except TimeoutError:
        return None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body that was read, then goes on: the application waits for its client to leave."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> MutableMapping[str, Any]:
        return waiting.pop() if waiting else await receive()

    return receive_again


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            given = {name.lower() for name, _ in message["headers"]}
            ours = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in given]
            message = {**message, "headers": [*message["headers"], *ours]}
        await send(message)

    return send_with_headers


async def _answer(send: Send, status: int, words: str, headers: dict[str, str] | None = None) -> None:
    body = json.dumps({"error": words}).encode()
    lines = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    start = {
        "type": "http.response.start",
        "status": status,
        "headers": [(name.encode(), value.encode()) for name, value in lines.items()],
    }
    await _with_headers(send)(start)
    await send({"type": "http.response.body", "body": body})
