"""Which controls come with the package, read from their files without loading anything heavy."""

from __future__ import annotations

import json
from pathlib import Path

BUNDLED_CONTROLS = Path(__file__).parent / "bundled_controls"


def bundled_controls() -> dict[str, list[str]]:
    """The labels of every bundled classifier."""
    configs = {path.parent.name: path.read_text(encoding="utf-8") for path in BUNDLED_CONTROLS.glob("*/config.json")}
    return {name: json.loads(configs[name])["labels"] for name in sorted(configs)}
