"""`svs serve`: the page in which one sees the method, and samples texts by clicking."""

from __future__ import annotations

import contextlib
import socket
import sys
from typing import Annotated

from cyclopts import Parameter

from structured_voronoi.cli import WHOLE
from structured_voronoi.core.errors import SamplingError


def serve(
    *,
    host: Annotated[
        str, Parameter(help="Address to listen at. Any but this machine's own needs the token that is printed.")
    ] = "127.0.0.1",
    port: Annotated[int, WHOLE, Parameter(help="Port to listen at; 0 takes one that is free.")] = 8000,
    jobs: Annotated[int, WHOLE, Parameter(help="Long jobs at a time; further ones wait.")] = 2,
    minutes: Annotated[float, Parameter(help="Minutes after which a job is stopped.")] = 10.0,
) -> int:
    """Show the page: cells, trajectories and samplers side by side, and texts under control. Ctrl-C ends it.

    Example: svs serve --port 8000
    """
    if not 0 <= port < 2**16:
        raise SamplingError(f"--port {port} is no port", remedy="use 0 to 65535")
    if jobs < 1:
        raise SamplingError(f"--jobs {jobs} is too small", remedy="use 1 or more")
    if not 0 < minutes < float("inf"):
        raise SamplingError(f"--minutes {minutes:g} is no time", remedy="use a positive number")
    try:
        import uvicorn

        from structured_voronoi.web.app import make_app
        from structured_voronoi.web.connections import TimeoutProtocol
        from structured_voronoi.web.guard import Access
        from structured_voronoi.web.pool import Pool
    except ModuleNotFoundError as error:
        raise SamplingError(f"the page needs {error.name}", remedy="pip install 'structured-voronoi[web]'") from error

    listening = _listen(host, port)
    port = listening.getsockname()[1]
    access = Access.bound_to(host, port)
    token = f"?token={access.token}" if access.token else ""
    name = f"[{host}]" if ":" in host else host
    print(f"svs: the page is at http://{name}:{port}/{token}\nsvs: Ctrl-C ends it", file=sys.stderr, flush=True)
    config = uvicorn.Config(
        make_app(access, Pool(jobs, 60 * minutes)),
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=256,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=2,
        http=TimeoutProtocol,
        ws="none",
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """The socket, bound before anything else is started: whoever comes before the server is up waits for it."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise SamplingError(
            f"{host}:{port} cannot be listened at",
            cause=error.strerror,
            remedy="choose another --port, or --port 0 for a free one",
        ) from error
