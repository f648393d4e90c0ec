"""Every Python example of the README runs, in order, as one program; every command it names exists."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import shlex
from pathlib import Path

import pytest

import structured_voronoi
from structured_voronoi.models.restaurants import descriptions
from system.commands import svs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("how-to*.md"))]
)
def test_python_examples_run(page: str) -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert examples
    exec(compile("\n".join(examples), page, "exec"), {})


def test_the_commands_of_the_model_page_run(tmp_path: Path) -> None:
    texts = [one.text for one in descriptions(60, seed=0)]
    (tmp_path / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    (tmp_path / "prompts.txt").write_text("Near the old bridge\nThe Golden Lantern is\n", encoding="utf-8")
    page = (ROOT / "docs" / "how-to-model.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\$ (svs .*)$", page, flags=re.MULTILINE)
    assert len(commands) == 9
    for command in commands:
        svs(*shlex.split(command)[1:], cwd=tmp_path)


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
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#:]+\.(?:md|png))", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


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
