"""A GGUF file gives the same model: the bundled one, written as GGUF, scores texts as the bundled one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

import structured_voronoi as sv

NAMES = {
    "transformer.wte.weight": "token_embd.weight",
    "transformer.wpe.weight": "position_embd.weight",
    "transformer.ln_f.weight": "output_norm.weight",
    "transformer.ln_f.bias": "output_norm.bias",
}
LAYER = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def name_in_gguf(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{LAYER[part]}.{kind}"


def write_gguf(path: Path, model: Any, tokenizer: Any) -> None:
    config, writer = model.config, gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    words = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(words["vocab"], key=words["vocab"].get))
    writer.add_token_merges([" ".join(pair) for pair in words["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    for name, tensor in model.named_parameters():
        matrix = any(part in name for part in ("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        writer.add_tensor(name_in_gguf(name), (tensor.T if matrix else tensor).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
