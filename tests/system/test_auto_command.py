"""`svs sample --sampler auto` as a user types it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SVS = str(Path(sys.executable).with_name("svs"))


def said(*words: str) -> str:
    command = [
        SVS,
        "sample",
        "-n",
        "2",
        "--length",
        "8",
        "--sampler",
        "auto",
        "--scale",
        "0.45",
        "--warmup",
        "5",
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    return done.stderr


def test_auto_says_what_it_chose_and_why() -> None:
    assert "svs: ancestral, because nothing weighs on the language model's own draws" in said()
    controlled = said("--control", "food=Italian@0.2")
    assert "svs: rejection, by the evaluations a text costs in a pilot" in controlled


def test_auto_leaves_what_is_rare_to_chains() -> None:
    """The suffix is so improbable that hardly a try would be accepted."""
    assert "svs: svs+refresh, by the evaluations a text costs in a pilot" in said("--suffix", " in the old library.")
