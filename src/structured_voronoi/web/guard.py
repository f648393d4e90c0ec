"""Access checks of every request, and security headers of every response.

Other web sites can send requests to this server through the user's browser and, by DNS rebinding, could even read the
responses. A server on a loopback address therefore accepts only loopback names as Host, and every request but GET and
HEAD needs the Origin of the page. A server on any other address requires a token.
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
MAX_BODY_BYTES = 32 * 1024
BODY_TIMEOUT = 10.0
"""Seconds within which the body of a request must arrive."""
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
    """Address of the server and its token, if it needs one."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = field(default=None, repr=False)

    @classmethod
    def bound_to(cls, host: str, port: int) -> Access:
        """Access for this address, with a new token unless it is a loopback address."""
        return cls(host, port, None if host in LOOPBACK else secrets.token_urlsafe(24))

    @property
    def cookie(self) -> str:
        """Name of the cookie; it includes the port because browsers share cookies between the ports of a host."""
        return f"svs-{self.port}"


@dataclass(frozen=True)
class Guard:
    """An application with access checks."""

    app: App
    access: Access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        rejection = self._rejection(scope["method"], scope["path"], headers)
        if rejection is not None:
            await _respond(send, *rejection)
            return
        if self.access.token is not None and not self._has_cookie(headers):
            if self._is_token(parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]):
                await self._set_cookie(send)
            else:
                await _respond(send, 403, "the token is missing or wrong; open the address that `svs serve` printed")
            return
        body = await _read_body(receive)
        if body is None:
            await _respond(send, 413, f"the body has more than {MAX_BODY_BYTES} bytes or took too long; send less")
            return
        await self.app(scope, _replay(body, receive), _with_headers(send))

    def _rejection(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        """Status and message if the request is cross-origin or not JSON."""
        host = headers.get("host", "")
        if self.access.host in LOOPBACK and _name_of(host) not in LOOPBACK:
            return 421, f"the host {host[:100]!r} is not this server; open the address that `svs serve` printed"
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none") and path != "/":
            return 403, "cross-origin request; open the page itself"
        if method not in ("GET", "HEAD"):
            if headers.get("origin") not in (f"http://{host}", f"https://{host}"):
                return 403, "cross-origin request (wrong or missing Origin); open the page itself"
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

    async def _set_cookie(self, send: Send) -> None:
        """Move the token from the URL, which may be seen or shared, to a cookie."""
        cookie = f"{self.access.cookie}={self.access.token}; HttpOnly; SameSite=Strict; Path=/"
        await _respond(send, 303, "redirected", {"location": "/", "set-cookie": cookie})


def _name_of(host: str) -> str:
    """The host without its port."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    return name.strip("[]").lower()


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body; None if it is too large, too slow, or the client disconnected."""
    body: bytes = b""
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            while True:
                message = await receive()
                body += message.get("body", b"")
                if message["type"] != "http.request" or len(body) > MAX_BODY_BYTES:
                    return None
                if not message.get("more_body"):
                    return body
    except TimeoutError:
        return None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return the body that was read, then further messages: the application waits for the disconnection."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> MutableMapping[str, Any]:
        return messages.pop() if messages else await receive()

    return receive_again


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            given = {name.lower() for name, _ in message["headers"]}
            ours = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in given]
            message = {**message, "headers": [*message["headers"], *ours]}
        await send(message)

    return send_with_headers


async def _respond(send: Send, status: int, message: str, headers: dict[str, str] | None = None) -> None:
    body = json.dumps({"error": message}).encode()
    lines = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    start = {
        "type": "http.response.start",
        "status": status,
        "headers": [(name.encode(), value.encode()) for name, value in lines.items()],
    }
    await _with_headers(send)(start)
    await send({"type": "http.response.body", "body": body})
