"""Fine-tuning a pretrained model: `fine_tune` and `svs train lm --base`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import structured_voronoi as sv
from structured_voronoi.core.progress import ignore_progress
from structured_voronoi.models.corpora import Corpus
from structured_voronoi.models.fine_tuning import FINE_TUNING_TICKS, FineTuningSettings, fine_tune
from structured_voronoi.models.loading import BUNDLED, load_model, save_model
from structured_voronoi.models.training_run import CHECKPOINT_FOLDER, TrainingCheckpoint
from system.commands import svs

TEXTS = [f"The {kind} {thing} is {kind}." for kind in ("red", "blue", "old", "new") for thing in "abcdefghij"]
CORPUS = Corpus(TEXTS, TEXTS[::5])


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A copy of the bundled model."""
    return Path(shutil.copytree(BUNDLED, tmp_path / "base"))


def settings(base: Path, epochs: float = 8.0, minutes: float = 10.0) -> FineTuningSettings:
    return FineTuningSettings(str(base), minutes, epochs, layers=2, batch_size=4, learning_rate=3e-3, context=32)


def test_only_the_last_layers_are_trained(base: Path, tmp_path: Path) -> None:
    ticks: list[int] = []
    out = tmp_path / "out"
    report = fine_tune(CORPUS, out, settings(base), lambda note, steps: ticks.append(steps))
    assert sum(ticks) == FINE_TUNING_TICKS
    assert report["held_out_loss"] < report["held_out_loss_before"] - 1
    assert (report["steps"], report["texts"], report["held_out_texts"]) == (80, 40, 8)
    assert json.loads((out / "training.json").read_text()) == report
    before, after = load_model(str(base)), load_model(str(out))
    changed = [
        name
        for (name, old), (_, new) in zip(
            before.network.named_parameters(), after.network.named_parameters(), strict=True
        )
        if not torch.equal(old, new)
    ]
    assert all(name.startswith(("transformer.h.3.", "transformer.h.4.")) for name in changed)
    assert {name.split(".")[2] for name in changed} == {"3", "4"}
    assert after.tokenizer.get_vocab() == before.tokenizer.get_vocab()


def test_fine_tuned_model_ends_its_texts(base: Path, tmp_path: Path) -> None:
    fine_tune(CORPUS, tmp_path / "out", settings(base), ignore_progress)
    network, tokenizer = load_model(str(tmp_path / "out"))
    ids = [tokenizer.bos_token_id, *tokenizer("The red a is red.")["input_ids"]]
    with torch.no_grad():
        end_probability = network(input_ids=torch.tensor([ids])).logits[0].softmax(-1)[:, tokenizer.eos_token_id]
    assert end_probability[-1] > 0.5
    assert end_probability[1:-1].max() < 0.3


def test_resumed_fine_tuning_equals_an_uninterrupted_one(base: Path, tmp_path: Path) -> None:
    checkpoint, calls = TrainingCheckpoint(steps=10), 0

    def kill(note: str, steps: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 25:
            raise Killed

    whole = fine_tune(CORPUS, tmp_path / "whole", settings(base), ignore_progress)
    with pytest.raises(Killed):
        fine_tune(CORPUS, tmp_path / "part", settings(base), kill, checkpoint=checkpoint)
    assert (tmp_path / "part" / CHECKPOINT_FOLDER).exists()
    with pytest.raises(sv.SamplingError, match=r"epochs = 8\.0, not 2\.0"):
        fine_tune(CORPUS, tmp_path / "part", settings(base, epochs=2.0), kill)
    again = fine_tune(CORPUS, tmp_path / "part", settings(base), ignore_progress)
    assert again["held_out_loss"] == whole["held_out_loss"]
    assert again["held_out_loss_before"] == whole["held_out_loss_before"]
    assert not (tmp_path / "part" / CHECKPOINT_FOLDER).exists()


def test_training_ends_when_the_time_is_over(base: Path, tmp_path: Path) -> None:
    report = fine_tune(CORPUS, tmp_path / "out", settings(base, minutes=1e-9), ignore_progress)
    assert report["steps"] == 1


def test_base_model_is_not_overwritten(base: Path) -> None:
    with pytest.raises(sv.SamplingError) as caught:
        fine_tune(CORPUS, base, settings(base), ignore_progress)
    assert caught.value.argument == "out"


def test_base_model_must_have_an_end_of_text_token(base: Path, tmp_path: Path) -> None:
    loaded = load_model(str(base))
    loaded.tokenizer.eos_token = None
    save_model(loaded, tmp_path / "endless")
    with pytest.raises(sv.SamplingError, match="no end-of-text token"):
        fine_tune(CORPUS, tmp_path / "out", settings(tmp_path / "endless"), ignore_progress)


def test_command_fine_tunes_a_model(base: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    words = ("--data", str(tmp_path / "texts.txt"), "--out", str(tmp_path / "model"))
    done = svs("train", "lm", "--base", str(base), "--minutes", "5", "--half", *words)
    assert "held-out loss" in done.stdout
    assert "→" in done.stdout
    assert svs(
        "sample", "-n", "1", "--max-tokens", "4", "--finish", "length", "--model", str(tmp_path / "model")
    ).stdout
    assert "--minutes 5 applies to fine-tuning only" in svs("train", "lm", "--minutes", "5", *words, code=2).stderr
    assert "--minutes -1" in svs("train", "lm", "--base", str(base), "--minutes", "-1", *words, code=2).stderr
