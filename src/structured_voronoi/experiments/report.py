"""Reports of experiments: NAME.json, NAME.md and pictures, written together at the end."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from structured_voronoi.metrics.figures import new_figure as new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "vs": "#0b6e4f", "vs_paper": "#8fbf6a", "hmc": "#c8553d", "mucola": "#4a6fa5", "independent": "#555555",
    "ancestral": "#555555", "fudge": "#b07aa1", "langevin": "#c8553d", "svs-paper": "#8fbf6a", "svs": "#76b7b2",
    "svs+refresh": "#0b6e4f", "pncg": "#e0a030", "gwg": "#9c755f", "rejection": "#000000",
    "guided": "#d1495b", "cold": "#59a1c9",
}  # fmt: skip
"""Colour of each sampler in all pictures."""


def write_report(
    folder: Path, name: str, results: dict[str, Any], markdown: str, figures: dict[str, Figure]
) -> list[Path]:
    """Write all files under temporary names, then rename them, so that no report is incomplete."""
    results = {**results, "version": version("structured-voronoi"), "torch": version("torch")}
    pending: list[tuple[str, Path]] = []
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for stem, figure in figures.items():
            pending.append((f"{stem}.png", Path(scratch, f"{stem}.png")))
            figure.savefig(pending[-1][1], dpi=150, bbox_inches="tight")
        for file, text in (
            (f"{name}.json", json.dumps(_without_nan(results), indent=1, allow_nan=False)),
            (f"{name}.md", markdown),
        ):
            pending.append((file, Path(scratch, file)))
            pending[-1][1].write_text(text + "\n", encoding="utf-8")
        for file, written in pending:
            os.replace(written, folder / file)
    return [folder / file for file, _ in pending]


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; numbers to three significant digits."""
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    lines += ["| " + " | ".join(_format(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def format_interval(interval: Sequence[float], digits: str = ".2f") -> str:
    """A value with the ends of its interval, given as (value, low, high)."""
    value, low, high = interval
    return f"{value:{digits}} ({low:{digits}} – {high:{digits}})"


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _format(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else " ".join(str(value).split()).replace("|", "/")
