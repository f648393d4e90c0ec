"""Texts for one prompt or many, in Python and on the command line: `sv.generate` and `svs sample`."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import structured_voronoi as sv
from structured_voronoi.cli.prompt_files import read_prompts
from structured_voronoi.controls.predicate import Predicate
from structured_voronoi.engine import rounds
from structured_voronoi.engine.settings import EngineSettings
from structured_voronoi.lookahead.settings import LookaheadSettings
from structured_voronoi.models.loading import load_model
from structured_voronoi.models.prompts import encode_chat, encode_prompt, end_of_turn
from system.commands import svs

PROMPTS = ["Near the bridge", "The Old Mill is", "In the city"]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def is_even(text: str) -> bool:
    return len(text) % 2 == 0


def test_texts_come_prompt_by_prompt_and_as_a_table(tmp_path: Path) -> None:
    found = sv.generate("bundled", PROMPTS, n=2, max_tokens=40, seed=3, progress=False)
    table = found.to_pandas()
    assert list(table["text"]) == found.texts == list(found)
    assert len(found) == len(found.texts) == 6
    assert list(table["prompt"]) == [prompt for prompt in PROMPTS for _ in range(2)]
    assert list(table["index"]) == [0, 1] * 3
    assert list(table.columns) == ["prompt", "index", "text", "tokens", "finish_reason", "log_prob", "log_target"]
    assert found.diagnostics.ok
    assert found.diagnostics.run.startswith("6 texts; ")
    found.to_jsonl(tmp_path / "texts.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == found.texts


def test_prompts_that_share_a_batch_get_the_texts_that_they_get_alone() -> None:
    """Prompts of three lengths, two of them in one batch; the first prompt gets the texts that it gets alone."""
    prompts = [*PROMPTS, "Near the river"]
    shape: dict[str, Any] = {"n": 3, "max_tokens": 24, "finish": "stop", "seed": 5, "progress": False}
    together, alone = sv.generate("bundled", prompts, **shape), sv.generate("bundled", prompts[:1], **shape)
    assert together.texts[:3] == alone.texts
    model = sv.load("bundled").target(max_tokens=24, finish="stop")
    for text in together.draws:
        target = model.with_prompt(text.prompt)
        row = [*text.tokens, *[target.padding] * (24 - len(text.tokens))]
        assert text.log_target == pytest.approx(float(target.log_prob(torch.tensor([row]))), abs=1e-3)


def test_models_controls_and_functions_in_memory() -> None:
    model = sv.load("bundled")
    again = sv.LanguageModel(model.network, model.tokenizer)
    controls = [sv.keyword("river", weight=2.0), Predicate(lambda text: "pub" not in text, "no pub")]
    shape: dict[str, Any] = {"n": 4, "max_tokens": 30, "sampler": "rejection", "progress": False}
    found, same = sv.generate(model, "Near the", controls, **shape), sv.generate(again, "Near the", controls, **shape)
    assert found.texts == same.texts
    assert all("river" in text and "pub" not in text for text in found)
    assert set(found.to_pandas()["prompt"]) == {"Near the"}
    assert {"keyword=river", "no pub"} <= set(found.to_pandas().columns)
    with pytest.raises(sv.SamplingError) as caught:
        sv.generate(model.network, n=1, progress=False)
    assert "sv.LanguageModel(network, tokenizer)" in caught.value.remedy


def test_finish_and_stop() -> None:
    shape: dict[str, Any] = {"n": 6, "max_tokens": 30, "progress": False}
    stopped = sv.generate("bundled", "Near the", finish="stop", stop=".", **shape).draws
    assert all(text.finish_reason == "stop" and text.text.endswith(".") for text in stopped)
    cut = sv.generate("bundled", "Near the", finish="length", **shape).draws
    assert {(text.finish_reason, len(text.tokens)) for text in cut} == {("length", 30)}
    either = sv.generate("bundled", "Near the", **{**shape, "n": 40, "max_tokens": 24})
    assert {text.finish_reason for text in either.draws} == {"stop", "length"}
    short = sv.generate("bundled", "Near the", **{**shape, "max_tokens": 5})
    assert [warning.code for warning in short.diagnostics.warnings] == ["cut-texts"]
    (text,) = sv.generate(
        "bundled", "Near the", n=1, max_tokens=4, suffix=" pub.", sampler="refresh", warmup=2, progress=False
    ).draws
    assert (len(text.tokens), text.finish_reason) == (4, "length")


def test_a_stream_yields_the_texts_of_generate_as_they_are_accepted() -> None:
    shape: dict[str, Any] = {"controls": [sv.keyword("river")], "n": 5, "max_tokens": 30, "seed": 2}
    streamed = list(sv.stream("bundled", "Near the", **shape))
    assert sorted(map(str, streamed)) == sorted(sv.generate("bundled", "Near the", **shape, progress=False))
    first = next(iter(sv.stream("bundled", "Near the", **{**shape, "n": 10**6})))
    assert first.text == streamed[0].text


def test_under_control_every_prompt_is_drawn_from_in_turn() -> None:
    found = sv.generate(
        "bundled", PROMPTS[:2], [sv.keyword("family")], n=2, max_tokens=40, sampler="rejection", progress=False
    )
    assert len(found.texts) == 4
    assert all("family" in text for text in found.texts)
    assert len(found.probability) == len(found.error_bound) == 2
    assert found.error_bound == [0.0, 0.0]


def small_settings() -> EngineSettings:
    """An engine that learns early and quickly."""
    return EngineSettings(min_learning_tries=64, max_learning_tries=128, lookahead=LookaheadSettings(steps=30))


def test_one_lookahead_serves_several_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run and a new one give the same texts."""
    learnings, learn = [], rounds.learn

    def counted(*arguments: Any) -> Any:
        learnings.append(arguments)
        return learn(*arguments)

    monkeypatch.setattr(rounds, "learn", counted)
    monkeypatch.setattr(rounds.Rounds, "_learning_cost", lambda self: 0.0)

    def drawn(**how: Any) -> list[str]:
        controls = [sv.keyword("excellent"), Predicate(is_even, "even")]
        shape: dict[str, Any] = {"finish": "length", "settings": small_settings(), "progress": False}
        return sv.generate("bundled", PROMPTS[:3], controls, n=2, max_tokens=8, **shape, **how).texts

    texts = drawn(checkpoint=tmp_path / "run")
    assert len(learnings) == 1
    assert all("excellent" in text.lower() and is_even(text) for text in texts)
    assert drawn(checkpoint=tmp_path / "run") == drawn() == texts


