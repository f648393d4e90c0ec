"""`svs serve` without a browser: who may ask, for what, and what becomes of jobs whose client has left."""

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
from structured_voronoi.web.guard import HEADERS, LARGEST_BODY, Access
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
ENDLESS = TextForm(sampler="svs+refresh", warmup=1000, n=16)


def client(access: Access = Access(), base_url: str = HERE, **headers: str) -> TestClient:  # noqa: B008
    """Requests as the page sends them; no process is started for them."""
    sent = {"origin": base_url} | {name.replace("_", "-"): value for name, value in headers.items()}
    return TestClient(make_app(access, Pool()), base_url=base_url, headers=sent, follow_redirects=False)


def said(answer: Any) -> str:
    return str(answer.json()["error"])


def collected(make: Any, form: Any) -> list[dict[str, Any]]:
    """All that a job says, each thing as JSON would bring it."""
    events: list[dict[str, Any]] = []
    make(form, lambda event: events.append(json.loads(json.dumps(event, allow_nan=False))))
    return events


# ---- who may ask


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8000", "localhost.evil.example", ""])
def test_other_hosts_are_refused(host: str) -> None:
    """A name that was rebound to this machine is still another name."""
    for path in ("/", "/api/about", "/main.js"):
        answer = client().get(path, headers={"host": host})
        assert answer.status_code == 421
        assert "svs serve" in said(answer)


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "[::1]:8000", "LOCALHOST"])
def test_names_of_this_machine_are_served(host: str) -> None:
    assert client().get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1:9000", "null", ""])
def test_requests_of_other_sites_are_refused(origin: str) -> None:
    answer = client().post("/api/check", json={"kind": "keyword", "value": "pub"}, headers={"origin": origin})
    assert answer.status_code == 403
    assert "Origin" in said(answer)


def test_requests_without_an_origin_or_as_a_form_are_refused() -> None:
    asking = client()
    del asking.headers["origin"]
    assert asking.post("/api/check", json={}).status_code == 403
    assert client().post("/api/check", data={"kind": "keyword"}).status_code == 415
    assert client(sec_fetch_site="cross-site").get("/api/about").status_code == 403
    assert client(sec_fetch_site="cross-site").get("/").status_code == 200  # a link to the page


def test_a_token_is_needed_elsewhere() -> None:
    access = Access.bound_to("0.0.0.0", 8000)
    assert access.token is not None
    assert len(access.token) >= 32
    assert access.token not in repr(access)
    base = "http://192.168.1.7:8000"
    for given in ("", "?token=", "?token=wrong", f"?token={access.token[:-1]}"):
        answer = client(access, base).get(f"/{given}")
        assert answer.status_code == 403
        assert "token" in said(answer)
    assert client(access, base).post("/api/check", json={}).status_code == 403
    assert client(access, base, cookie="svs-8000=wrong").get("/api/about").status_code == 403
    assert client(access, base, cookie="\x01;=").get("/api/about").status_code == 403
    let_in = client(access, base).get(f"/?token={access.token}")
    assert (let_in.status_code, let_in.headers["location"]) == (303, "/")
    cookie = let_in.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert client(access, base, cookie=cookie.split(";")[0]).get("/api/about").status_code == 200
    assert Access.bound_to("127.0.0.1", 8000).token is None


