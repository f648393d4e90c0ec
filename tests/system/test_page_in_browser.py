"""The page in Chromium, used with mouse and keyboard."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from system.serving import serving

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (extra dev)")
expect = sync_api.expect

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
AXE = Path(os.environ.get("AXE_CORE", ROOT / ".venv" / "axe.min.js"))
SCREENSHOTS = ROOT / "results" / "page"
TIMEOUT = 120_000
"""Milliseconds; processes start slowly on a busy machine."""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; apt-get install chromium")
OpenTab = Callable[..., Any]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("cache")) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_tab(address: str, browser: Any) -> Iterator[OpenTab]:
    """Open a tab of the page. Requests to other servers and errors in the console fail the test."""
    problems: list[str] = []
    contexts = []

    def open_one(fragment: str, expects_errors: bool = False, **settings: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(TIMEOUT)
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on(
            "console",
            lambda message: problems.append(message.text) if message.type == "error" and not expects_errors else None,
        )
        tab.on("request", lambda request: None if is_ours(request.url) else problems.append(request.url))
        tab.goto(f"{address}/{fragment}")
        return tab

    def is_ours(url: str) -> bool:
        return url.startswith((f"{address}/", "blob:"))

    yield open_one
    for context in contexts:
        context.close()
    assert problems == []


def save_screenshot(tab: Any, name: str) -> None:
    """Save a screenshot for manual review."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    tab.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


def expect_text(locator: Any, pattern: str) -> None:
    expect(locator).to_have_text(re.compile(pattern), timeout=TIMEOUT)


def downloaded(tab: Any) -> list[dict[str, Any]]:
    with tab.expect_download() as download:
        tab.click("#download")
    assert download.value.suggested_filename == "texts.jsonl"
    return [json.loads(line) for line in Path(download.value.path()).read_text(encoding="utf-8").splitlines()]


def test_points_are_dragged_and_samplers_compared(open_tab: OpenTab) -> None:
    tab = open_tab("")
    expect_text(tab.locator("#story"), "token|trajectory")
    knob = tab.locator(".knob").first
    before, box = knob.get_attribute("aria-label"), knob.locator(".halo").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    tab.mouse.move(x, y)
    tab.mouse.down()
    tab.mouse.move(x + 60, y + 40, steps=4)
    tab.mouse.up()
    expect(knob).not_to_have_attribute("aria-label", str(before))
    moved = knob.get_attribute("aria-label")
    expect(tab).to_have_url(re.compile("#playground.points="))
    expect_text(tab.locator("#story"), "token|trajectory")
    expect(tab.locator(".trail").first).to_have_attribute("d", re.compile("L"))

    tab.click("#run")
    lines = tab.locator("#curve .line")
    expect(lines.first).to_have_attribute("d", re.compile("(L.*){9}"), timeout=TIMEOUT)
    heights = [[float(y) for y in re.findall(r",([0-9.]+)", str(line.get_attribute("d")))] for line in lines.all()]
    exact, langevin = heights[0], heights[3]
    assert exact[-1] - exact[0] > 60  # y grows downwards
    assert abs(langevin[-1] - langevin[0]) < 30
    expect_text(tab.locator(".mini h3 span").first, r"^\d\.\d × floor")
    expect_text(tab.locator(".mini h3 span").nth(3), r"^[\d,]{3,} × floor")
    save_screenshot(tab, "playground")
    tab.click("#run")
    expect_text(tab.locator("#race-status"), "stopped after .* draws")

    shared = open_tab("#" + tab.url.partition("#")[2])
    expect(shared.locator(".knob").first).to_have_attribute("aria-label", str(moved))


