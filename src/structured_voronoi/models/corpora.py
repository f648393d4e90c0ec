"""Texts to train on: the built-in corpus, E2E-style CSV files, plain text files."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from structured_voronoi.base import SamplingError
from structured_voronoi.models.restaurants import descriptions

BUILTIN_TEXTS, BUILTIN_HELD_OUT = 40_000, 1_000


class Corpus(NamedTuple):
    """Texts to learn from and texts to judge by."""

    train: list[str]
    held_out: list[str]


def load_corpus(data: str) -> Corpus:
    """``builtin``, a folder of E2E files (trainset.csv, devset.csv), a CSV file with a `ref` column, or a text file."""
    if data == "builtin":
        return Corpus(_texts(BUILTIN_TEXTS, seed=0), _texts(BUILTIN_HELD_OUT, seed=1))
    path = Path(data)
    if not path.exists():
        raise SamplingError(f"--data {data} does not exist; give `builtin`, a folder with trainset.csv, or a file")
    if path.is_dir():
        return Corpus(_read(path / "trainset.csv"), _read(path / "devset.csv"))
    texts = _read(path)
    held_out = max(1, len(texts) // 20)
    if len(texts) < 20:
        raise SamplingError(f"--data {data} holds {len(texts)} texts; training needs 20 or more, one on each line")
    return Corpus(texts[:-held_out], texts[-held_out:])


def _texts(count: int, seed: int) -> list[str]:
    return [one.text for one in descriptions(count, seed)]


def _read(path: Path) -> list[str]:
    """The texts of one file, without blank ones."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines: Iterable[str] = _column(file, path) if path.suffix == ".csv" else file
            texts = [" ".join(line.split()) for line in lines]
    except (OSError, UnicodeDecodeError) as error:
        raise SamplingError(f"{path} cannot be read ({error}); give a UTF-8 text or CSV file") from error
    texts = [text for text in texts if text]
    if not texts:
        raise SamplingError(f"{path} holds no text; give a file with one text on each line")
    return texts


def _column(file: Iterable[str], path: Path) -> list[str]:
    rows = csv.DictReader(file)
    if "ref" not in (rows.fieldnames or []):
        raise SamplingError(
            f"{path} has the columns {', '.join(rows.fieldnames or []) or '(none)'}; "
            "the texts must be in a column `ref`"
        )
    return [row["ref"] or "" for row in rows]
