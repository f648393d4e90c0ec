"""What the documentation names exists: tests, modules, public names, commands and their options."""

from __future__ import annotations

import pydoc
import re
import sys
from collections.abc import Iterator

import pytest

import structured_voronoi
from structured_voronoi.cli import COMMANDS, app
from structured_voronoi.experiments import EXPERIMENTS
from system.pages import PAGES, ROOT, blocks

ROOTS = (ROOT, ROOT / "src", ROOT / "src/structured_voronoi", ROOT / "tests")
"""Folders to which a path in the documentation may be relative."""
TEST_SOURCES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
COMMAND_NAMES = {(*(() if parent is app else parent.name), name) for parent, name, *_ in COMMANDS}
FOREIGN_OPTIONS = {"--constraint"}
"""Options of other programs."""


def code_spans(page: str) -> list[str]:
    """The inline code of a page, each span on one line."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def exists(path: str, page: str) -> bool:
    """Is a path in the repository, written by a block of the page, or a module of Python?"""
    if "/" not in path:
        is_python = path.removesuffix(".py") in sys.stdlib_module_names
        return is_python or any(ROOT.glob(f"[!.]*/**/{path}")) or any(block.title == path for block in blocks(page))
    return any((root / path).exists() for root in (*ROOTS, (ROOT / page).parent))


@pytest.mark.parametrize("page", PAGES)
def test_named_tests_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for path, name in re.findall(r"\b(tests/[\w/]+\.py)(?:::(\w+))?", text):
        assert (ROOT / path).is_file(), path
        assert f"def {name}(" in TEST_SOURCES[ROOT / path] or not name, f"{path}::{name}"
    for name in re.findall(r"`(?:\S+::)?(test_\w+)`", text):
        assert any(f"def {name}(" in source for source in TEST_SOURCES.values()), name


@pytest.mark.parametrize("page", PAGES)
def test_named_paths_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for path in re.findall(r"\b(?:benchmarks|docs|src)/[\w/]+\.\w+", text):
        assert (ROOT / path).is_file() or (ROOT / page).parent.joinpath(path).is_file(), path
    rooms = {path.name for root in ROOTS for path in root.iterdir() if path.is_dir()}
    for span in code_spans(page):
        is_file = re.fullmatch(r"[\w./-]+\.py", span)
        is_in_a_room = re.fullmatch(r"(\w+)/[\w./-]*", span)
        is_room = page == "CONTRIBUTING.md" and re.fullmatch(r"\w+/", span)
        if is_file or is_room or (is_in_a_room and is_in_a_room[1] in rooms):
            assert exists(span, page), span


@pytest.mark.parametrize("page", PAGES)
def test_named_modules_and_attributes_exist(page: str) -> None:
    for span in code_spans(page):
        found = re.match(r"(?:sv|structured_voronoi)((?:\.\w+)+)", span)
        if found:
            assert pydoc.locate(structured_voronoi.__name__ + found[1]) is not None, span


def named_commands() -> Iterator[tuple[str, tuple[str, ...], list[str]]]:
    """Every `svs …` in inline code: the page, the command, and the words after it."""
    for page in PAGES:
        for span in code_spans(page):
            if span.startswith("svs ") and not span.startswith(("svs --", "svs …")):
                words = span.split()[1:]
                length = 2 if words[0] in {"models", "runs", "train"} and len(words) > 1 else 1
                yield page, tuple(words[:length]), words[length:]


def test_named_commands_exist() -> None:
    groups = {name[:1] for name in COMMAND_NAMES}
    for page, command, rest in named_commands():
        assert command in COMMAND_NAMES | groups, f"{page}: svs {' '.join(command)}"
        if command == ("reproduce",) and rest and rest[0].islower():
            assert rest[0] in {*EXPERIMENTS, "all"}, f"{page}: svs reproduce {rest[0]}"


def test_named_options_exist() -> None:
    for page, command, rest in named_commands():
        if command in COMMAND_NAMES:
            options = options_of(command)
            for word in rest:
                assert not re.match("--?[a-z]", word) or word.partition("=")[0] in options, f"{page}: {command} {word}"
    known = FOREIGN_OPTIONS.union(*(options_of(command) for command in COMMAND_NAMES))
    for page in PAGES:
        for span in code_spans(page):
            if span.startswith("--"):
                assert re.split("[ =]", span)[0] in known, f"{page}: {span}"


def options_of(command: tuple[str, ...]) -> set[str]:
    """The options of a command, and those of every command."""
    parsed = app[command[0]] if len(command) == 1 else app[command[0]][command[1]]
    return {"--help", "--debug", "--version"} | {
        name for argument in parsed.assemble_argument_collection() for name in argument.names
    }


def test_missing_names_are_detected() -> None:
    assert not exists("samplers/nothing.py", "README.md")
    assert exists("samplers/svs.py", "README.md")
    assert pydoc.locate("structured_voronoi.nothing") is None
    assert "--nothing" not in options_of(("sample",))
