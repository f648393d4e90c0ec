"""The command in this process: what a user would see, without the seconds that starting a process takes."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from structured_voronoi import cli


class Done(NamedTuple):
    """What a command printed."""

    stdout: str
    stderr: str


def svs(*words: str, code: int = 0, cwd: Path | None = None) -> Done:
    """Run a command; an error that is not the user's is raised, as the command would show its traceback."""
    out, err = io.StringIO(), io.StringIO()
    with as_if_fresh(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            found = cli.run(list(words))
        except SystemExit as stop:  # --help
            found = int(stop.code or 0)
    assert found == code, err.getvalue()
    return Done(out.getvalue(), err.getvalue())


@contextlib.contextmanager
def as_if_fresh(cwd: Path | None) -> Iterator[None]:
    """In a folder, and without what a command imports from there afterwards."""
    before, path, modules = Path.cwd(), list(sys.path), set(sys.modules)
    os.chdir(cwd or before)
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if cwd is not None and str(getattr(sys.modules[name], "__file__", "")).startswith(str(cwd)):
                del sys.modules[name]
