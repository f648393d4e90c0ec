"""Draws at literal seeds are those recorded before the code was rearranged (tests/golden/draws.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"


def test_draws_are_bit_identical_to_the_recorded_ones() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, GOLDEN / "draws.py"], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((GOLDEN / "digests.json").read_text(encoding="utf-8"))
