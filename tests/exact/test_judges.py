"""Training, saving and loading of the judges and the prefix classifier."""

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
from structured_voronoi.controls.text_classifier import TextClassifier
from structured_voronoi.core.progress import ignore_progress
from structured_voronoi.metrics.classification import classification_report
from structured_voronoi.models.encoder_judge import EncoderJudge, EncoderSettings, load_judge
from structured_voronoi.models.judge import Judge
from structured_voronoi.models.prefix_classifier import PrefixClassifier, PrefixSettings, train_prefix_classifier
from structured_voronoi.models.restaurants import FOODS, descriptions

SMALL = PrefixSettings(embedding=16, hidden=16, layers=2, dropout=0.0, epochs=12.0, batch_size=32, learning_rate=1e-2)


def labelled(count: int, seed: int) -> tuple[list[str], list[str]]:
    """Descriptions that mention a food, and the foods."""
    chosen = [description for description in descriptions(count, seed) if "food" in description.labels]
    return [description.text for description in chosen], [description.labels["food"] for description in chosen]


def test_judge_predicts_foods_and_is_saved(tmp_path: Path) -> None:
    judge = Judge.train(*labelled(3000, seed=5), seed=0)
    texts, labels = labelled(500, seed=6)
    report = classification_report(labels, judge.predict(texts), judge.labels)
    assert set(report["classes"]) == set(FOODS)
    assert report["macro_f1"] > 0.95
    judge.save(tmp_path)
    assert Judge.load(tmp_path).predict([*texts, "", "SUSHI!"]) == judge.predict([*texts, "", "sushi"])
    assert judge.predict([]) == []


@pytest.mark.parametrize(
    ("texts", "labels", "message"),
    [(["a", "b"], ["x"], "2 texts have 1 labels"), (["a", "b"], ["x", "x"], "the 2 texts have 1 distinct labels")],
)
def test_unusable_labels_are_rejected(texts: list[str], labels: list[str], message: str) -> None:
    for train in (
        lambda: Judge.train(texts, labels),
        lambda: EncoderJudge.train(texts, labels, EncoderSettings(), ignore_progress),
        lambda: train_prefix_classifier([[1], [2]], labels, 6, SMALL, ignore_progress),
    ):
        with pytest.raises(sv.SamplingError) as caught:
            train()
        assert caught.value.message == message


def test_prefix_classifier_predicts_labels_and_is_saved(tmp_path: Path) -> None:
    """The third token determines the label, so shorter prefixes tell nothing and longer ones everything."""
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
    with pytest.raises(sv.SamplingError) as caught:
        model.log_prob(texts, "lo")
    assert caught.value.remedy.startswith("did you mean 'low'?")
    sv.baselines.Fudge(predictor)


MOODS = {"glad": ("lovely", "fine", "great"), "sad": ("dull", "poor", "bad")}
THINGS = ("film", "meal", "song", "house", "walk", "letter")


def tiny_encoder(folder: Path) -> Path:
    """Save a BERT with random weights and a vocabulary of a few words."""
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


def test_encoder_is_fine_tuned_as_a_judge(tmp_path: Path) -> None:
    settings = EncoderSettings(str(tiny_encoder(tmp_path / "encoder")), epochs=20.0, learning_rate=5e-3, max_tokens=16)
    pairs = [
        (f"A {word} {thing} and a {other}", mood)
        for mood, of_mood in MOODS.items()
        for word, thing, other in product(of_mood, THINGS, THINGS)
    ]
    (texts, labels), (others, truth) = (zip(*part, strict=True) for part in (pairs[::2], pairs[1::2]))
    texts, labels, others = list(texts), list(labels), list(others)
    steps: list[int] = []
    judge = EncoderJudge.train(texts, labels, settings, lambda note, count: steps.append(count))
    assert sum(steps) == settings.steps(len(texts))
    assert classification_report(truth, judge.predict(others), judge.labels)["accuracy"] > 0.95
    judge.save(tmp_path / "judge")
    again = load_judge(tmp_path / "judge")
    assert isinstance(again, EncoderJudge)
    assert again.predict([*others, "", "DULL " * 100]) == judge.predict([*others, "", "dull " * 100])
    assert (again.predict([]), again.parameters) == ([], judge.parameters)
    control = TextClassifier.load(tmp_path / "judge", "sad")
    scores = control.log_prob(torch.zeros(len(others), 1, dtype=torch.int64), others).exp()
    assert [guess == "sad" for guess in judge.predict(others)] == (scores > 0.5).tolist()
    with pytest.raises(sv.SamplingError) as caught:
        load_judge(tmp_path)
    assert caught.value.cause
    assert "svs models get minilm" in caught.value.remedy


def test_command_trains_an_encoder_that_controls_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder, table, folder = tiny_encoder(tmp_path / "encoder"), tmp_path / "moods.csv", tmp_path / "mood"
    rows = [f"A {word} {thing},{mood}" for mood, words in MOODS.items() for word, thing in product(words, THINGS)]
    table.write_text("\n".join(["text,mood", *rows]) + "\n", encoding="utf-8")
    words = f"train classifier --kind encoder --model {encoder} --data {table} --label mood --out {folder} --epochs 3"
    assert run(words.split()) == 0
    assert "macro-F1" in capsys.readouterr().out
    sample = f"sample -n 2 --max-tokens 4 --finish length --control {folder}=glad --sampler rejection"
    assert run(sample.split()) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert run(words.replace(str(encoder), "bundled").split()) == 2
    assert "the encoder 'bundled' cannot be loaded" in capsys.readouterr().err