def test_weighted_texts_have_weights_and_count_as_effective_ones() -> None:
    """Their self-normalised mean is that of texts of rejection."""
    shape: dict[str, Any] = {
        "controls": [sv.keyword("Italian")],
        "max_tokens": 12,
        "finish": "length",
        "progress": False,
    }
    table = sv.generate("bundled", n=60, weighted=True, seed=1, **shape).to_pandas()
    weight = np.exp(table["log_weight"] - table["log_weight"].max())
    assert weight.sum() ** 2 / (weight**2).sum() >= 60
    assert table["text"].str.contains("Italian", case=False).all()
    words = table["text"].str.count("the")
    mean = float((weight * words).sum() / weight.sum())
    error = float(np.sqrt((weight**2 * (words - mean) ** 2).sum()) / weight.sum())
    plain = sv.generate("bundled", n=60, sampler="rejection", seed=2, **shape).to_pandas()["text"].str.count("the")
    assert abs(mean - plain.mean()) < 4 * (error + float(plain.std()) / 60**0.5)
    with pytest.raises(sv.SamplingError, match="weighted texts need controls"):
        sv.generate("bundled", n=1, weighted=True, progress=False)


@pytest.mark.parametrize("tolerance", [-0.1, 0.5, float("nan"), "0.1", None])
def test_a_tolerance_that_is_no_distance_is_refused(tolerance: Any) -> None:
    with pytest.raises(sv.SamplingError, match="tolerance"):
        sv.generate("bundled", n=1, tolerance=tolerance, progress=False)


def test_a_time_limit_keeps_the_texts_so_far() -> None:
    found = sv.generate("bundled", controls=[sv.keyword("zebra")], n=8, max_tokens=8, time_limit=0.001, progress=False)
    assert len(found.texts) < 8
    assert "stopped after 0.001 s" in found.diagnostics.run


def test_ancestral_texts_of_many_prompts_are_refused_where_they_are_not_the_truth() -> None:
    for more in ({"controls": [sv.keyword("family")]}, {"suffix": " It is cheap."}):
        with pytest.raises(sv.SamplingError, match="ancestral"):
            sv.generate("bundled", PROMPTS, n=1, max_tokens=8, sampler="ancestral", progress=False, **more)