def test_the_keyboard_moves_points_and_steps_through_events(open_tab: OpenTab) -> None:
    tab = open_tab("", reduced_motion="reduce", viewport={"width": 390, "height": 844})
    expect(tab.locator("#play")).to_have_text("Play")
    knob = tab.locator(".knob").nth(2)
    knob.focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Shift+ArrowUp")
    expect(knob).to_have_attribute("aria-label", "C 30 %, token at 1.45, 0.65")
    tab.locator("#weights input").first.focus()
    tab.keyboard.press("End")
    expect(tab.locator("#weights output").first).to_have_text(re.compile("51|5[0-9]"))
    tab.select_option("[name=walls]", "closed")
    expect(tab.locator(".particle")).to_have_attribute("visibility", "visible", timeout=TIMEOUT)
    for _ in range(6):
        tab.click("#next")
    expect_text(tab.locator("#story"), "reflect|refract|trajectory ends")
    tab.click("#more")
    expect(tab.locator("#count")).to_have_text("7 tokens")
    assert tab.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    save_screenshot(tab, "playground-phone")


def test_texts_are_drawn_stopped_and_downloaded(open_tab: OpenTab) -> None:
    tab = open_tab("#text")
    expect(tab.locator(".control")).to_have_count(1)
    tab.fill("[name=prompt]", "Near the old bridge")
    tab.fill("[name=n]", "3")
    tab.select_option("[name=sampler]", "svs+refresh")
    tab.click("summary")
    tab.fill("[name=warmup]", "1000")
    tab.click("#draw")
    expect(tab.locator(".chains li")).to_have_count(3, timeout=TIMEOUT)
    expect(tab.locator(".chains .lit").first).to_be_attached(timeout=TIMEOUT)  # a token has changed
    expect_text(tab.locator("#status"), "left")
    labels = tab.locator("#log-targets g text").all_text_contents()
    assert [label for label in labels if not re.fullmatch(r"[-−]?[0-9.]+", label)] == []
    save_screenshot(tab, "text-chains")
    tab.click("#stop")
    expect_text(tab.locator("#status"), "Stopped: 3 texts")
    lines = downloaded(tab)
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert all(line["stopped_at"] < line["steps"] == 1001 for line in lines)
    assert tab.locator("#texts tbody tr").count() == 3

    tab.select_option("[name=sampler]", "rejection")
    tab.click("#draw")
    expect_text(tab.locator("#status"), "Done: 3 texts")
    lines = downloaded(tab)
    assert list(lines[0]) == [
        "prompt", "index", "text", "tokens", "finish_reason", "log_prob", "log_target", "food=Italian"
    ]  # fmt: skip
    expect(tab.locator("#texts tbody td.words").first).to_have_text(lines[0]["prompt"] + lines[0]["text"])
    expect_text(tab.locator("#messages"), "error bound 0")
    save_screenshot(tab, "text")


def test_default_settings_and_chains_of_one_step_draw_texts(open_tab: OpenTab) -> None:
    tab = open_tab("#text")
    expect(tab.locator(".control")).to_have_count(1)
    tab.click("#draw")
    expect_text(tab.locator("#status"), "Done: 8 texts")
    expect_text(tab.locator("#probability"), "95 %")
    tab.select_option("[name=sampler]", "svs+refresh")
    tab.click("summary")
    tab.fill("[name=warmup]", "0")
    tab.fill("[name=n]", "2")
    tab.click("#draw")
    expect_text(tab.locator("#status"), "Done: 2 texts")


def test_errors_are_shown_beside_their_field(open_tab: OpenTab) -> None:
    tab = open_tab("#text", expects_errors=True)
    tab.fill("[name=weight]", "-1")
    expect_text(tab.locator(".control .problem"), "weight = -1: must be at least 0")
    expect(tab.locator("[name=weight]")).to_have_attribute("aria-invalid", "true")
    tab.click("#draw")
    expect_text(tab.locator("#problem"), "controls.0.weight = -1")
    save_screenshot(tab, "text-error")
    tab.fill("[name=weight]", "1")
    expect(tab.locator(".control .problem")).to_have_text("", timeout=TIMEOUT)
    tab.select_option("[name=kind]", "regex")
    tab.fill("[name=value]", "(pub")
    expect_text(tab.locator(".control .problem"), "not a regular expression")
    tab.fill("[name=value]", "(pub)")
    expect(tab.locator(".control .problem")).to_have_text("", timeout=TIMEOUT)
    tab.fill("[name=max_tokens]", "3")
    tab.fill("[name=value]", "z{50}")
    tab.click("#draw")
    expect_text(tab.locator("#problem"), "no text of 3 tokens.* can satisfy")


