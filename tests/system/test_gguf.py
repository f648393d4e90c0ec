"""GGUF files: the bundled model, written as a GGUF file, is the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import structured_voronoi as sv
from structured_voronoi.models.loading import load_model
from system.gguf_files import write_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, *load_model("bundled"))
    return path


def test_gguf_file_scores_texts_as_the_original_model(file: Path) -> None:
    bundled, loaded = (sv.load(name).target("The Old Mill", max_tokens=6) for name in ("bundled", str(file)))
    tokens = sv.sample(bundled, sv.Ancestral(), chains=4, draws=1, warmup=0, seed=0, progress=False)
    texts = torch.tensor(tokens["posterior"]["tokens"].values[:, 0])
    torch.testing.assert_close(loaded.log_prob(texts), bundled.log_prob(texts), atol=1e-3, rtol=1e-3)
    assert [loaded.decode(row) for row in texts] == [bundled.decode(row) for row in texts]


def test_truncated_gguf_file_is_rejected(file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(sv.SamplingError) as caught:
        load_model(str(broken))
    assert caught.value.message == f"model {broken} cannot be loaded"
    assert caught.value.cause
    assert "damaged" in caught.value.remedy


def test_context_is_read_from_the_position_table(file: Path) -> None:
    """transformers assumes 1024 positions for every GPT-2 in a GGUF file."""
    assert load_model(str(file)).network.config.max_position_embeddings == 128
