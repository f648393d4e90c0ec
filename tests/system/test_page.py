"""`svs serve` without a browser: access checks, limits of requests, and events of jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

import structured_voronoi as sv
from structured_voronoi.web.app import make_app, read_files
from structured_voronoi.web.forms import ControlForm, Race, TextForm, Trajectories
from structured_voronoi.web.guard import HEADERS, MAX_BODY_BYTES, Access
from structured_voronoi.web.playground import make_samplers, race, show_trajectories
from structured_voronoi.web.pool import Pool
from structured_voronoi.web.text import check_control, draw_texts
from system.commands import svs
from system.serving import SCENE

HERE = "http://127.0.0.1:8000"


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
    """Rejection reports the share of proposals that satisfy the controls."""
    from structured_voronoi.web import text

    monkeypatch.setattr(text, "REPORT_SECONDS", 0.0)
    control = ControlForm(kind="keyword", value="pub")
    form = TextForm(controls=[control], sampler="rejection", n=2, max_tokens=10, finish="length")
    events = events_of(draw_texts, form)
    kinds = [event["kind"] for event in events]
    notes = [event["message"] for event in events if event["kind"] == "note"]
    assert notes
    assert all("satisfy the controls" in note for note in notes)
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
