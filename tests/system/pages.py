"""A page of the documentation as a program: its blocks run in order, in a folder of their own, as a reader would.

- ```python: all of a page are one program.
- ```python title="rules.py", or any other kind with a title: a file of that name is written; Python must compile.
- ```console: commands after `$ `, a `\\` at the end going on. `svs` runs in this process, `make` is looked up in the
  Makefile, all else is given to a shell. Lines below a command are what it must print; … stands for anything.
- A command whose comment holds one of NOT_RUN is only read: the command and its options must exist.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from structured_voronoi.cli import app
from system.commands import svs

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
NOT_RUN = ("needs the network", "needs a GPU", "needs a cluster", "takes hours", "goes on until it is stopped")
BLOCK = re.compile(r"^```(\w*)(?: title=\"([^\"\n]+)\")?\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    kind: str
    title: str
    content: str


class Command(NamedTuple):
    written: str
    """Without its comment."""
    comment: str
    output: list[str]
    """Lines that it must print."""

    @property
    def is_run(self) -> bool:
        return not self.written.startswith("make ") and not any(reason in self.comment for reason in NOT_RUN)


def blocks(page: str) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))]


def commands(block: Block) -> Iterator[Command]:
    for part in re.split(r"^\$ ", block.content, flags=re.MULTILINE)[1:]:
        command, *output = part.replace("\\\n", "").splitlines()
        written, _, comment = command.partition("  # ")
        yield Command(written.strip(), comment, output)


def run_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What its commands printed, one after another."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    namespace: dict[str, Any] = {}
    said: list[str] = []
    for block in blocks(page):
        if block.title:
            if block.kind == "python":
                compile(block.content, block.title, "exec")
            Path(block.title).write_text(block.content, encoding="utf-8")
        elif block.kind == "python":
            exec(compile(block.content, page, "exec"), namespace)
        elif block.kind == "console":
            said += [_run_command(command, folder) for command in commands(block)]
    return said


def _run_command(command: Command, folder: Path) -> str:
    words = shlex.split(command.written)
    if words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
    if words[0] == "svs" and words[1:] != ["--version"]:
        app.parse_args(words[1:], exit_on_error=False, print_error=False)
    if not command.is_run:
        return ""
    if words[0] == "svs":
        done = svs(*words[1:], cwd=folder)
        said = done.stdout + done.stderr
    else:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        said = subprocess.run(
            ["bash", "-ec", command.written],
            check=True,
            text=True,
            stdout=subprocess.PIPE,
            env={**os.environ, "PATH": path},
        ).stdout
    for line in command.output:
        pattern = ".*".join(re.escape(part) for part in line.split("…"))
        assert re.search(f"^{pattern}$", said, flags=re.MULTILINE), f"{command.written} did not print {line!r}:\n{said}"
    return said
