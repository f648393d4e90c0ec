"""Every Python example of the README runs, in order, as one program; every command it names exists."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import structured_voronoi

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(examples) >= 3
    exec(compile("\n".join(examples), "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_commands_exist() -> None:
    from structured_voronoi.cli import app
    from structured_voronoi.experiments import EXPERIMENTS

    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for words in re.findall(r"^\$ (make|svs) (\w+) ?(\w*)", README, flags=re.MULTILINE):
        if words[0] == "make":
            assert f"\n{words[1]}:" in makefile
        else:
            assert words[1] in app
            assert words[1] != "reproduce" or words[2] in EXPERIMENTS


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#]+\.md)", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


@pytest.mark.parametrize(
    "name", [module.name for module in pkgutil.walk_packages(structured_voronoi.__path__, "structured_voronoi.")]
)
def test_docstring_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
