"""Texts under control as a user types them: bundled controls, and the how-to page from a table of one's own."""

from __future__ import annotations

import json
import re
from math import log
from pathlib import Path
from typing import Any

import pytest

from system.commands import svs
from system.pages import run_page

QUICK = ("--sampler", "svs+refresh", "--scale", "0.3", "--warmup", "2", "--seed", "1")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_controls_add_up_and_get_their_columns(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text("def short(text):\n    return 0.5 if len(text) < 60 else 0.25\n")
    words = ("--control", "food=Italian@1.5", "--control", "keyword=the", "--control", "rules:short")
    shape = ("-n", "3", "--finish", "length", "--max-tokens", "10", "--out", "texts.jsonl")
    svs("sample", *shape, *QUICK, *words, cwd=tmp_path)
    found = lines(tmp_path / "texts.jsonl")
    assert len(found) == 3
    for line in found:
        assert re.search(r"\bthe\b", line["text"], re.IGNORECASE)
        assert line["keyword=the"] == 1
        assert line["rules:short"] == (0.5 if len(line["text"]) < 60 else 0.25)
        log_target = line["log_prob"] + 1.5 * log(line["food=Italian"]) + log(line["rules:short"])
        assert line["log_target"] == pytest.approx(log_target, abs=1e-3)


def test_the_how_to_page_from_table_to_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of docs/how-to-control.md."""
    said = run_page("docs/how-to-control.md", tmp_path, monkeypatch)
    assert float(re.search(r"macro-F1 ([\d.]+)", said[0])[1]) > 0.85  # type: ignore[index]
    assert all(label in said[0] for label in ("good", "bad", "precision"))
    good, dry = lines(tmp_path / "good.jsonl"), lines(tmp_path / "dry.jsonl")
    assert all(0 < line["mood=good"] <= 1 for line in good + dry)
    assert all("river" not in line["text"].lower().split() and line["not keyword=river"] == 1 for line in dry)
    error = svs("sample", "--control", "./mood=god", code=2, cwd=tmp_path).stderr
    assert "did you mean 'good'" in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sample", "--control", "food=Martian"], "known: Chinese, English, Fast food"),
        (["sample", "--control", "colour=red"], "'colour=red' is unknown"),
        (["sample", "--control", "regex=("], "not a regular expression"),
        (["sample", "--control", "keyword=a", "--control", "keyword=a"], "two controls have the name 'keyword=a'"),
        (["train", "classifier", "--data", "no.csv", "--label", "y", "--out", "x"], "no.csv cannot be read"),
        (["train", "classifier", "--data", "builtin", "--label", "fod", "--out", "x"], "did you mean 'food'"),
        (["train", "classifier", "--data", "one.csv", "--label", "y", "--out", "x"], "two labels or more"),
        (["train", "classifier", "--data", "one.csv", "--text", "t", "--label", "y", "--out", "x"], "no column 't'"),
    ],
)
def test_mistakes_get_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("text,y\na,1\nb,1\n")
    error = svs(*words, code=2, cwd=tmp_path).stderr
    assert said in error.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["one.csv"]