def test_the_mark_of_a_turn_is_not_put_before_a_plain_prompt() -> None:
    """SmolLM2's first token is `<|im_start|>`, after which a role would have to follow."""
    tokenizer = copy.deepcopy(load_model("bundled").tokenizer)
    plain, end = encode_prompt(tokenizer, "Near the"), tokenizer.eos_token_id
    assert plain[0] == end
    tokenizer.add_special_tokens({"bos_token": "<|im_start|>"})
    assert encode_prompt(tokenizer, "Near the") == [tokenizer.bos_token_id, *plain[1:]]
    tokenizer.chat_template = "{% for m in messages %}{{ '<|im_start|>' + m['role'] }}{% endfor %}"
    assert encode_prompt(tokenizer, "Near the") == plain[1:]
    assert encode_prompt(tokenizer, "") == [tokenizer.bos_token_id]


def test_a_chat_is_written_by_the_template_and_ends_with_the_turn() -> None:
    loaded = load_model("bundled")
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.chat_template = TEMPLATE
    said = tokenizer.decode(encode_chat(tokenizer, "Where is the pub?", "Be brief."))
    assert said == "system: Be brief.<|endoftext|>user: Where is the pub?<|endoftext|>assistant:"
    assert end_of_turn(tokenizer) == tokenizer.eos_token_id
    model = sv.LanguageModel(loaded.network, tokenizer).target("Where?", max_tokens=30, finish="stop", chat=True)
    assert tokenizer.decode(model.before[0].tolist()) == "user: Where?<|endoftext|>assistant:"
    assert model.with_prompt("Who?").before.shape[1] <= model.before.shape[1]
    with pytest.raises(sv.SamplingError, match="chat template"):
        sv.LanguageModel(loaded.network, loaded.tokenizer).target("Where?", max_tokens=30, chat=True)
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(sv.SamplingError, match="no system role"):
        sv.LanguageModel(loaded.network, tokenizer).target("Where?", max_tokens=30, system="Be brief.")


@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("prompts.txt", "Near the\n\nThe pub\n", "prompt"),
        ("prompts.csv", "id,prompt\n1,Near the\n2,The pub\n", "prompt"),
        ("prompts.tsv", "said\tid\nNear the\t1\nThe pub\t2\n", "said"),
        ("prompts.jsonl", '{"prompt": "Near the"}\n\n{"prompt": "The pub"}\n', "prompt"),
    ],
)
def test_files_of_prompts(name: str, content: str, column: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    assert read_prompts(path, column) == ["Near the", "The pub"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", b"\n \n", "holds no prompt"),
        ("latin.txt", "Caf\xe9".encode("latin-1"), "not UTF-8"),
        ("missing.csv", b"id,text\n1,a\n", "no column 'prompt'"),
        ("broken.jsonl", b'{"prompt": "a"}\n{"prompt"\n', "line 2 is no JSON"),
        ("other.jsonl", b'{"text": "a"}\n', "line 1 has no text under 'prompt'"),
        (
            "long.txt",
            b"a\n" + b"a pub " * 400 + b"\n",
            "prompt 2, 'a pub a pub a pub a pub a pub a pub a pu': prompt (802 tokens)",
        ),
    ],
)
def test_bad_files_of_prompts_end_in_one_line(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    path, out = tmp_path / name, tmp_path / "out.jsonl"
    path.write_bytes(content)
    done = svs("sample", "--prompts", str(path), "-n", "1", "--out", str(out), code=2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()


def test_the_command_says_which_prompt_a_text_belongs_to(tmp_path: Path) -> None:
    path, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    path.write_text("\n".join(PROMPTS), encoding="utf-8")
    done = svs("sample", "--prompts", str(path), "-n", "2", "--max-tokens", "40", "--out", str(out))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(line["prompt"] for line in lines) == sorted(PROMPTS * 2)
    assert sorted(line["index"] for line in lines) == [0, 0, 0, 1, 1, 1]
    assert all(f"{line['prompt']} →{line['text']}" in done.stdout for line in lines)
    assert "chat template" in svs("sample", "--chat", "--prompt", "Hello", "-n", "1", code=2).stderr
    both = svs("sample", "--prompt", "a", "--prompts", str(path), code=2)
    assert "--prompt and --prompts" in both.stderr
