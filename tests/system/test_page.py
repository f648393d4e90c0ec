"""`svs serve` without a browser: access checks, limits of requests, events of jobs, and worker processes."""

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
from fastapi.testclient import TestClient

import structured_voronoi as sv
from structured_voronoi.web import connections
from structured_voronoi.web import pool as pools
from structured_voronoi.web.app import make_app, read_files
from structured_voronoi.web.forms import ControlForm, Race, TextForm, Trajectories
from structured_voronoi.web.guard import HEADERS, MAX_BODY_BYTES, Access
from structured_voronoi.web.playground import make_samplers, race, show_trajectories
from structured_voronoi.web.pool import Busy, Pool
from structured_voronoi.web.text import check_control, draw_texts
from system.commands import svs
from system.serving import serving

HERE = "http://127.0.0.1:8000"
SCENE: dict[str, Any] = {
    "points": [(-1.2, 0.9), (0.1, 1.3), (1.4, 0.4), (0.3, -0.2), (-0.7, -1.1)],
    "weights": [5, 20, 30, 8, 25],
}
LONG_JOB = TextForm(sampler="svs+refresh", warmup=1000, n=16)


def client(access: Access = Access(), base_url: str = HERE, **headers: str) -> TestClient:  # noqa: B008
    """A client that sends requests as the page does; no worker process is started."""
    sent = {"origin": base_url} | {name.replace("_", "-"): value for name, value in headers.items()}
    return TestClient(make_app(access, Pool()), base_url=base_url, headers=sent, follow_redirects=False)


def error_of(answer: Any) -> str:
    return str(answer.json()["error"])


def events_of(make: Any, form: Any) -> list[dict[str, Any]]:
    """All events of a job, after a round trip through JSON."""
    events: list[dict[str, Any]] = []
    make(form, lambda event: events.append(json.loads(json.dumps(event, allow_nan=False))))
    return events


# ---- access


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8000", "localhost.evil.example", ""])
def test_foreign_hosts_are_rejected(host: str) -> None:
    """Even if the name resolves to this machine (DNS rebinding)."""
    for path in ("/", "/api/about", "/main.js"):
        answer = client().get(path, headers={"host": host})
        assert answer.status_code == 421
        assert "svs serve" in error_of(answer)


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "[::1]:8000", "LOCALHOST"])
def test_loopback_hosts_are_accepted(host: str) -> None:
    assert client().get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1:9000", "null", ""])
def test_cross_origin_requests_are_rejected(origin: str) -> None:
    answer = client().post("/api/check", json={"kind": "keyword", "value": "pub"}, headers={"origin": origin})
    assert answer.status_code == 403
    assert "Origin" in error_of(answer)


def test_requests_without_origin_or_with_a_form_body_are_rejected() -> None:
    page = client()
    del page.headers["origin"]
    assert page.post("/api/check", json={}).status_code == 403
    assert client().post("/api/check", data={"kind": "keyword"}).status_code == 415
    assert client(sec_fetch_site="cross-site").get("/api/about").status_code == 403
    assert client(sec_fetch_site="cross-site").get("/").status_code == 200  # a link to the page


def test_other_addresses_require_a_token() -> None:
    access = Access.bound_to("0.0.0.0", 8000)
    assert access.token is not None
    assert len(access.token) >= 32
    assert access.token not in repr(access)
    base = "http://192.168.1.7:8000"
    for given in ("", "?token=", "?token=wrong", f"?token={access.token[:-1]}"):
        answer = client(access, base).get(f"/{given}")
        assert answer.status_code == 403
        assert "token" in error_of(answer)
    assert client(access, base).post("/api/check", json={}).status_code == 403
    assert client(access, base, cookie="svs-8000=wrong").get("/api/about").status_code == 403
    assert client(access, base, cookie="\x01;=").get("/api/about").status_code == 403
    redirect = client(access, base).get(f"/?token={access.token}")
    assert (redirect.status_code, redirect.headers["location"]) == (303, "/")
    cookie = redirect.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert client(access, base, cookie=cookie.split(";")[0]).get("/api/about").status_code == 200
    assert Access.bound_to("127.0.0.1", 8000).token is None


