"""Texts to train on: the built-in corpus, E2E and SST-2 files, plain text files, tables with labels."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from structured_voronoi.core.errors import SamplingError, did_you_mean
from structured_voronoi.core.validation import check_text_file, is_file, is_folder
from structured_voronoi.models.restaurants import LABELS, descriptions

csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # texts may be longer than the 131 072 characters of the default
BUILTIN_TEXTS, BUILTIN_HELD_OUT = 40_000, 1_000
BUILTIN_LABELLED = 20_000
SST2_WORDS = 8
UNSAID = "none"
"""The label of a built-in text that does not mention the attribute."""


class Corpus(NamedTuple):
    """Texts to learn from and texts to judge by."""

    train: list[str]
    held_out: list[str]


def load_corpus(data: str) -> Corpus:
    """``builtin``, a folder of E2E files (trainset.csv, devset.csv) or SST-2 files (train.tsv, dev.tsv), a CSV file
    with a `ref` column, or a text file."""
    if data == "builtin":
        return Corpus(_builtin_texts(BUILTIN_TEXTS, seed=0), _builtin_texts(BUILTIN_HELD_OUT, seed=1))
    path = Path(data)
    if is_folder(path) and is_file(path / "train.tsv"):
        return Corpus(*(_read_phrases(path / name) for name in ("train.tsv", "dev.tsv")))
    if is_folder(path) and is_file(path / "trainset.csv"):
        return Corpus(_read_texts(path / "trainset.csv"), _read_texts(path / "devset.csv"))
    if is_folder(path):
        raise SamplingError(f"--data {data} holds neither trainset.csv (with devset.csv) nor train.tsv (with dev.tsv)")
    texts = _read_texts(path)
    held_out = max(1, len(texts) // 20)
    if len(texts) < 20:
        raise SamplingError(
            f"--data {data} holds {len(texts)} texts",
            remedy="training needs 20 or more, one on each line",
        )
    return Corpus(texts[:-held_out], texts[-held_out:])


class Labelled(NamedTuple):
    """Texts and the label of each."""

    texts: list[str]
    labels: list[str]

    def part(self, rows: slice, without: str | None = None) -> Labelled:
        """The rows of a slice, without those of one label."""
        pairs = [pair for pair in zip(self.texts[rows], self.labels[rows], strict=True) if pair[1] != without]
        return Labelled([text for text, _ in pairs], [label for _, label in pairs])


def labelled_texts(data: str, text_column: str, label_column: str, limit: int | None = None) -> Labelled:
    """Two columns of a CSV or TSV file, at most ``limit`` rows of it, rows with an empty cell left out; or, with
    ``builtin``, the built-in texts labelled with one of their attributes, `none` where a text does not mention it."""
    if limit is not None and limit < 1:
        raise SamplingError(f"--limit {limit} leaves no texts", remedy="use 1 or more")
    if data == "builtin":
        return _label_builtin_texts(label_column, limit)
    path = Path(data)
    if path.suffix.lower() not in (".csv", ".tsv"):
        raise SamplingError(f"--data {data} is neither a .csv nor a .tsv file", remedy="give one, or `builtin`")
    check_text_file(path, "--data")
    labelled = Labelled([], [])
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            # a quotation mark in a TSV file is a character like any other
            dialect: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix.lower() == ".tsv" else {}
            rows = csv.DictReader(file, **dialect)
            for column in (text_column, label_column):
                if column not in (rows.fieldnames or []):
                    raise SamplingError(
                        f"{path} has no column {column!r}",
                        remedy=did_you_mean(column, rows.fieldnames or ["(none)"]),
                    )
            for row in rows:
                text, label = (" ".join((row[column] or "").split()) for column in (text_column, label_column))
                if text and label:
                    labelled.texts.append(text)
                    labelled.labels.append(label)
                if limit is not None and len(labelled.texts) >= limit:
                    break
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SamplingError(
            f"{path} cannot be read ({error})", remedy="give a UTF-8 CSV or TSV file with a header"
        ) from error
    if not labelled.texts:
        raise SamplingError(f"{path} holds no row with a text and a label", remedy="give a file with some")
    return labelled


def _label_builtin_texts(attribute: str, limit: int | None) -> Labelled:
    if attribute not in LABELS:
        raise SamplingError(
            f"the built-in texts have no label {attribute!r}",
            remedy=did_you_mean(attribute, LABELS),
        )
    builtin = list(descriptions(min(limit or BUILTIN_LABELLED, BUILTIN_LABELLED), seed=2))
    labels = [description.labels.get(attribute, UNSAID) for description in builtin]
    return Labelled([description.text for description in builtin], labels)


def _read_phrases(path: Path) -> list[str]:
    """The phrases of an SST-2 file with at least SST2_WORDS words."""
    return [text for text in labelled_texts(str(path), "sentence", "label").texts if len(text.split()) >= SST2_WORDS]


def _builtin_texts(count: int, seed: int) -> list[str]:
    return [description.text for description in descriptions(count, seed)]


def _read_texts(path: Path) -> list[str]:
    """The texts of one file, without blank ones."""
    check_text_file(path, "--data")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines: Iterable[str] = _read_ref_column(file, path) if path.suffix.lower() == ".csv" else file
            texts = [" ".join(line.split()) for line in lines]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SamplingError(f"{path} cannot be read ({error})", remedy="give a UTF-8 text or CSV file") from error
    texts = [text for text in texts if text]
    if not texts:
        raise SamplingError(f"{path} holds no text", remedy="give a file with one text on each line")
    return texts


def _read_ref_column(file: Iterable[str], path: Path) -> list[str]:
    rows = csv.DictReader(file)
    if "ref" not in (rows.fieldnames or []):
        raise SamplingError(
            f"{path} has the columns {', '.join(rows.fieldnames or []) or '(none)'}",
            remedy="the texts must be in a column `ref`",
        )
    return [row["ref"] or "" for row in rows]
