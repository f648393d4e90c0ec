"""The judge of texts and the classifier of prefixes learn what they should and come back from their files."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

import structured_voronoi as sv
from structured_voronoi.cli import run
from structured_voronoi.metrics.classification import classification_report
from structured_voronoi.models.encoder_judge import EncoderJudge, EncoderRecipe, load_judge
from structured_voronoi.models.judge import Judge
from structured_voronoi.models.prefix_classifier import (
    PrefixClassifier,
    PrefixRecipe,
    train_prefix_classifier,
)
from structured_voronoi.models.restaurants import FOODS, descriptions

SMALL = PrefixRecipe(embedding=16, hidden=16, layers=2, dropout=0.0, epochs=12.0, batch=32, learning_rate=1e-2)


def labelled(count: int, seed: int) -> tuple[list[str], list[str]]:
    some = [one for one in descriptions(count, seed) if "food" in one.labels]
    return [one.text for one in some], [one.labels["food"] for one in some]


def test_the_judge_tells_foods_apart(tmp_path: Path) -> None:
    judge = Judge.train(*labelled(3000, seed=5), seed=0)
    texts, labels = labelled(500, seed=6)
    report = classification_report(labels, judge.predict(texts), judge.labels)
    assert set(report["classes"]) == set(FOODS)
    assert report["macro_f1"] > 0.95
    judge.save(tmp_path)
    assert Judge.load(tmp_path).predict([*texts, "", "SUSHI!"]) == judge.predict([*texts, "", "sushi"])
    assert judge.predict([]) == []
    with pytest.raises(sv.SamplingError, match="2 texts with 1 labels"):
        Judge.train(["a", "b"], ["x"])


def test_the_prefix_classifier_reads_prefixes(tmp_path: Path) -> None:
    """The label is said by the third token: before it nothing is known, after it everything."""
    generator = torch.Generator().manual_seed(3)
    texts = torch.randint(0, 6, (600, 5), generator=generator)
    labels = ["low" if text[2] < 3 else "high" for text in texts]
    lists = [text[: 3 + i % 3].tolist() for i, text in enumerate(texts)]
    steps = []
    model = train_prefix_classifier(lists[:500], labels[:500], 6, SMALL, lambda note, count: steps.append(count))
    assert sum(steps) == SMALL.steps(500)
    assert classification_report(labels[500:], model.predict(lists[500:]), model.labels)["macro_f1"] > 0.95
    known, unknown = (model.log_prob(texts[:, :n], "low").exp() for n in (4, 2))
    assert (known - (texts[:, 2] < 3).float()).abs().mean() < 0.1
    assert (unknown - 0.5).abs().mean() < 0.2
    model.save(tmp_path)
    predictor = partial(PrefixClassifier.load(tmp_path).log_prob, label="low")
    assert torch.equal(predictor(texts[:, :4]), model.log_prob(texts[:, :4], "low"))
    with pytest.raises(sv.SamplingError, match="no label 'lo'; did you mean 'low'"):
        model.log_prob(texts, "lo")
    sv.Fudge(predictor)


MOODS = {"glad": ("lovely", "fine", "great"), "sad": ("dull", "poor", "bad")}
THINGS = ("film", "meal", "song", "house", "walk", "letter")


def tiny_encoder(folder: Path) -> Path:
    """A BERT with random weights that knows a few words."""
    words = ["[PAD]", "[UNK]", "a", "and", *THINGS, *MOODS["glad"], *MOODS["sad"]]
    inner = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, "[UNK]"))
    inner.normalizer, inner.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_an_encoder_becomes_a_judge(tmp_path: Path) -> None:
    recipe = EncoderRecipe(str(tiny_encoder(tmp_path / "encoder")), epochs=20.0, learning_rate=5e-3, longest=16)
    pairs = [
        (f"A {word} {thing} and a {other}", mood)
        for mood, of_mood in MOODS.items()
        for word, thing, other in product(of_mood, THINGS, THINGS)
    ]
    (texts, labels), (others, truth) = (zip(*part, strict=True) for part in (pairs[::2], pairs[1::2]))
    texts, labels, others = list(texts), list(labels), list(others)
    steps: list[int] = []
    judge = EncoderJudge.train(texts, labels, recipe, lambda note, count: steps.append(count))
    assert sum(steps) == recipe.steps(len(texts))
    assert classification_report(truth, judge.predict(others), judge.labels)["accuracy"] > 0.95
    judge.save(tmp_path / "judge")
    again = load_judge(tmp_path / "judge")
    assert isinstance(again, EncoderJudge)
    assert again.predict([*others, "", "DULL " * 100]) == judge.predict([*others, "", "dull " * 100])
    assert (again.predict([]), again.parameters) == ([], judge.parameters)
    control = sv.controls.TextClassifier.load(tmp_path / "judge", "sad")
    scores = control.log_prob(torch.zeros(len(others), 1, dtype=torch.int64), others).exp()
    assert [guess == "sad" for guess in judge.predict(others)] == (scores > 0.5).tolist()
    with pytest.raises(sv.SamplingError, match="2 texts with 1 labels"):
        EncoderJudge.train(["a", "b"], ["x"], recipe, lambda note, count: None)
    with pytest.raises(sv.SamplingError, match="cannot be loaded"):
        load_judge(tmp_path)


def test_an_encoder_becomes_a_control(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the commands: from a table to texts."""
    encoder, table, folder = tiny_encoder(tmp_path / "encoder"), tmp_path / "moods.csv", tmp_path / "mood"
    rows = [f"A {word} {thing},{mood}" for mood, words in MOODS.items() for word, thing in product(words, THINGS)]
    table.write_text("\n".join(["text,mood", *rows]) + "\n", encoding="utf-8")
    words = f"train classifier --kind encoder --model {encoder} --data {table} --label mood --out {folder} --epochs 3"
    assert run(words.split()) == 0
    assert "macro-F1" in capsys.readouterr().out
    sample = f"sample -n 2 --length 4 --ends never --control {folder}=glad --sampler rejection"
    assert run(sample.split()) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert run(words.replace(str(encoder), "bundled").split()) == 2
    assert "encoder 'bundled' cannot be loaded" in capsys.readouterr().err
