"""The bundled model restricted to a few tokens, so that every text can be listed."""

from __future__ import annotations

import pytest
import torch

import structured_voronoi as sv
from helpers import forget_the_reverse
from structured_voronoi.base import Sampler
from structured_voronoi.experiments import truth
from structured_voronoi.experiments.checks import stationarity
from structured_voronoi.experiments.twins import OutwardOnly
from structured_voronoi.experiments.verify import LEVEL
from structured_voronoi.samplers import refresh, rejection
from structured_voronoi.targets.tabular import AutoregressiveTable

CHAINS, STEPS, SEED = 20_000, 12, 4
DIMENSIONS = 7  # of eight points: nothing is lost
WORDS = (" is", " the", " a", ".", " It", " and", " near", " has")


@pytest.fixture(scope="module")
def target() -> AutoregressiveTable:
    """All texts of three out of eight tokens, scored once by the model, with its own guidance."""
    loaded = sv.LanguageModel.load("bundled", length=3, prompt="The Old Mill")
    tokens = [loaded.tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in WORDS]
    model = sv.LanguageModel(loaded.model, loaded.tokenizer, "The Old Mill", 3, allowed=tokens)
    places = torch.cartesian_prod(*[torch.arange(8)] * 3)
    log_prob, guide = model.log_prob_and_guide(torch.tensor(tokens)[places])
    embeddings = model.embeddings[tokens].double()
    return AutoregressiveTable(embeddings, log_prob.view(8, 8, 8).double() / 2, guide.view(8, 8, 8, 3, -1).double() / 2)


@pytest.mark.parametrize(
    "sampler",
    [
        sv.SVS(0.7, dimensions=DIMENSIONS),
        sv.SVS(0.7, dimensions=3, guidance="none"),
        sv.PNCG(4.0),
        sv.GibbsWithGradients(),
        sv.Refresh(block=2, suffix=False),
        sv.Cycle(sv.SVS(0.7, dimensions=DIMENSIONS), sv.Refresh(block=2, suffix=False)),
    ],
    ids=str,
)
def test_samplers_keep_the_distribution_of_texts(target: AutoregressiveTable, sampler: Sampler) -> None:
    found = stationarity(target, sampler, CHAINS, STEPS, SEED)
    assert found.moved >= 0.3
    assert found.fit.p_value >= LEVEL


def test_outward_only_gates_are_seen_on_texts(target: AutoregressiveTable) -> None:
    assert stationarity(target, OutwardOnly(0.7, dimensions=DIMENSIONS), CHAINS, STEPS, SEED).fit.p_value < LEVEL


@pytest.mark.parametrize("sampler", [sv.PNCG(4.0), sv.GibbsWithGradients()], ids=str)
def test_proposals_without_their_reverse_are_seen_on_texts(
    target: AutoregressiveTable, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_the_reverse(monkeypatch)
    assert stationarity(target, sampler, CHAINS, STEPS, SEED).fit.p_value < LEVEL


@pytest.mark.parametrize("cycled", [False, True])
def test_redraws_that_always_stand_are_seen_on_texts(
    target: AutoregressiveTable, cycled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = sv.Refresh(block=2, suffix=False)
    monkeypatch.setattr(refresh, "log_ratio", lambda here, there, stop: 0 * here.right)
    sampler = sv.Cycle(sv.SVS(0.7, dimensions=DIMENSIONS), blocks) if cycled else blocks
    assert stationarity(target, sampler, CHAINS, STEPS, SEED).fit.p_value < LEVEL


@pytest.mark.parametrize("control", ["classifier", "black box"])
@pytest.mark.parametrize("name", ["svs", "refresh", "svs+refresh", "rejection"])
def test_samplers_keep_the_distribution_of_controlled_texts(control: str, name: str) -> None:
    steps = 1 if name == "rejection" else 6
    found = stationarity(truth.tabulated(control), truth.UNDER_CONTROL[name], 5000, steps, SEED)
    assert found.moved >= 0.3
    assert found.fit.p_value >= LEVEL


@pytest.mark.parametrize("control", ["classifier", "black box"])
@pytest.mark.parametrize("name", ["twin: outward only", "refresh", "svs+refresh", "rejection"])
def test_samplers_blind_to_a_control_are_seen(control: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redraws that leave the control out of what stands on the right; tries that are all accepted."""
    right = refresh.redraw

    def blind(target, tokens, start, stop, levels):  # type: ignore[no-untyped-def]
        return right(target, tokens, start, stop, levels)._replace(right=0 * levels[:, 0])

    monkeypatch.setattr(refresh, "redraw", blind)
    monkeypatch.setattr(rejection, "log_acceptance", lambda target, tokens, right: 0 * right)
    steps = 1 if name == "rejection" else 12
    found = stationarity(truth.tabulated(control), truth.UNDER_CONTROL[name], 10_000, steps, SEED)
    assert found.fit.p_value < LEVEL


def test_svs_from_ancestral_texts_does_not_drift() -> None:
    """Energies after 20 steps, chain by chain, against those of the ancestral starts: the same within 4 errors."""
    model = sv.LanguageModel.load("bundled", length=8)
    start = torch.tensor(
        sv.sample(model, sv.Ancestral(), chains=128, draws=1, warmup=0, seed=1, progress=False)["posterior"][
            "tokens"
        ].values
    )[:, 0]
    tree = sv.sample(
        model, sv.SVS(0.3, dimensions=32), chains=128, draws=1, warmup=20, seed=2, start=start, progress=False
    )
    change = torch.tensor(tree["sample_stats"]["energy"].values)[:, 0] + model.log_prob(start).double()
    assert (change != 0).double().mean() > 0.3
    assert abs(float(change.mean())) < 4 * float(change.std()) / 128**0.5
