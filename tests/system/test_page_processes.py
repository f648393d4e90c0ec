"""`svs serve`: worker processes, slow clients, and the command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from structured_voronoi.web import connections
from structured_voronoi.web import pool as pools
from structured_voronoi.web.forms import ControlForm, Race, TextForm
from structured_voronoi.web.pool import Busy, Pool
from system.commands import svs
from system.serving import SCENE, serving

LONG_JOB = TextForm(sampler="svs+refresh", warmup=1000, n=16)


async def lines_of(pool: Pool, kind: str, form: Any, most: int = 10**6) -> list[dict[str, Any]]:
    """The first events of a job; then the client disconnects."""
    lines = pool.run(kind, form)
    found = []
    async for line in lines:
        if line:
            found.append(json.loads(line))
        if len(found) == most:
            break
    await lines.aclose()
    return found


@asynccontextmanager
async def open_pool(**settings: Any) -> AsyncIterator[Pool]:
    """A pool whose processes are always ended."""
    pool = Pool(**settings)
    try:
        yield pool
    finally:
        await pool.close()


async def settled(pool: Pool) -> None:
    while pool._tasks:
        await asyncio.gather(*pool._tasks, return_exceptions=True)


def test_jobs_end_when_their_clients_disconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if they do not read. A process is used again unless it does not stop; a dead process is reported."""
    monkeypatch.setattr(pools, "STOP_TIMEOUT", 30.0)

    async def scenario() -> None:
        async with open_pool(jobs=1) as pool:
            pool._idle.append(await pools._Process.start(1))
            first = pool._idle[0].process.pid
            left = await lines_of(pool, "text", LONG_JOB, most=3)
            assert left[0]["kind"] == "stage"
            await settled(pool)
            assert [idle.process.pid for idle in pool._idle] == [first]
            unread = pool.run("text", LONG_JOB)
            await anext(unread)  # a busy machine may send the first lines together
            monkeypatch.setattr(pools, "MAX_UNREAD_LINES", 4)
            await settled(pool)
            assert [idle.process.pid for idle in pool._idle] == [first]
            kept = [json.loads(line) async for line in unread if line]
            assert [event["kind"] for event in kept] == ["error"]  # unread lines are discarded
            assert kept[0]["code"] == "unread-events"
            monkeypatch.undo()
            monkeypatch.setattr(pools, "STOP_TIMEOUT", 30.0)

            assert (await lines_of(pool, "check", ControlForm(kind="regex", value="(a")))[0]["kind"] == "error"
            assert await lines_of(pool, "check", ControlForm(kind="regex", value="a")) == [{"kind": "checked"}]

            monkeypatch.setattr(pools, "STOP_TIMEOUT", 0.5)
            lines = pool.run("text", LONG_JOB)
            await anext(lines)
            os.kill(first, signal.SIGSTOP)
            await lines.aclose()
            await settled(pool)
            assert pool._idle == []

            lines = pool.run("race", Race(**SCENE))
            await anext(lines)
            os.kill(pool._busy[0].process.pid, signal.SIGKILL)
            rest = [json.loads(line) async for line in lines if line]
            assert rest[-1]["code"] == "worker-ended"
            await settled(pool)
            assert pool._busy == []

    asyncio.run(scenario())


def test_modules_in_the_current_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pydantic", "torch", "json"):
        (tmp_path / f"{name}.py").write_text("open('executed', 'w').close()\n")
    monkeypatch.chdir(tmp_path)

    async def scenario() -> None:
        process = await pools._Process.start(1)
        try:
            await process.loading
        finally:
            await process.kill()

    asyncio.run(scenario())
    assert not (tmp_path / "executed").exists()


