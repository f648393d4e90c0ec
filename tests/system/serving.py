"""A server of the page in a separate process, started by `svs serve`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COMMAND = "import sys; from structured_voronoi.cli import main; main()"
SCENE: dict[str, Any] = {
    "points": [(-1.2, 0.9), (0.1, 1.3), (1.4, 0.4), (0.3, -0.2), (-0.7, -1.1)],
    "weights": [5, 20, 30, 8, 25],
}
"""Cells of the playground."""


@contextlib.contextmanager
def serving(cache: Path, *words: str) -> Iterator[str]:
    """Start a server at a free port, yield its address without the final slash, and end it by Ctrl-C."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "serve", "--port", "0", *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stderr is not None
        found = re.search(r"http://\S+", process.stderr.readline())
        assert found is not None
        yield found[0].rstrip("/")
    finally:
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=60)[1]
    assert "Traceback" not in output
    assert process.returncode == 0
