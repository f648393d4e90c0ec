"""The public API is that of ``tests/api.txt``: a change of names or signatures is made on purpose."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from api_snapshot import api

SNAPSHOT = Path(__file__).parents[1] / "api.txt"


def test_public_api_is_the_recorded_one() -> None:
    recorded, found = SNAPSHOT.read_text(encoding="utf-8"), api()
    if found == recorded:
        return
    changes = difflib.unified_diff(
        recorded.splitlines(), found.splitlines(), "tests/api.txt", "found", lineterm="", n=2
    )
    pytest.fail(
        "the public API differs from tests/api.txt; if the change is intended, run "
        "`python tests/api_snapshot.py > tests/api.txt`, add it to CHANGELOG.md, and commit both:\n"
        + "\n".join(changes),
        pytrace=False,
    )
