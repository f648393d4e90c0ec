"""A GGUF file gives the same model: the bundled one, written as GGUF, scores texts as the bundled one does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import structured_voronoi as sv
from system.gguf_files import write_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundled = sv.LanguageModel.load("bundled")
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, bundled.model, bundled.tokenizer)
    return path


def test_a_gguf_file_scores_texts_as_the_model_it_was_written_from(file: Path) -> None:
    bundled, loaded = (sv.LanguageModel.load(name, prompt="The Old Mill", length=6) for name in ("bundled", str(file)))
    tokens = sv.sample(bundled, sv.Ancestral(), chains=4, draws=1, warmup=0, seed=0, progress=False)
    texts = torch.tensor(tokens["posterior"]["tokens"].values[:, 0])
    torch.testing.assert_close(loaded.log_prob(texts), bundled.log_prob(texts), atol=1e-3, rtol=1e-3)
    assert [loaded.decode(row) for row in texts] == [bundled.decode(row) for row in texts]


def test_a_truncated_gguf_file_is_refused(file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(sv.SamplingError, match=r"broken\.gguf cannot be loaded: .*; the file may be damaged"):
        sv.LanguageModel.load(str(broken))


def test_the_context_is_that_of_the_file(file: Path) -> None:
    """The libraries take 1024 for that of every GPT-2."""
    with pytest.raises(sv.SamplingError, match="exceed the model's context of 128"):
        sv.LanguageModel.load(str(file), length=200)
