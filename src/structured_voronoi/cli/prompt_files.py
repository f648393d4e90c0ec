"""Files of prompts: a text file with one a line, or one column of a CSV, TSV or JSONL file."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from structured_voronoi.core.errors import SamplingError, did_you_mean
from structured_voronoi.core.validation import check_text_file

MOST_BYTES = 100 * 2**20
"""Of a file of prompts."""


def read_prompts(path: Path, column: str = "prompt") -> list[str]:
    """The prompts of a file in their order, without blank ones."""
    check_text_file(path, "prompts", MOST_BYTES)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SamplingError(f"--prompts {path} is not UTF-8 (byte {error.start})", remedy="save it as UTF-8") from error
    except OSError as error:
        raise SamplingError(
            f"--prompts {path} cannot be read ({error.strerror})", remedy="give another file"
        ) from error
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        found = [
            _of_line(line, number, path, column) for number, line in enumerate(text.splitlines(), 1) if line.strip()
        ]
    elif suffix in (".csv", ".tsv"):
        found = _of_table(text, suffix, path, column)
    else:
        found = text.splitlines()
    prompts = [prompt for prompt in found if prompt.strip()]
    if not prompts:
        raise SamplingError(f"--prompts {path} holds no prompt", remedy="give a file with one on each line")
    return prompts


def _of_line(line: str, number: int, path: Path, column: str) -> str:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise SamplingError(
            f"--prompts {path}, line {number} is no JSON ({error})", remedy="write an object a line"
        ) from error
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        raise SamplingError(
            f"--prompts {path}, line {number} has no text under {column!r}",
            remedy="name the key with --prompt-column",
        )
    return str(row[column])


def _of_table(text: str, suffix: str, path: Path, column: str) -> list[str]:
    dialect: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if suffix == ".tsv" else {}
    rows = csv.DictReader(text.splitlines(keepends=True), **dialect)
    try:
        if column not in (rows.fieldnames or []):
            raise SamplingError(
                f"--prompts {path} has no column {column!r}",
                remedy=f"{did_you_mean(column, rows.fieldnames or ['(none)'])} (--prompt-column)",
            )
        return [row[column] or "" for row in rows]
    except csv.Error as error:
        raise SamplingError(
            f"--prompts {path} cannot be read ({error})", remedy="give a CSV file with a header"
        ) from error
