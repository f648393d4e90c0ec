"""What texts must satisfy: words, patterns, labels, scores and functions."""

from __future__ import annotations

import json
from pathlib import Path

BUNDLED_CONTROLS = Path(__file__).parents[1] / "models" / "bundled_controls"


def bundled_controls() -> dict[str, list[str]]:
    """The labels of every classifier that comes with the package, read without loading anything heavy."""
    configs = {path.parent.name: path.read_text(encoding="utf-8") for path in BUNDLED_CONTROLS.glob("*/config.json")}
    return {name: json.loads(configs[name])["labels"] for name in sorted(configs)}
