"""The server: the page, the available choices, and streams of events."""

from __future__ import annotations

import json
import mimetypes
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from structured_voronoi.controls import bundled_controls
from structured_voronoi.samplers.registry import TEXT_SAMPLERS, find_sampler
from structured_voronoi.web.forms import PATTERNS, ControlForm, Form, Race, TextForm, Trajectories, models
from structured_voronoi.web.guard import Access, App, Guard
from structured_voronoi.web.pool import Busy, Pool

VALIDATION_MESSAGES = {
    "greater_than_equal": "must be at least {ge:g}",
    "less_than_equal": "must be at most {le:g}",
    "less_than": "must be less than {lt}",
    "float_parsing": "must be a number",
    "int_parsing": "must be a whole number",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must not be empty",
    "too_long": "must have at most {max_length} items",
    "too_short": "must have at least {min_length} items",
    "extra_forbidden": "unknown setting",
}
"""Messages by the type of Pydantic's error; other errors keep Pydantic's message."""


def make_app(access: Access, pool: Pool) -> App:
    """The application, wrapped in its access checks."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await pool.open()
        yield
        await pool.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(RequestValidationError, _answer_invalid_form)
    app.add_exception_handler(HTTPException, _answer_http_error)
    for path, (media_type, content) in read_files().items():
        app.add_api_route(path, _file_route(media_type, content), methods=["GET"])
    app.add_api_route("/api/about", about, methods=["GET"])

    @app.post("/api/trajectories")
    async def trajectories(form: Trajectories) -> Response:
        return await _stream(pool, "trajectories", form)

    @app.post("/api/race")
    async def race(form: Race) -> Response:
        return await _stream(pool, "race", form)

    @app.post("/api/text")
    async def text(form: TextForm) -> Response:
        return await _stream(pool, "text", form)

    @app.post("/api/check")
    async def check(form: ControlForm) -> Response:
        return await _stream(pool, "check", form)

    return Guard(app, access)


def read_files() -> dict[str, tuple[str, bytes]]:
    """The files of the page by path, with their media types; no other file is served."""
    pages = {
        f"/{file.name}": (mimetypes.guess_type(file.name)[0] or "text/plain", file.read_bytes())
        for file in (files("structured_voronoi") / "web" / "static").iterdir()
    }
    return {"/": pages.pop("/index.html")} | pages


async def about() -> dict[str, Any]:
    """The choices that the page offers."""
    return {
        "version": version("structured-voronoi"),
        "models": models(),
        "samplers": {
            name: {"description": description, "is_exact": name == "auto" or find_sampler(name).exact}
            for name, description in TEXT_SAMPLERS.items()
        },
        "classifiers": bundled_controls(),
        "patterns": PATTERNS,
    }


def _file_route(media_type: str, content: bytes) -> Any:
    async def respond() -> Response:
        return Response(content, media_type=media_type)

    return respond


async def _stream(pool: Pool, kind: str, form: Form) -> Response:
    """Server-sent events, one per line of the job; status 503 if too many jobs wait."""
    lines = pool.run(kind, form)
    try:
        first = await anext(lines, None)
    except Busy as error:
        return JSONResponse({"error": str(error)}, status_code=503)

    async def events() -> AsyncIterator[bytes]:
        async with aclosing(lines):
            if first is not None:
                yield _event(first)
                async for line in lines:
                    yield _event(line)

    return StreamingResponse(events(), media_type="text/event-stream")


def _event(line: bytes) -> bytes:
    """A line of JSON as an event; an empty line becomes a comment, which clients skip."""
    return b"data: " + line + b"\n" if line else b": \n\n"


async def _answer_invalid_form(request: Request, error: Exception) -> JSONResponse:
    """The first error of a form, with the name of the field."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"][1:])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] in VALIDATION_MESSAGES:
        message = VALIDATION_MESSAGES[first["type"]].format(**first.get("ctx", {}))
    if first["type"] != "value_error":
        value = json.dumps(first.get("input"), default=str)[:100]
        message = f"{field or 'form'} = {value}: {message}"
    return JSONResponse({"error": message, "field": field}, status_code=422)


async def _answer_http_error(request: Request, error: Exception) -> JSONResponse:
    """An unknown path or method, or a body that is not JSON."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, status_code=error.status_code, headers=error.headers)
