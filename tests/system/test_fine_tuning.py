"""Fine-tuning a pretrained model on a user's texts: `svs train lm --base`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import structured_voronoi as sv
from structured_voronoi.models import unfinished
from structured_voronoi.models.corpora import Corpus
from structured_voronoi.models.fine_tuning import TICKS, FineTuning, fine_tune
from structured_voronoi.models.loading import BUNDLED, load_model
from structured_voronoi.models.training import UNFINISHED
from system.commands import svs

TEXTS = [f"The {kind} {thing} is {kind}." for kind in ("red", "blue", "old", "new") for thing in "abcdefghij"]
CORPUS = Corpus(TEXTS, TEXTS[::5])


class Killed(Exception):
    pass


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The bundled model, which knows restaurants, in a folder of its own."""
    return Path(shutil.copytree(BUNDLED, tmp_path / "base"))


def recipe(base: Path, epochs: float = 8.0, minutes: float = 10.0) -> FineTuning:
    return FineTuning(str(base), minutes, epochs, layers=2, batch=4, learning_rate=3e-3, context=32)


def test_the_last_layers_learn_and_the_others_stay(base: Path, tmp_path: Path) -> None:
    ticks: list[int] = []
    out = tmp_path / "out"
    report = fine_tune(CORPUS, out, recipe(base), lambda note, steps: ticks.append(steps))
    assert sum(ticks) == TICKS
    assert report["held_out_loss"] < report["held_out_loss_before"] - 1
    assert (report["steps"], report["texts"], report["held_out_texts"]) == (80, 40, 8)
    assert json.loads((out / "training.json").read_text()) == report
    before, after = load_model(str(base)), load_model(str(out))
    changed = [
        name
        for (name, old), (_, new) in zip(before.model.named_parameters(), after.model.named_parameters(), strict=True)
        if not torch.equal(old, new)
    ]
    assert all(name.startswith(("transformer.h.3.", "transformer.h.4.")) for name in changed)
    assert {name.split(".")[2] for name in changed} == {"3", "4"}
    assert after.tokenizer.get_vocab() == before.tokenizer.get_vocab()


def test_texts_learn_to_end(base: Path, tmp_path: Path) -> None:
    fine_tune(CORPUS, tmp_path / "out", recipe(base), lambda note, steps: None)
    model, tokenizer = load_model(str(tmp_path / "out"))
    ids = [tokenizer.bos_token_id, *tokenizer("The red a is red.")["input_ids"]]
    with torch.no_grad():
        chances = model(input_ids=torch.tensor([ids])).logits[0].softmax(-1)[:, tokenizer.eos_token_id]
    assert chances[-1] > 0.5
    assert chances[1:-1].max() < 0.3


def test_fine_tuning_goes_on_where_it_was(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfinished, "CHECKPOINT_STEPS", 10)
    calls = 0

    def kill(note: str, steps: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 25:
            raise Killed

    whole = fine_tune(CORPUS, tmp_path / "whole", recipe(base), lambda note, steps: None)
    with pytest.raises(Killed):
        fine_tune(CORPUS, tmp_path / "part", recipe(base), kill)
    assert (tmp_path / "part" / UNFINISHED).exists()
    with pytest.raises(sv.SamplingError, match=r"holds a run with another epochs \(8.0, not 2.0\)"):
        fine_tune(CORPUS, tmp_path / "part", recipe(base, epochs=2.0), kill)
    again = fine_tune(CORPUS, tmp_path / "part", recipe(base), lambda note, steps: None)
    assert again["held_out_loss"] == whole["held_out_loss"]
    assert again["held_out_loss_before"] == whole["held_out_loss_before"]
    assert not (tmp_path / "part" / UNFINISHED).exists()


def test_a_budget_of_no_time_ends_after_a_step(base: Path, tmp_path: Path) -> None:
    report = fine_tune(CORPUS, tmp_path / "out", recipe(base, minutes=1e-9), lambda note, steps: None)
    assert report["steps"] == 1


def test_a_base_is_not_overwritten_and_must_have_an_end(base: Path, tmp_path: Path) -> None:
    with pytest.raises(sv.SamplingError, match="base model's own folder"):
        fine_tune(CORPUS, base, recipe(base), lambda note, steps: None)
    loaded = load_model(str(base))
    loaded.tokenizer.eos_token = None
    loaded.model.save_pretrained(tmp_path / "endless")
    loaded.tokenizer.save_pretrained(tmp_path / "endless")
    with pytest.raises(sv.SamplingError, match="no end-of-text token"):
        fine_tune(CORPUS, tmp_path / "out", recipe(tmp_path / "endless"), lambda note, steps: None)


def test_the_command(base: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    words = ("--data", str(tmp_path / "texts.txt"), "--out", str(tmp_path / "model"))
    done = svs("train", "lm", "--base", str(base), "--minutes", "5", "--half", *words)
    assert "held-out loss" in done.stdout
    assert "→" in done.stdout
    assert svs("sample", "-n", "1", "--length", "4", "--ends", "never", "--model", str(tmp_path / "model")).stdout
    assert "--minutes 5 is for fine-tuning" in svs("train", "lm", "--minutes", "5", *words, code=2).stderr
    assert "--minutes -1" in svs("train", "lm", "--base", str(base), "--minutes", "-1", *words, code=2).stderr
