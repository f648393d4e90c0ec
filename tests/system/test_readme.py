"""Every code block of the README and of docs/ runs; every link leads somewhere; the reference names what is public."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from importlib.metadata import version
from pathlib import Path

import pytest

import structured_voronoi
from system.pages import PAGES, ROOT, blocks, commands, run_page

HOW_TO_CONTROL = "docs/how-to-control.md"
"""Run by test_control_command.py, which looks at what it writes."""
WITH_CODE = [page for page in PAGES if any(block.kind in ("python", "console") for block in blocks(page))]


@pytest.mark.parametrize("page", [page for page in WITH_CODE if page != HOW_TO_CONTROL])
def test_every_block_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(page, tmp_path, monkeypatch)


def test_blocks_are_of_a_known_kind() -> None:
    """A block that nothing runs must say that it is no program."""
    for page in PAGES:
        for block in blocks(page):
            assert block.title or block.kind in ("python", "console", "text", "csv", "bibtex"), f"{page}: {block}"
        text = (ROOT / page).read_text(encoding="utf-8")
        assert len(re.findall("^```", text, flags=re.MULTILINE)) == 2 * len(blocks(page)), page


def test_few_commands_are_not_run() -> None:
    """Those that install, fetch or stay; whoever adds one adds it here."""
    found = {
        command.written
        for page in PAGES
        for block in blocks(page)
        if block.kind == "console" and not block.title
        for command in commands(block)
        if not command.is_run
    }
    assert found == {
        "make demo",
        "make docs",
        "make test",
        "pip install --constraint constraints.txt .",
        "pip install '.[web]' --constraint constraints.txt",
        "svs serve",
        "svs sample -n 4096 --control keyword=river --workers ray://head:10001 --checkpoint run --resume",
        "svs sample -n 4096 --prompts prompts.txt --workers ray://head:10001 --checkpoint run --resume",
    }


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#:]+)[)#]", text):
            assert (ROOT / page).parent.joinpath(link).exists(), f"{page}: {link}"


def test_the_reference_names_all_that_is_public() -> None:
    named = set(re.findall(r"^::: structured_voronoi\.(\S+)", (ROOT / "docs/api.md").read_text(), flags=re.MULTILINE))
    assert named >= set(structured_voronoi.__all__)


def test_the_citation_is_of_this_version() -> None:
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert f"version: {version('structured-voronoi')}" in lines


def test_docstring_examples() -> None:
    """Of the package itself and of every module that holds one."""
    names = ["structured_voronoi"]
    names += [module.name for module in pkgutil.walk_packages(structured_voronoi.__path__, "structured_voronoi.")]
    examples = 0
    for name in names:
        found = doctest.testmod(importlib.import_module(name))
        assert found.failed == 0, name
        examples += found.attempted
    assert examples >= 10
