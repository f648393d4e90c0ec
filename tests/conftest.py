"""What holds for all tests: no test asks a model hub for anything, and lookaheads are fitted in fewer steps."""

import os
import signal

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported
signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a script's background ignores Ctrl-C, and its children do, too


@pytest.fixture(autouse=True)
def short_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any lookahead is exact, so that most tests need no good one."""
    from structured_voronoi.lookahead import fitting, rounds, training

    monkeypatch.setattr(training, "STEPS", {"hidden": 50, "token": 100, "said": 75, "prefix": 100})
    monkeypatch.setattr(training, "PASSES", 2)
    monkeypatch.setattr(fitting, "CHECKED", 32)
    monkeypatch.setattr(rounds, "STEPS", 50)
    monkeypatch.setattr(rounds, "ROUNDS", 1)
