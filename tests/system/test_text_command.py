"""`svs sample` and `svs train lm` as a user types them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import structured_voronoi as sv
from helpers import SVS
from structured_voronoi.controls.text_classifier import TextClassifier
from structured_voronoi.engine.plan import Plan
from structured_voronoi.engine.text_chains import TextChains, chain_status
from structured_voronoi.models.corpora import Corpus, load_corpus
from structured_voronoi.models.loading import BUNDLED
from structured_voronoi.models.restaurants import LABELS, PATTERNS, descriptions
from structured_voronoi.models.training import TrainingSettings, train_language_model
from structured_voronoi.models.training_run import CHECKPOINT_FOLDER, TrainingCheckpoint
from structured_voronoi.problem import starts
from structured_voronoi.samplers.registry import TEXT_SAMPLERS, text_sampler
from system.commands import svs

SMALL = TrainingSettings(vocabulary=300, width=16, layers=1, heads=2, context=64, batch_size=8, epochs=1.0)


def test_sample_writes_texts_and_lines(tmp_path: Path) -> None:
    out = tmp_path / "texts.jsonl"
    words = ("--sampler", "svs+refresh", "--scale", "0.3", "--warmup", "3", "--seed", "1")
    done = svs("sample", "-n", "3", "--finish", "length", "--max-tokens", "8", *words, "--out", str(out))
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [line["text"] for line in lines] == done.stdout.splitlines()
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert all(len(line["tokens"]) == 8 and line["finish_reason"] == "length" for line in lines)
    assert all(abs(line["log_prob"] - line["log_target"]) < 1e-3 for line in lines)
    assert "evaluations per text" in done.stderr
    drawn = svs("sample", "-n", "2", "--sampler", "rejection", "--control", "keyword=pub")
    assert re.search(r"2 texts; \d+ proposals; P\(controls\) = ", drawn.stderr)
    assert "approximate sampler" in svs("sample", "-n", "1", "--sampler", "mucola", "--warmup", "1").stderr


def test_texts_end_by_themselves_or_are_cut(tmp_path: Path) -> None:
    """They end with the end-of-text token, or with a stop string; tokens hold the end and no padding."""
    out = tmp_path / "texts.jsonl"
    said = svs("sample", "-n", "6", "--seed", "2", "--out", str(out)).stderr
    assert re.search(r"6 texts; \d+ proposals", said)
    model = sv.load("bundled").target(max_tokens=60, finish="any")
    for line in map(json.loads, out.read_text(encoding="utf-8").splitlines()):
        assert list(line) == ["prompt", "index", "text", "tokens", "finish_reason", "log_prob", "log_target"]
        assert line["finish_reason"] == "stop"
        assert line["text"].endswith((".", "!"))
        assert line["tokens"].index(0) == len(line["tokens"]) - 1
        row = torch.tensor([line["tokens"] + [0] * (60 - len(line["tokens"]))])
        assert float(model.log_prob(row)) == pytest.approx(line["log_prob"], abs=1e-3)
    words = (
        "--stop",
        "pub",
        "--stop",
        ".",
        "--control",
        "food=Italian@0.2",
        "--sampler",
        "svs+refresh",
        "--warmup",
        "1",
    )
    said = svs("sample", "-n", "6", *words, "--out", str(out)).stderr
    assert "6 texts" in said
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert all(re.search(r"(pub|\.)$", line["text"]) for line in lines if 0 not in line["tokens"])
    assert {line["finish_reason"] for line in lines} == {"stop"}
    warning = svs("sample", "-n", "4", "--max-tokens", "5").stderr.splitlines()[-1]
    assert "4 of 4 texts were cut at 5 tokens; use --max-tokens 10" in warning


def test_a_length_in_which_no_text_ends_is_refused_with_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "SEARCH_LIMITS", starts.SearchLimits(seconds=0.0))
    for words in ((), ("--sampler", "svs+refresh")):
        error = svs("sample", "-n", "2", "--max-tokens", "3", "--finish", "stop", *words, code=2).stderr.splitlines()[
            -1
        ]
        assert re.match(r"svs: \d+ of \d+ texts ended within 3 tokens; raise ", error)


def test_every_text_sampler_runs() -> None:
    model = sv.load("bundled").target(max_tokens=4)
    for name in set(TEXT_SAMPLERS) - {"auto", "adaptive"}:
        tree = sv.sample(model, text_sampler(name, 0.3), chains=2, draws=1, warmup=1, progress=False)
        assert tree["posterior"]["tokens"].shape == (2, 1, 4)


def test_ancestral_sampling_is_refused_where_it_is_not_the_truth() -> None:
    assert (
        "ancestral sampling ignores a suffix"
        in svs("sample", "--sampler", "ancestral", "--suffix", " pub.", code=2).stderr
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sample", "--model", "no/such-model"], "no/such-model"),
        (["sample", "--max-tokens", "500"], "context of 128"),
        (["sample", "--max-tokens", "0"], "--max-tokens 0"),
        (["sample", "--sampler", "svz"], "did you mean 'svs'"),
        (["sample", "-n", "0"], "-n 0"),
        (["sample", "--dtype", "float3"], "float32"),
        (["sample", "--seed", "-1"], "--seed -1"),
        (["sample", "--finish", "sometimes"], "--finish 'sometimes' is unknown; known: any, length, stop"),
        (["sample", "--max-tokens", "2", "--stop", "zebra zebra"], "'zebra zebra' is impossible: no 2 tokens"),
        (["sample", "--stop", ".", "--finish", "length"], "use finish='stop'"),
        (["sample", "--stop", ".", "--suffix", " pub."], "use finish='stop'"),
        (["sample", "--suffix", " pub.", "--finish", "stop"], "leave out the suffix"),
        (["train", "lm", "--data", "builtin", "--out", "x", "--seed", "-1"], "--seed -1"),
        (["sample", "--control", "regex="], "regular expression '' is empty"),
        (
            ["train", "lm", "--data", "nowhere.csv", "--out", "x"],
            "nowhere.csv cannot be read (No such file or directory)",
        ),
    ],
)
def test_wrong_options_end_in_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    error = svs(*words, code=2, cwd=tmp_path).stderr
    assert said in error
    assert len(error.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_damaged_models_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(sv.SamplingError, match=r"holds no config\.json"):
        sv.load(str(tmp_path / "empty")).target()
    damaged = tmp_path / "damaged"
    shutil.copytree(BUNDLED, damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(sv.SamplingError, match="damaged or incomplete"):
        sv.load(str(damaged)).target()
    with pytest.raises(sv.SamplingError, match="no such file"):
        sv.load(str(tmp_path / "model.gguf")).target()
    with pytest.raises(sv.SamplingError, match="give the folder"):
        sv.load(str(BUNDLED / "config.json")).target()


def test_weights_that_are_not_there_are_not_made_up(tmp_path: Path) -> None:
    """transformers fills what a file lacks with random numbers, and goes on."""
    lacking = tmp_path / "lacking"
    shutil.copytree(BUNDLED, lacking)
    weights = {name: part for name, part in load_file(lacking / "model.safetensors").items() if ".h.2." not in name}
    save_file(weights, lacking / "model.safetensors", {"format": "pt"})
    with pytest.raises(sv.SamplingError, match=r"lacks 12 of its weights"):
        sv.load(str(lacking)).target()
    with pytest.raises(sv.SamplingError, match=r"lacks 1 of its weights"):
        TextClassifier.load(BUNDLED, 1)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.txt", "\n\n", "holds no text"),
        ("few.txt", "one\ntwo\n", "holds 2 texts"),
        ("a.csv", "x,y\n1,2\n", "no column 'ref'"),
        ("torn.csv", 'ref\n"one' + "\x00" * 10, "holds 1 texts"),
    ],
)
def test_unusable_corpora_are_refused(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(sv.SamplingError, match=said):
        load_corpus(str(tmp_path / name))


def test_the_corpus_varies_and_its_labels_are_true() -> None:
    assert PATTERNS >= 60
    some = list(descriptions(500, seed=3))
    assert len({one.text for one in some}) > 490
    assert [one.text for one in descriptions(5, seed=3)] == [one.text for one in some[:5]]
    for name, values in LABELS.items():
        assert {one.labels[name] for one in some if name in one.labels} == set(values)
    assert all("sushi" not in one.text or one.labels["food"] == "Japanese" for one in some)


def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    texts = [one.text for one in descriptions(240, seed=0)]
    corpus = Corpus(texts, texts[:20])
    often = TrainingCheckpoint(steps=10)
    whole = train_language_model(corpus, tmp_path / "whole", SMALL, lambda note, steps: None, checkpoint=often)

    class Killed(Exception):
        pass

    taken = 0

    def kill(note: str, steps: int) -> None:
        nonlocal taken
        taken += steps
        if taken == 17:
            raise Killed

    with pytest.raises(Killed):
        train_language_model(corpus, tmp_path / "part", SMALL, kill, checkpoint=often)
    assert (tmp_path / "part" / CHECKPOINT_FOLDER).exists()
    with pytest.raises(sv.SamplingError, match="holds a run with texts = "):
        train_language_model(Corpus(texts[1:], texts[:20]), tmp_path / "part", SMALL, kill)
    again = train_language_model(corpus, tmp_path / "part", SMALL, lambda note, steps: None)
    assert again["held_out_loss"] == whole["held_out_loss"]
    assert not (tmp_path / "part" / CHECKPOINT_FOLDER).exists()
    tokens = sv.sample(
        sv.load(str(tmp_path / "part")).target(max_tokens=4), sv.Ancestral(), chains=2, draws=1, progress=False
    )
    assert tokens["posterior"]["tokens"].shape == (2, 1, 4)


class SometimesNaN(sv.TextTarget):
    """A target whose scores are NaN where the last token is odd."""

    def log_prob(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().log_prob(tokens).where(tokens[:, -1] % 2 == 0, torch.nan)

    def log_prob_and_guide(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, guide = super().log_prob_and_guide(tokens)
        return self.log_prob(tokens), guide


def test_a_model_that_yields_nan_stops_nothing_and_is_reported() -> None:
    model = SometimesNaN(sv.load("bundled"), max_tokens=6)
    plan = Plan("svs", sv.SVS(0.6, dimensions=16, guidance="none"), steps=20, starts_at_truth=False)
    batches = list(TextChains(model, plan, seed=0).draw(8))
    assert all(text.tokens[-1] % 2 == 0 for batch in batches for text in batch.texts)
    assert "probability 0" in chain_status(batches, plan, model)


def test_ancestral_draws_without_a_number_are_drawn_again_and_counted() -> None:
    """Whatever begins with this token has no score; a model without any number stops with an error."""
    model = sv.load("bundled").target(max_tokens=5)
    rows = 64
    first, _ = sv.Ancestral().step(model, sv.Rng(3, rows), sv.Ancestral().init(model, sv.Rng(3, rows), None))
    common = int(first.tokens[:, 0].mode().values)
    model.network.get_input_embeddings().weight = torch.nn.Parameter(
        model.embeddings.clone().index_fill(0, torch.tensor([common]), torch.nan), requires_grad=False
    )
    rng = sv.Rng(3, rows)
    state, info = sv.Ancestral().step(model, rng, sv.Ancestral().init(model, sv.Rng(4, rows), None))
    assert (state.tokens != common).all()
    assert info.energy.isfinite().all()
    assert info.nonfinite.sum() > 0
    alone = sv.Ancestral().step(model, sv.Rng(3, 2), sv.Ancestral().init(model, sv.Rng(4, 2), None))[0]
    assert torch.equal(alone.tokens, state.tokens[:2])
    model.network.get_input_embeddings().weight[:] = torch.nan
    for sampler in (sv.Ancestral(), sv.Rejection(max_tries=30)):
        with pytest.raises(sv.SamplingError, match=r"no finite log p|none of 30 tries"):
            sv.sample(model, sampler, chains=2, draws=1, progress=False)


def test_a_mistake_leaves_an_older_file_as_it_was(tmp_path: Path) -> None:
    out = tmp_path / "texts.jsonl"
    out.write_text("old\n")
    svs("sample", "--device", "nowhere", "--out", str(out), code=2)
    impossible = ("--sampler", "rejection", "--control", "no_rules:none", "--finish", "length", "--max-tokens", "3")
    (tmp_path / "no_rules.py").write_text("def none(text):\n    raise KeyError('no\\nidea')\n")
    assert len(svs("sample", *impossible, "--out", str(out), code=2, cwd=tmp_path).stderr.splitlines()) == 1
    assert out.read_text() == "old\n"
    svs("sample", "--model", "no/such-model", "--out", str(tmp_path / "new.jsonl"), code=2)
    assert not (tmp_path / "new.jsonl").exists()


def test_a_reader_may_stop_reading() -> None:
    command = f"{SVS} sample -n 20 --sampler ancestral | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300)
    assert len(done.stdout.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_the_default_sampler_is_a_rule_and_texts_come_with_a_probability() -> None:
    brief = ("--finish", "length", "--max-tokens", "8")
    assert re.fullmatch(r"svs: 2 texts; 2 proposals\n", svs("sample", "-n", "2", *brief).stderr)
    words = ("pub", "Italian")
    rare = (*brief, *(part for word in words for part in ("--control", f"keyword={word}")))
    done = svs("sample", "-n", "2", *rare)
    texts = done.stdout.splitlines()
    assert len(texts) == 2
    assert all(word.lower() in text.lower() for word in words for text in texts)
    assert re.search(r"2 texts; [\d,]+ proposals; P\(controls\) = \S+ \(95 %: .*\); error bound ", done.stderr)
    suffix = svs("sample", "-n", "1", "--warmup", "1", "--max-tokens", "4", "--suffix", " pub.")
    assert "svs: sampling with SVS and Refresh" in suffix.stderr
    found = svs("probability", "--texts", "512", *rare).stdout.splitlines()
    assert re.match(r"(un)?reliable \(effective sample size \d+", found[0])
    assert re.fullmatch(r"P = \S+ \(95 %: \S+ – \S+\)", found[1])
    assert "hits" in found[2]
    written = json.loads(svs("probability", "--texts", "512", "--json", *rare).stdout)
    assert written["value"] == pytest.approx(10 ** written["log10_value"])
    assert written["monte_carlo"] is None