def test_every_response_has_the_security_headers() -> None:
    page = client()
    answers = [page.get("/"), page.get("/api/about"), page.get("/nothing")]
    answers += [page.post("/api/text", json={"n": 0}), page.get("/", headers={"host": "evil.example"})]
    for answer in answers:
        for name, value in HEADERS.items():
            assert answer.headers[name] == value
    policy = HEADERS["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    page = page.get("/").text
    assert "<script>" not in page
    assert " style=" not in page
    assert " onclick" not in page


# ---- requests and their limits


def test_the_page_is_small_and_complete() -> None:
    files = read_files()
    assert sum(len(content) for _, content in files.values()) <= 300_000
    page = client()
    for path, (kind, content) in files.items():
        answer = page.get(path)
        assert answer.content == content
        assert answer.headers["content-type"].startswith(kind)
        assert b"//" not in content.replace(b"http://www.w3.org/", b"").replace(b"// ", b"") or path.endswith(".js")
    for path in ("/../app.py", "/%2e%2e/app.py", "/etc/passwd", "/static/main.js", "/docs", "/openapi.json"):
        assert page.get(path).status_code == 404


def test_choices_are_the_installed_models_samplers_and_classifiers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    choices = client().get("/api/about").json()
    assert list(choices["models"]) == ["bundled"]
    assert choices["samplers"]["langevin"]["is_exact"] is False
    assert "Italian" in choices["classifiers"]["food"]


@pytest.mark.parametrize(
    ("path", "form", "expected"),
    [
        ("text", {"n": 0}, "n = 0: must be at least 1"),
        ("text", {"n": 65}, "64"),
        ("text", {"n": "many"}, "many"),
        ("text", {"max_tokens": 201}, "200"),
        ("text", {"warmup": 1001}, "1000"),
        ("text", {"seed": -1}, "seed"),
        ("text", {"prompt": "x" * 2001}, "2000"),
        ("text", {"model": "../../etc"}, "unknown model"),
        ("text", {"model": "gpt2"}, "choose from bundled"),
        ("text", {"sampler": "magic"}, "unknown sampler 'magic'"),
        ("text", {"device": "cuda"}, "device"),
        (
            "text",
            {"controls": [{"kind": "food", "value": "Italian", "weight": -1}]},
            "weight = -1: must be at least 0",
        ),
        ("text", {"controls": [{"kind": "food", "value": "Italian", "weight": "heavy"}]}, "weight"),
        ("text", {"controls": [{"kind": "food", "value": "Martian"}]}, "no label 'Martian'"),
        ("text", {"controls": [{"kind": "food", "value": "Italian", "negated": True}]}, "cannot be negated"),
        ("text", {"controls": [{"kind": "keyword", "value": "a"}] * 7}, "6"),
        ("check", {"kind": "os:system", "value": "x"}, "unknown control 'os:system'"),
        ("check", {"kind": "./folder", "value": "x"}, "unknown control './folder'"),
        ("check", {"kind": "not keyword", "value": "x"}, "unknown control"),
        ("check", {"kind": "regex", "value": "a" * 201}, "200"),
        ("race", {**SCENE, "steps": 1001}, "1000"),
        ("race", {**SCENE, "chains": 2049}, "2048"),
        ("trajectories", {**SCENE, "weights": [1, 2, 3]}, "3 weights for 5 points"),
        ("trajectories", {**SCENE, "points": [(0, 0)] * 5}, "too close"),
        ("trajectories", {**SCENE, "points": [(9, 0)] * 5}, "points.0.0 = 9"),
        ("trajectories", {**SCENE, "start": 5}, "not a cell"),
        ("trajectories", [], "form"),
    ],
)
def test_invalid_requests_name_the_field_and_its_limit(path: str, form: Any, expected: str) -> None:
    answer = client().post(f"/api/{path}", json=form)
    assert answer.status_code == 422
    assert expected in error_of(answer)


def test_invalid_bodies_are_rejected() -> None:
    page = client(content_type="application/json")
    assert page.post("/api/text", content=b"{").status_code == 422
    assert page.post("/api/text", content=b'{"seed": NaN}').status_code == 422
    assert page.post("/api/text", content=b"\xff\xfe").status_code in (400, 422)
    assert "unicode" in error_of(page.post("/api/text", content=b'{"prompt": "\\ud800"}'))
    large = page.post("/api/text", content=b" " * (MAX_BODY_BYTES + 1))
    assert large.status_code == 413
    assert str(MAX_BODY_BYTES) in error_of(large)
    for answer in (
        page.put("/api/text", content=b"{}"),
        page.get("/nothing"),
        page.post("/api/text", content=b"[" * 20_000),
    ):
        assert error_of(answer)
        assert answer.status_code in (400, 404, 405)


def test_controls_are_written_as_on_the_command_line() -> None:
    """An @ in a value is not read as a weight, and no value selects another kind of control."""
    control = ControlForm(kind="keyword", value="a@2", weight=1.5, negated=True)
    assert control.written == "not keyword=a@2@1.5"
    assert events_of(check_control, control) == [{"kind": "checked"}]
    with pytest.raises(sv.SamplingError, match="not a regular expression"):
        check_control(ControlForm(kind="regex", value="(a"), print)


# ---- jobs


@pytest.mark.parametrize("walls", ["open", "closed", "equal"])
def test_trajectories_continue_each_other(walls: str) -> None:
    """The first begins in the requested cell; each leads to the next draw of the chain."""
    events = events_of(show_trajectories, Trajectories(**SCENE, walls=walls, turn=2, seed=3, start=2, count=12))
    cell, met = 2, set()
    for event in events:
        assert event["legs"][0]["cell"] == cell
        cell = event["cell"]
        assert event["legs"][-1]["cell"] == cell
        met |= {leg["meets"] for leg in event["legs"]}
    assert met == {"refraction", "end", "passage" if walls == "open" else "reflection"}
    assert len(events) == 12
    assert len({event["cell"] for event in events}) > 1


def test_the_comparison_separates_exact_and_biased_samplers() -> None:
    form = Race(**SCENE, scale=0.6, chains=512, steps=24)
    divergences = [event for event in events_of(race, form) if event["kind"] == "divergence"]
    last = divergences[-1]
    assert last["step"] == 24
    assert last["draws"] == 12 * 512
    assert set(last["js"]) == set(make_samplers(form))
    assert last["js"]["svs"] < divergences[0]["js"]["svs"] / 10
    assert last["js"]["svs"] < 10 * last["floor"]
    assert last["js"]["langevin"] > 100 * last["floor"]
    short = form.model_copy(update={"steps": 4})
    again = [event for event in events_of(race, short) if event["kind"] == "divergence"]
    assert [event["js"] for event in again] == [event["js"] for event in divergences[:4]]


def test_texts_equal_those_of_the_command(tmp_path: Path) -> None:
    out = tmp_path / "texts.jsonl"
    words = ("--sampler", "svs+refresh", "--warmup", "2", "--max-tokens", "12", "--finish", "length", "--seed", "5")
    svs("sample", "-n", "3", "--control", "food=Italian@2", *words, "--out", str(out))
    form = TextForm(
        controls=[ControlForm(kind="food", value="Italian", weight=2)],
        sampler="svs+refresh", warmup=2, max_tokens=12, finish="length", n=3, seed=5,
    )  # fmt: skip
    events = events_of(draw_texts, form)
    assert [line for event in events if event["kind"] == "texts" for line in event["texts"]] == [
        json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()
    ]
    kinds = [event["kind"] for event in events]
    assert kinds.index("planned") < kinds.index("chains") < kinds.index("texts")
    chains = next(event for event in events if event["kind"] == "chains")
    assert (chains["step"], chains["steps"], len(chains["pieces"]), len(chains["pieces"][0])) == (1, 3, 3, 12)
    assert list(chains["controls"]) == ["food=Italian"]
    finished = events[kinds.index("texts")]["texts"][0]
    assert kinds.count("status") == 1
    assert 0 < finished["food=Italian"] <= 1


def test_notes_report_progress_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for a start reports its redraws, rejection the share of accepted proposals."""
    from structured_voronoi.web import text

    monkeypatch.setattr(text, "REPORT_SECONDS", 0.0)
    control = ControlForm(kind="keyword", value="pub")
    for sampler, expected in (("refresh", "2 starts found"), ("rejection", "satisfy the controls")):
        form = TextForm(controls=[control], sampler=sampler, warmup=0, n=2, max_tokens=10, finish="length")
        events = events_of(draw_texts, form)
        kinds = [event["kind"] for event in events]
        notes = [event["message"] for event in events if event["kind"] == "note"]
        assert notes
        assert all(expected in note for note in notes)
        assert kinds.index("planned") < kinds.index("note") < kinds.index("texts")


def test_controlled_texts_come_with_a_probability() -> None:
    """With the default sampler."""
    form = TextForm(controls=[ControlForm(kind="keyword", value="pub")], max_tokens=8, finish="length", n=2)
    events = events_of(draw_texts, form)
    assert "chains" not in {event["kind"] for event in events}
    found = events[-1]
    assert found["kind"] == "probability"
    assert "95 %" in found["estimate"]
    assert 0 < found["effective_share"] <= 1


# ---- worker processes


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