def test_every_answer_has_the_headers() -> None:
    asking = client()
    answers = [asking.get("/"), asking.get("/api/about"), asking.get("/nothing")]
    answers += [asking.post("/api/text", json={"n": 0}), asking.get("/", headers={"host": "evil.example"})]
    for answer in answers:
        for name, value in HEADERS.items():
            assert answer.headers[name] == value
    policy = HEADERS["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    page = asking.get("/").text
    assert "<script>" not in page
    assert " style=" not in page
    assert " onclick" not in page


# ---- what may be asked for


def test_the_page_is_small_and_complete() -> None:
    files = read_files()
    assert sum(len(content) for _, content in files.values()) <= 300_000
    asking = client()
    for path, (kind, content) in files.items():
        answer = asking.get(path)
        assert answer.content == content
        assert answer.headers["content-type"].startswith(kind)
        assert b"//" not in content.replace(b"http://www.w3.org/", b"").replace(b"// ", b"") or path.endswith(".js")
    for path in ("/../app.py", "/%2e%2e/app.py", "/etc/passwd", "/static/main.js", "/docs", "/openapi.json"):
        assert asking.get(path).status_code == 404


def test_what_is_offered_comes_from_the_lists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    offered = client().get("/api/about").json()
    assert list(offered["models"]) == ["bundled"]
    assert offered["samplers"]["langevin"]["is_exact"] is False
    assert "Italian" in offered["classifiers"]["food"]


@pytest.mark.parametrize(
    ("path", "form", "words"),
    [
        ("text", {"n": 0}, "n = 0: it must be at least 1"),
        ("text", {"n": 65}, "64"),
        ("text", {"n": "many"}, "many"),
        ("text", {"max_tokens": 201}, "200"),
        ("text", {"warmup": 1001}, "1000"),
        ("text", {"seed": -1}, "seed"),
        ("text", {"prompt": "x" * 2001}, "2000"),
        ("text", {"model": "../../etc"}, "no model"),
        ("text", {"model": "gpt2"}, "choose from bundled"),
        ("text", {"sampler": "magic"}, "no sampler 'magic'"),
        ("text", {"device": "cuda"}, "device"),
        (
            "text",
            {"controls": [{"kind": "food", "value": "Italian", "weight": -1}]},
            "weight = -1: it must be at least 0",
        ),
        ("text", {"controls": [{"kind": "food", "value": "Italian", "weight": "heavy"}]}, "weight"),
        ("text", {"controls": [{"kind": "food", "value": "Martian"}]}, "no label 'Martian'"),
        ("text", {"controls": [{"kind": "food", "value": "Italian", "negated": True}]}, "no opposite"),
        ("text", {"controls": [{"kind": "keyword", "value": "a"}] * 7}, "6"),
        ("check", {"kind": "os:system", "value": "x"}, "no control 'os:system'"),
        ("check", {"kind": "./folder", "value": "x"}, "no control './folder'"),
        ("check", {"kind": "not keyword", "value": "x"}, "no control"),
        ("check", {"kind": "regex", "value": "a" * 201}, "200"),
        ("race", {**SCENE, "steps": 1001}, "1000"),
        ("race", {**SCENE, "chains": 2049}, "2048"),
        ("trajectories", {**SCENE, "weights": [1, 2, 3]}, "3 weights for 5 points"),
        ("trajectories", {**SCENE, "points": [(0, 0)] * 5}, "upon each other"),
        ("trajectories", {**SCENE, "points": [(9, 0)] * 5}, "points.0.0 = 9"),
        ("trajectories", {**SCENE, "start": 5}, "no cell"),
        ("trajectories", [], "form"),
    ],
)
def test_limits_are_told_in_words(path: str, form: Any, words: str) -> None:
    answer = client().post(f"/api/{path}", json=form)
    assert answer.status_code == 422
    assert words in said(answer)


def test_bad_bodies_are_refused() -> None:
    asking = client(content_type="application/json")
    assert asking.post("/api/text", content=b"{").status_code == 422
    assert asking.post("/api/text", content=b'{"seed": NaN}').status_code == 422
    assert asking.post("/api/text", content=b"\xff\xfe").status_code in (400, 422)
    assert "unicode" in said(asking.post("/api/text", content=b'{"prompt": "\\ud800"}'))
    large = asking.post("/api/text", content=b" " * (LARGEST_BODY + 1))
    assert large.status_code == 413
    assert str(LARGEST_BODY) in said(large)
    for answer in (
        asking.put("/api/text", content=b"{}"),
        asking.get("/nothing"),
        asking.post("/api/text", content=b"[" * 20_000),
    ):
        assert said(answer)
        assert answer.status_code in (400, 404, 405)


def test_the_written_control_is_the_command_lines() -> None:
    """What follows an @ in a value is not a weight, and no value leads to another kind of control."""
    control = ControlForm(kind="keyword", value="a@2", weight=1.5, negated=True)
    assert control.written == "not keyword=a@2@1.5"
    assert collected(check_control, control) == [{"kind": "checked"}]
    with pytest.raises(sv.SamplingError, match="not a regular expression"):
        check_control(ControlForm(kind="regex", value="(a"), print)


# ---- what is computed


@pytest.mark.parametrize("walls", ["open", "closed", "equal"])
def test_trajectories_are_those_of_the_sampler(walls: str) -> None:
    """They begin in the cell that is asked for, join, and lead to the draws of the same chain."""
    events = collected(show_trajectories, Trajectories(**SCENE, walls=walls, turn=2, seed=3, start=2, count=12))
    cell, met = 2, set()
    for event in events:
        assert event["legs"][0]["cell"] == cell
        cell = event["cell"]
        assert event["legs"][-1]["cell"] == cell
        met |= {leg["meets"] for leg in event["legs"]}
    assert met == {"refraction", "end", "passage" if walls == "open" else "reflection"}
    assert len(events) == 12
    assert len({event["cell"] for event in events}) > 1


def test_the_race_shows_who_is_biased() -> None:
    form = Race(**SCENE, scale=0.6, chains=512, steps=24)
    told = [event for event in collected(race, form) if event["kind"] == "divergence"]
    last = told[-1]
    assert last["step"] == 24
    assert last["draws"] == 12 * 512
    assert set(last["js"]) == set(make_samplers(form))
    assert last["js"]["svs"] < told[0]["js"]["svs"] / 10
    assert last["js"]["svs"] < 10 * last["floor"]
    assert last["js"]["langevin"] > 100 * last["floor"]
    short = form.model_copy(update={"steps": 4})
    again = [event for event in collected(race, short) if event["kind"] == "divergence"]
    assert [event["js"] for event in again] == [event["js"] for event in told[:4]]


def test_texts_are_those_of_the_command(tmp_path: Path) -> None:
    out = tmp_path / "texts.jsonl"
    words = ("--sampler", "svs+refresh", "--warmup", "2", "--max-tokens", "12", "--finish", "length", "--seed", "5")
    svs("sample", "-n", "3", "--control", "food=Italian@2", *words, "--out", str(out))
    form = TextForm(
        controls=[ControlForm(kind="food", value="Italian", weight=2)],
        sampler="svs+refresh", warmup=2, max_tokens=12, finish="length", n=3, seed=5,
    )  # fmt: skip
    events = collected(draw_texts, form)
    assert [line for event in events if event["kind"] == "texts" for line in event["texts"]] == [
        json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()
    ]
    kinds = [event["kind"] for event in events]
    assert kinds.index("planned") < kinds.index("moving") < kinds.index("texts")
    moving = next(event for event in events if event["kind"] == "moving")
    assert (moving["step"], moving["steps"], len(moving["pieces"]), len(moving["pieces"][0])) == (1, 3, 3, 12)
    assert list(moving["controls"]) == ["food=Italian"]
    finished = events[kinds.index("texts")]["texts"][0]
    assert kinds.count("said") == 1
    assert 0 < finished["food=Italian"] <= 1


def test_what_takes_long_within_a_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that satisfies a rare control is found by many redraws, and a rejection is told by its tries."""
    from structured_voronoi.web import text

    monkeypatch.setattr(text, "SECONDS", 0.0)
    control = ControlForm(kind="keyword", value="pub")
    for sampler, words in (("refresh", "2 starts found"), ("rejection", "satisfy the controls")):
        form = TextForm(controls=[control], sampler=sampler, warmup=0, n=2, max_tokens=10, finish="length")
        events = collected(draw_texts, form)
        kinds = [event["kind"] for event in events]
        notes = [event["words"] for event in events if event["kind"] == "note"]
        assert notes
        assert all(words in note for note in notes)
        assert kinds.index("planned") < kinds.index("note") < kinds.index("texts")


def test_texts_under_control_come_with_a_probability() -> None:
    """With the form's default sampler and steps."""
    form = TextForm(controls=[ControlForm(kind="keyword", value="pub")], max_tokens=8, finish="length", n=2)
    events = collected(draw_texts, form)
    assert "moving" not in {event["kind"] for event in events}
    found = events[-1]
    assert found["kind"] == "probability"
    assert "95 %" in found["words"]
    assert 0 < found["effective_share"] <= 1


# ---- the processes


async def lines_of(pool: Pool, kind: str, form: Any, most: int = 10**6) -> list[dict[str, Any]]:
    """The first lines of a job, whose client then leaves."""
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
    """Its processes are ended whatever happens."""
    pool = Pool(**settings)
    try:
        yield pool
    finally:
        await pool.close()


async def settled(pool: Pool) -> None:
    while pool._tasks:
        await asyncio.gather(*pool._tasks, return_exceptions=True)


def test_jobs_end_with_their_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or if they do not read. A process is used again, unless it heeds no interruption; a dead one is told of."""
    monkeypatch.setattr(pools, "GRACE", 30.0)

    async def scenario() -> None:
        async with open_pool(jobs=1) as pool:
            pool._idle.append(await pools._Process.start(1))
            first = pool._idle[0].process.pid
            left = await lines_of(pool, "text", ENDLESS, most=3)
            assert left[0]["kind"] == "phase"
            await settled(pool)
            assert [idle.process.pid for idle in pool._idle] == [first]
            unread = pool.run("text", ENDLESS)
            await anext(unread)
            monkeypatch.setattr(pools, "MOST_UNREAD", 4)  # not before: on a busy machine as much comes at once
            await settled(pool)
            assert [idle.process.pid for idle in pool._idle] == [first]
            kept = [json.loads(line) async for line in unread if line]
            assert [event["kind"] for event in kept] == ["error"]  # what it has not read is not kept for it
            assert "did not keep up" in kept[0]["words"]
            monkeypatch.undo()
            monkeypatch.setattr(pools, "GRACE", 30.0)

            assert (await lines_of(pool, "check", ControlForm(kind="regex", value="(a")))[0]["kind"] == "error"
            assert await lines_of(pool, "check", ControlForm(kind="regex", value="a")) == [{"kind": "checked"}]

            monkeypatch.setattr(pools, "GRACE", 0.5)
            lines = pool.run("text", ENDLESS)
            await anext(lines)
            os.kill(first, signal.SIGSTOP)
            await lines.aclose()
            await settled(pool)
            assert pool._idle == []

            lines = pool.run("race", Race(**SCENE))
            await anext(lines)
            os.kill(pool._busy[0].process.pid, signal.SIGKILL)
            rest = [json.loads(line) async for line in lines if line]
            assert "has ended" in rest[-1]["words"]
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
            await process.end()

    asyncio.run(scenario())
    assert not (tmp_path / "executed").exists()


def test_time_and_places_are_limited() -> None:
    """A job that takes too long is stopped; another waits for its turn; too many are refused."""

    async def scenario() -> None:
        async with open_pool(jobs=1, seconds=0.5) as pool:
            found = await lines_of(pool, "text", ENDLESS)
            assert "longer than the server allows" in found[-1]["words"]
            await settled(pool)
            pool.seconds = 60
            lines = pool.run("text", ENDLESS)
            await anext(lines)
            waiting = [pool.run("race", Race(**SCENE)) for _ in range(pools.MOST_WAITING)]
            first = [json.loads(await anext(one)) for one in waiting]
            assert [event["before"] for event in first] == list(range(pools.MOST_WAITING))
            with pytest.raises(Busy, match="try again"):  # though none of the others has gone on
                await anext(pool.run("race", Race(**SCENE)))
            turns = [asyncio.create_task(anext(one)) for one in waiting]
            await asyncio.sleep(0)
            assert pool._waiting == {"turn": pools.MOST_WAITING, "place": 0}
            assert await lines_of(pool, "check", ControlForm(kind="regex", value="a")) == [{"kind": "checked"}]
            for turn in turns[1:]:
                turn.cancel()
            await lines.aclose()
            assert json.loads(await turns[0])["kind"] in ("divergence", "points")
            await waiting[0].aclose()
            await settled(pool)
            assert pool._waiting == {"turn": 0, "place": 0}
            assert not pool._turns.locked()

    asyncio.run(scenario())


def test_who_does_not_keep_up_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent, in the middle of a request, after one, or not reading the answer; but not who waits for a long one."""
    monkeypatch.setattr(connections, "PATIENCE", 0.5)

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
            http=connections.ImpatientProtocol,
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
            with socket.create_connection(("127.0.0.1", port)) as deaf:
                deaf.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
                async with asyncio.timeout(30):
                    while not server.server_state.connections:
                        await asyncio.sleep(0.05)
                    while server.server_state.connections:
                        await asyncio.sleep(0.05)
            server.should_exit = True
            await serving

    asyncio.run(scenario())


def test_the_command_serves_and_ends(tmp_path: Path) -> None:
    """With a token, as it listens at every address. Streams bring their events; who leaves gives up their turn."""
    with serving(tmp_path, "--host", "0.0.0.0", "--jobs", "1") as address:
        base, token = address.split("/?token=")
        base = base.replace("0.0.0.0", "127.0.0.1")
        port = base.rpartition(":")[2]
        headers = {"Origin": base, "Content-Type": "application/json", "Cookie": f"svs-{port}={token}"}

        def ask(path: str, form: dict[str, Any]) -> Any:
            body = json.dumps(form).encode()
            return urllib.request.urlopen(urllib.request.Request(f"{base}/api/{path}", body, headers))

        def kinds(answer: Any) -> list[str]:
            events = [part for part in answer.read().decode().split("\n\n") if part.startswith("data: ")]
            return [json.loads(event[6:])["kind"] for event in events]

        with ask("trajectories", {**SCENE, "count": 2}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert kinds(answer) == ["trajectory"] * 2
        with ask("text", ENDLESS.model_dump()) as answer:
            assert b"phase" in answer.readline()
        with ask("race", {**SCENE, "steps": 10, "chains": 8}) as answer:
            assert kinds(answer).count("divergence") == 10


def test_the_command_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--port 70000" in svs("serve", "--port", "70000", code=2).stderr
    assert "--jobs 0" in svs("serve", "--jobs", "0", code=2).stderr
    assert "cannot be listened at" in svs("serve", "--host", "192.0.2.1", code=2).stderr
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "needs uvicorn; pip install 'structured-voronoi[web]'" in svs("serve", code=2).stderr