def test_time_and_number_of_jobs_are_limited() -> None:
    """A job is stopped at its time limit, further jobs wait, and too many are rejected."""

    async def scenario() -> None:
        async with open_pool(jobs=1, seconds=0.5) as pool:
            found = await lines_of(pool, "text", LONG_JOB)
            assert found[-1]["code"] == "time-limit"
            await settled(pool)
            pool.seconds = 60
            lines = pool.run("text", LONG_JOB)
            await anext(lines)
            waiting = [pool.run("race", Race(**SCENE)) for _ in range(pools.MAX_WAITING_JOBS)]
            first = [json.loads(await anext(one)) for one in waiting]
            assert [event["before"] for event in first] == list(range(pools.MAX_WAITING_JOBS))
            with pytest.raises(Busy, match="try again"):  # although no other job has continued
                await anext(pool.run("race", Race(**SCENE)))
            turns = [asyncio.create_task(anext(one)) for one in waiting]
            await asyncio.sleep(0)
            assert pool._waiting == {"slot": pools.MAX_WAITING_JOBS, "process": 0}
            assert await lines_of(pool, "check", ControlForm(kind="regex", value="a")) == [{"kind": "checked"}]
            for turn in turns[1:]:
                turn.cancel()
            await lines.aclose()
            assert json.loads(await turns[0])["kind"] in ("divergence", "points")
            await waiting[0].aclose()
            await settled(pool)
            assert pool._waiting == {"slot": 0, "process": 0}
            assert not pool._slots.locked()

    asyncio.run(scenario())


def test_slow_clients_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a request, within a request, after one, or not reading; but not while waiting for a long response."""
    monkeypatch.setattr(connections, "CLIENT_TIMEOUT", 0.5)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/long":
            await asyncio.sleep(2.0)
        for _ in range(1000 if scope["path"] == "/large" else 1):
            await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})
        await send({"type": "http.response.body", "body": b"done"})

    async def scenario() -> None:
        config = uvicorn.Config(
            answer,
            http=connections.TimeoutProtocol,
            ws="none",
            lifespan="off",
            log_level="error",
            timeout_keep_alive=60,
        )
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            serving = asyncio.create_task(server.serve([listening]))
            while not server.started:
                await asyncio.sleep(0.01)
            port = listening.getsockname()[1]
            for sent in ("", "GET / HTTP/1.1\r\nHost: a\r\nX", "GET / HTTP/1.1\r\nHost: a\r\n\r\nGET"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(sent.encode())
                async with asyncio.timeout(30):
                    with contextlib.suppress(ConnectionResetError):
                        await reader.read()
                writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /long HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert b"done" in await reader.read()
            writer.close()
            with socket.create_connection(("127.0.0.1", port)) as unread:
                unread.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
                async with asyncio.timeout(30):
                    while not server.server_state.connections:
                        await asyncio.sleep(0.05)
                    while server.server_state.connections:
                        await asyncio.sleep(0.05)
            server.should_exit = True
            await serving

    asyncio.run(scenario())


def test_the_command_serves_jobs_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    """On all addresses, with a token; a client that disconnects frees its slot."""
    with serving(tmp_path, "--host", "0.0.0.0", "--jobs", "1") as address:
        base, token = address.split("/?token=")
        base = base.replace("0.0.0.0", "127.0.0.1")
        port = base.rpartition(":")[2]
        headers = {"Origin": base, "Content-Type": "application/json", "Cookie": f"svs-{port}={token}"}

        def post(path: str, form: dict[str, Any]) -> Any:
            body = json.dumps(form).encode()
            return urllib.request.urlopen(urllib.request.Request(f"{base}/api/{path}", body, headers))

        def kinds(answer: Any) -> list[str]:
            events = [part for part in answer.read().decode().split("\n\n") if part.startswith("data: ")]
            return [json.loads(event[6:])["kind"] for event in events]

        with post("trajectories", {**SCENE, "count": 2}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert kinds(answer) == ["trajectory"] * 2
        with post("text", LONG_JOB.model_dump()) as answer:
            assert b"stage" in answer.readline()
        with post("race", {**SCENE, "steps": 10, "chains": 8}) as answer:
            assert kinds(answer).count("divergence") == 10


def test_the_command_rejects_invalid_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--port 70000" in svs("serve", "--port", "70000", code=2).stderr
    assert "--jobs 0" in svs("serve", "--jobs", "0", code=2).stderr
    assert "cannot be listened at" in svs("serve", "--host", "192.0.2.1", code=2).stderr
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "needs uvicorn; pip install 'structured-voronoi[web]'" in svs("serve", code=2).stderr
