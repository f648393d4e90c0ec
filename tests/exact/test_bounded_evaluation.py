"""Bounds on memory, rounding and repeated evaluations at the sizes of real vocabularies."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import structured_voronoi as sv
from structured_voronoi.engine.plan import plan_texts
from structured_voronoi.engine.text_chains import TextChains
from structured_voronoi.geometry import masses
from structured_voronoi.geometry.cells import cells_of
from structured_voronoi.geometry.flows import Rotation
from structured_voronoi.problem.drawing import redraw
from structured_voronoi.problem.problem import bind

LOGITS = """
import sys
import torch, transformers
import structured_voronoi as sv
from structured_voronoi.models.loading import BUNDLED

torch.set_num_threads(1)

def peak():  # getrusage would include the parent process
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


config = transformers.GPT2Config(vocab_size=50_257, n_positions=128, n_embd=32, n_layer=1, n_head=2)
network = transformers.GPT2LMHeadModel(config).eval().requires_grad_(False)
words = transformers.AutoTokenizer.from_pretrained(BUNDLED)
model = sv.LanguageModel(network, words).target(max_tokens=64, allowed=list(range(50_000)), memory=int(sys.argv[1]))
tokens = torch.randint(50_000, (64, 64))
before = peak()
for score in (model.log_prob, model.log_prob_and_grad):
    score(tokens)
print(peak() - before)
"""


@pytest.mark.parametrize(("memory", "least", "most"), [(2**28, 0, 2**28), (2**40, 2**30, 2**40)])
def test_logits_of_a_large_vocabulary_stay_within_the_bound(memory: int, least: int, most: int) -> None:
    """Energies and gradients of 64 texts of 64 tokens out of 50,257; without the bound more memory is used."""
    done = subprocess.run([sys.executable, "-c", LOGITS, str(memory)], capture_output=True, text=True, check=True)
    assert least <= int(done.stdout) <= most


def test_language_models_do_not_depend_on_the_memory_bound() -> None:
    whole, parts = sv.load("bundled").target(max_tokens=9, suffix=" pub."), None
    parts = sv.LanguageModel(whole.network, whole.tokenizer).target(max_tokens=9, suffix=" pub.", memory=2**17)
    tokens = redraw(bind(whole), torch.full((24, 9), 300), 0, 9, torch.rand(24, 9, dtype=torch.float64)).tokens
    torch.testing.assert_close(parts.log_prob(tokens), whole.log_prob(tokens), rtol=0, atol=2e-5)
    for mine, theirs in zip(parts.log_prob_and_grad(tokens), whole.log_prob_and_grad(tokens), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)


def test_potential_change_is_accurate_in_single_precision() -> None:
    """Against float64, with 64 positions in 768 dimensions; a difference of two sums is 50 times less accurate."""
    generator = torch.Generator().manual_seed(0)
    before, noise = (torch.randn(32, 64, 768, generator=generator) for _ in range(2))
    after = before.clone()
    after[:, 7] += 0.1 * torch.randn(32, 768, generator=generator)
    flow, x = Rotation(0.5), before + 0.5 * noise
    exact = flow.potential(x.double(), after.double()) - flow.potential(x.double(), before.double())
    error = (flow.potential_change(x, before, after).double() - exact).abs().max()
    subtracted = ((flow.potential(x, after) - flow.potential(x, before)).double() - exact).abs().max()
    assert error < 2e-5
    assert subtracted > 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_redraws_and_evaluations_give_the_same_energies(dtype: str) -> None:
    """In half precision both use the same pass through the model."""
    model = sv.load("bundled", dtype=dtype).target(max_tokens=12, suffix=" It is")
    levels = sv.Rng(1, 16).uniform(12)
    redrawn = redraw(bind(model), torch.full((16, 12), 300), 0, 12, levels)
    energy = bind(model).evaluate(redrawn.tokens, "none").energy
    apart = (redrawn.log_probs.double().sum(-1) + redrawn.log_rest.double() + energy).abs().max()
    assert apart < 1e-4


class CountRows:
    """Counts the texts that a model reads from their beginning."""

    def __init__(self, model: Any) -> None:
        self.rows = 0
        model.base_model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, arguments: Any, named: dict[str, Any]) -> None:
        if named.get("past_key_values") is None:
            self.rows += len(named["input_ids"])


def test_ancestral_texts_are_decoded_once() -> None:
    """64 texts are 64 rows: log-probabilities from drawing are the score."""
    model = sv.load("bundled").target(max_tokens=4)
    counted = CountRows(model.network)
    texts = [
        text for batch in TextChains(model, plan_texts(model, "ancestral"), seed=0).draw(64) for text in batch.texts
    ]
    assert len(texts) == 64
    assert counted.rows == 64


def test_fudge_reads_each_text_once() -> None:
    model = sv.load("bundled").target(max_tokens=6)
    places = 0

    def count(module: Any, arguments: Any, named: dict[str, Any]) -> None:
        nonlocal places
        places += named["input_ids"].numel()

    model.network.base_model.register_forward_pre_hook(count, with_kwargs=True)
    sv.sample(
        model, sv.baselines.Fudge(lambda prefixes: torch.zeros(len(prefixes)), candidates=5), chains=8, draws=1, seed=0
    )
    assert places == 8 * 6  # the start token and five of six drawn tokens


class CountProducts:
    """Counts the rows that are multiplied with a table."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        multiply = masses.products

        def products(rows: Tensor, table: Tensor) -> Tensor:
            self.rows += len(rows)
            return multiply(rows, table)

        monkeypatch.setattr(masses, "products", products)


def test_estimated_masses_multiply_each_distinct_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """16,384 positions of which 512 are distinct; the table of all draws and cells does not fit into memory."""
    generator = torch.Generator().manual_seed(0)
    cells = cells_of(torch.randn(600, 8, generator=generator), memory=2**21)
    draws = torch.randn(256, 8, generator=generator)
    counted = CountProducts(monkeypatch)
    estimated = masses.EstimatedMasses(cells, 0.3 * draws, None)
    distinct = torch.randint(600, (512,), generator=generator)
    here = distinct[torch.randint(512, (1024, 16), generator=generator)]
    mass = estimated(here, cells.points(here)).value
    groups = -(-512 // (2**19 // (600 * 4) // 8 * 8))
    assert counted.rows <= 512 + groups * 256
    alone = masses.EstimatedMasses(cells_of(cells.table), 0.3 * draws, None)
    assert torch.allclose(mass[:5], alone(here[:5], cells.points(here[:5])).value)
