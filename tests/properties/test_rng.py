"""Random streams: published test vectors, distributions, and independent streams for all chains."""

import pytest
import torch
from scipy import stats

from structured_voronoi.core.streams import Rng, inverse_cdf, philox

PUBLISHED_OUTPUTS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
"""Counter, key and output of Philox4x32-10 in the Random123 distribution."""


@pytest.mark.parametrize(("counter", "key", "output"), PUBLISHED_OUTPUTS)
def test_philox_returns_the_published_outputs(counter: str, key: str, output: str) -> None:
    words = tuple(torch.tensor(int(word, 16)) for word in counter.split())
    first, second = (int(word, 16) for word in key.split())
    assert " ".join(f"{int(word):08x}" for word in philox(words, (first, second))) == output


def test_uniform_distribution() -> None:
    u = Rng(1, 100).uniform(500)
    assert u.dtype == torch.float64
    assert ((u > 0) & (u < 1)).all()
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 1e-4
    assert stats.kstest(u.mean(1).numpy(), "norm", args=(0.5, (1 / 12 / 500) ** 0.5)).pvalue > 1e-4


def test_normal_distribution() -> None:
    z = Rng(2, 100).normal(501)
    assert stats.kstest(z.flatten().numpy(), "norm").pvalue > 1e-4
    count = z.numel()
    assert abs(float(z.mean())) < 4 * (1 / count) ** 0.5
    assert abs(float((z**2).mean()) - 1) < 4 * (2 / count) ** 0.5
    assert abs(float((z**4).mean()) - 3) < 4 * (96 / count) ** 0.5


def test_consecutive_numbers_and_chains_are_uncorrelated() -> None:
    z = Rng(3, 100).normal(500)
    for one, other in ((z[:, 1:], z[:, :-1]), (z[1:], z[:-1])):
        assert abs(float((one * other).mean())) < 4 / one.numel() ** 0.5


def test_a_chain_does_not_depend_on_other_chains() -> None:
    together, alone = Rng(4, 10), Rng(4, [7])
    for shape in ((), (3,), (2, 3), (1,)):  # odd counts included: every call starts a new block
        assert torch.equal(together.uniform(*shape)[7:8], alone.uniform(*shape))
        assert torch.equal(together.normal(*shape)[7:8], alone.normal(*shape))


def test_streams_seeds_and_calls_return_different_numbers() -> None:
    numbers = [Rng(5, 3).uniform(4), Rng(6, 3).uniform(4), Rng(5, 3).fork("pilot").uniform(4)]
    again = Rng(5, 3)
    numbers += [again.uniform(4), again.uniform(4)]
    assert torch.equal(numbers[0], numbers[3])
    distinct = torch.stack([numbers[i] for i in (0, 1, 2, 4)]).flatten()
    assert len(distinct.unique()) == len(distinct)


def test_categorical_frequencies() -> None:
    weights = torch.tensor([0.1, 0.0, 0.2, 0.7], dtype=torch.float64)
    choice = Rng(7, 100).categorical(weights.log().expand(100, 400, 4))
    counts = torch.bincount(choice.flatten(), minlength=4)
    assert counts[1] == 0
    possible = [0, 2, 3]
    assert stats.chisquare(counts[possible], weights[possible] * choice.numel()).pvalue > 1e-4


@pytest.mark.parametrize("level", [2.0**-53, 1 - 2.0**-53])
def test_extreme_levels_select_possible_tokens(level: float) -> None:
    log_weights = torch.tensor([0.0, 1.0, 1.0, 0.0]).log()
    assert int(inverse_cdf(log_weights, torch.tensor(level, dtype=torch.float64))) in (1, 2)
