"""What the server answers: the page, what it can offer, and streams of events."""

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

MISTAKES = {
    "greater_than_equal": "it must be at least {ge:g}",
    "less_than_equal": "it must be at most {le:g}",
    "less_than": "it must be less than {lt}",
    "float_parsing": "it must be a number",
    "int_parsing": "it must be a whole number",
    "string_too_long": "it must have at most {max_length} characters",
    "string_too_short": "it must not be empty",
    "too_long": "there may be at most {max_length}",
    "too_short": "there must be at least {min_length}",
    "extra_forbidden": "there is no such setting",
}
"""What is wrong with a field, in words, by the name that Pydantic has for it; it has words of its own for the rest."""


def make_app(access: Access, pool: Pool) -> App:
    """The application, behind its guard."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await pool.open()
        yield
        await pool.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(RequestValidationError, _explain)
    app.add_exception_handler(HTTPException, _refuse)
    for path, (kind, content) in read_files().items():
        app.add_api_route(path, _file(kind, content), methods=["GET"])
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
    """The page's own files by their addresses, each with its type; nothing else of the disk is ever served."""
    found = {
        f"/{file.name}": (mimetypes.guess_type(file.name)[0] or "text/plain", file.read_bytes())
        for file in (files("structured_voronoi") / "web" / "static").iterdir()
    }
    return {"/": found.pop("/index.html")} | found


async def about() -> dict[str, Any]:
    """What can be chosen on the page."""
    return {
        "version": version("structured-voronoi"),
        "models": models(),
        "samplers": {
            name: {"words": words, "is_exact": name == "auto" or find_sampler(name).exact}
            for name, words in TEXT_SAMPLERS.items()
        },
        "classifiers": bundled_controls(),
        "patterns": PATTERNS,
    }


def _file(kind: str, content: bytes) -> Any:
    async def answer() -> Response:
        return Response(content, media_type=kind)

    return answer


async def _stream(pool: Pool, kind: str, form: Form) -> Response:
    """Server-sent events, one for each line of the job; a refusal where too many wait."""
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
    """A line of JSON as an event; a comment, which clients skip, where there is none."""
    return b"data: " + line + b"\n" if line else b": \n\n"


async def _explain(request: Request, error: Exception) -> JSONResponse:
    """The first mistake of a form in words: which field, what it holds, and what it should."""
    assert isinstance(error, RequestValidationError)
    mistake = error.errors()[0]
    where = ".".join(str(part) for part in mistake["loc"][1:])
    words = mistake["msg"].removeprefix("Value error, ")
    if mistake["type"] in MISTAKES:
        words = MISTAKES[mistake["type"]].format(**mistake.get("ctx", {}))
    given = json.dumps(mistake.get("input"), default=str)[:100]
    said = words if mistake["type"] == "value_error" else f"{where or 'the form'} = {given}: {words}"
    return JSONResponse({"error": said}, status_code=422)


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    """No such address, no such method, or no JSON: told like every other mistake."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, status_code=error.status_code, headers=error.headers)