def test_links_with_missing_models_or_controls_are_reported(open_tab: OpenTab) -> None:
    controls = json.dumps([["food", "French", 2, 0], ["magic", "x", 1, 0]])
    tab = open_tab(f"#text?model=gone&n=3&action=x&controls={controls}")
    expect_text(tab.locator("#problem"), "Not available here: the model gone, the control magic")
    expect(tab.locator("[name=model]")).to_have_value("bundled")
    expect(tab.locator("[name=n]")).to_have_value("3")
    expect(tab.locator(".control")).to_have_count(1)
    expect(tab.locator("[name=weight]")).to_have_value("2")
    incomplete = open_tab("#text?controls=[[")
    expect_text(incomplete.locator("#problem"), "incomplete")


def test_tabs_change_by_keyboard_and_keep_their_settings(open_tab: OpenTab) -> None:
    tab = open_tab("#text")
    expect(tab.locator(".control")).to_have_count(1)
    assert tab.evaluate("() => scrollY") == 0
    tab.keyboard.press("Tab")
    expect(tab.locator(".skip")).to_be_focused()
    tab.keyboard.press("Enter")
    expect(tab.locator("#content")).to_be_focused()
    expect(tab.locator("#text-title")).to_be_visible()
    tab.fill("[name=prompt]", "In the city centre")
    expect(tab).to_have_url(re.compile("prompt=In"))
    tab.locator("[data-tab=playground]").press("Enter")
    expect(tab).to_have_url(re.compile("#playground.points="))
    tab.locator("[data-tab=text]").press("Enter")
    expect(tab).to_have_url(re.compile("#text.*prompt=In"))
    expect(tab.locator("[name=prompt]")).to_have_value("In the city centre")


def test_two_browser_tabs_draw_texts_at_once(open_tab: OpenTab) -> None:
    tabs = [open_tab("#text", color_scheme=scheme) for scheme in ("light", "dark")]
    for tab, label in zip(tabs, ("Italian", "French"), strict=True):
        expect(tab.locator(".control")).to_have_count(1)
        tab.fill("[name=n]", "2")
        tab.select_option("[name=sampler]", "rejection")
        tab.select_option("[name=value]", label)
        tab.click("#draw")
    for tab, label in zip(tabs, ("Italian", "French"), strict=True):
        expect_text(tab.locator("#status"), "Done: 2 texts")
        assert [line[f"food={label}"] > 0.5 for line in downloaded(tab)] == [True, True]
    save_screenshot(tabs[1], "text-dark")


@pytest.mark.skipif(not AXE.is_file(), reason=f"there is no axe-core at {AXE}; `make test` fetches it where npm is")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("fragment", ["", "#text"])
def test_axe_finds_no_serious_accessibility_problem(open_tab: OpenTab, fragment: str, scheme: str) -> None:
    tab = open_tab(fragment, color_scheme=scheme, reduced_motion="reduce")
    expect(tab.locator(".control" if fragment else ".knob").first).to_be_visible()
    tab.evaluate(AXE.read_text(encoding="utf-8") + "\n;0")
    found = tab.evaluate("() => axe.run()")
    assert len(found["passes"]) > 10
    serious = [rule for rule in found["violations"] if rule["impact"] in ("serious", "critical")]
    assert [(rule["id"], [node["target"] for node in rule["nodes"]]) for rule in serious] == []
