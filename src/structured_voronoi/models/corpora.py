"""Training texts: the built-in corpus, E2E and SST-2 files, text files, and tables with labels."""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from structured_voronoi.core.errors import SamplingError, did_you_mean
from structured_voronoi.core.validation import check_count, check_text_file, is_file, is_folder
from structured_voronoi.models.restaurants import LABELS, descriptions

csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # texts may be longer than the default of 131,072 characters


class Corpus(NamedTuple):
    """Texts for training, and held-out texts for evaluation."""

    train: list[str]
    held_out: list[str]


class Labelled(NamedTuple):
    """Texts and the label of each."""

    texts: list[str]
    labels: list[str]

    def part(self, rows: slice, without: str | None = None) -> Labelled:
        """The rows of a slice, except those with the label ``without``."""
        pairs = [pair for pair in zip(self.texts[rows], self.labels[rows], strict=True) if pair[1] != without]
        return Labelled([text for text, _ in pairs], [label for _, label in pairs])


def digest(texts: Corpus | Labelled, settings: Any) -> str:
    """Twelve hexadecimal digits that depend on the texts and on the settings, a dataclass."""
    serialised = json.dumps([asdict(settings), *texts])
    return hashlib.sha256(serialised.encode()).hexdigest()[:12]


def load_corpus(data: str) -> Corpus:
    """Load texts without labels.

    Parameters
    ----------
    data
        ``builtin``, a folder of E2E files (trainset.csv, devset.csv) or of SST-2 files (train.tsv, dev.tsv), a CSV file
        with a column ``ref``, or a text file with one text on each line. Every twentieth text of a single file, from
        its end, is held out.

    Returns
    -------
    Corpus
        The texts for training and the held-out ones.

    Raises
    ------
    SamplingError
        If the files cannot be read or hold too few texts.
    """
    if data == "builtin":
        return Corpus(_builtin_texts(40_000, seed=0), _builtin_texts(1_000, seed=1))
    path = Path(data)
    if is_folder(path):
        if is_file(path / "train.tsv"):
            return Corpus(*(_read_phrases(path / name) for name in ("train.tsv", "dev.tsv")))
        if is_file(path / "trainset.csv"):
            return Corpus(_read_texts(path / "trainset.csv"), _read_texts(path / "devset.csv"))
        raise SamplingError(
            f"the folder {data} has no training texts",
            remedy="give one with trainset.csv and devset.csv, or with train.tsv and dev.tsv",
        )
    texts = _read_texts(path)
    held_out = max(1, len(texts) // 20)
    if len(texts) < 20:
        raise SamplingError(f"{data} holds {len(texts)} texts", remedy="use 20 or more, one on each line")
    return Corpus(texts[:-held_out], texts[-held_out:])


def labelled_texts(data: str, text_column: str, label_column: str, limit: int | None = None) -> Labelled:
    """Load texts with labels.

    Parameters
    ----------
    data
        A CSV or TSV file with a header, or ``builtin``.
    text_column
        Column of the texts.
    label_column
        Column of the labels; for the built-in texts one of their attributes. Built-in texts that do not mention the
        attribute have the label ``none``.
    limit
        Largest number of texts.

    Returns
    -------
    Labelled
        The texts and labels of the rows in which both are given.

    Raises
    ------
    SamplingError
        If the file cannot be read, lacks a column or has no such rows.
    """
    if limit is not None:
        check_count(limit=limit)
    if data == "builtin":
        return _label_builtin_texts(label_column, limit)
    path = Path(data)
    if path.suffix.lower() not in (".csv", ".tsv"):
        raise SamplingError(
            f"{data!r} is not a .csv or .tsv file", argument="data", remedy="give such a file, or builtin"
        )
    # a quotation mark in a TSV file is an ordinary character
    dialect: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix.lower() == ".tsv" else {}
    labelled = Labelled([], [])
    with _opened(path) as file:
        for text, label in _read_columns(file, path, (text_column, label_column), dialect):
            if text and label:
                labelled.texts.append(text)
                labelled.labels.append(label)
            if limit is not None and len(labelled.texts) >= limit:
                break
    if not labelled.texts:
        raise SamplingError(f"{path} has no row with a text and a label", remedy="give a file that has some")
    return labelled


def _label_builtin_texts(attribute: str, limit: int | None) -> Labelled:
    max_texts = 20_000
    if attribute not in LABELS:
        raise SamplingError(f"the built-in texts have no label {attribute!r}", remedy=did_you_mean(attribute, LABELS))
    builtin = list(descriptions(min(limit or max_texts, max_texts), seed=2))
    labels = [description.labels.get(attribute, "none") for description in builtin]
    return Labelled([description.text for description in builtin], labels)


def _builtin_texts(count: int, seed: int) -> list[str]:
    return [description.text for description in descriptions(count, seed)]


def _read_phrases(path: Path) -> list[str]:
    """The phrases of an SST-2 file that have eight words or more."""
    return [text for text in labelled_texts(str(path), "sentence", "label").texts if len(text.split()) >= 8]


def _read_texts(path: Path) -> list[str]:
    """The texts of one file, without blank ones."""
    with _opened(path) as file:
        if path.suffix.lower() == ".csv":
            texts = [text for (text,) in _read_columns(file, path, ("ref",), {})]
        else:
            texts = [" ".join(line.split()) for line in file]
    texts = [text for text in texts if text]
    if not texts:
        raise SamplingError(f"{path} holds no text", remedy="give a file with one text on each line")
    return texts


@contextmanager
def _opened(path: Path) -> Iterator[Iterable[str]]:
    """The lines of a file; errors while they are read become a `SamplingError`."""
    check_text_file(path, "data")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield file
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SamplingError(
            f"{path} cannot be read", cause=error, remedy="give a UTF-8 text, CSV or TSV file"
        ) from error


def _read_columns(
    lines: Iterable[str], path: Path, columns: tuple[str, ...], dialect: dict[str, Any]
) -> Iterator[list[str]]:
    """The cells of some columns of a table with a header, row by row, with white space collapsed."""
    rows = csv.DictReader(lines, **dialect)
    for column in columns:
        if column not in (rows.fieldnames or []):
            raise SamplingError(
                f"{path} has no column {column!r}", remedy=did_you_mean(column, rows.fieldnames or ["(none)"])
            )
    for row in rows:
        yield [" ".join((row[column] or "").split()) for column in columns]
