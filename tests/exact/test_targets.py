"""Targets against direct computation."""

import itertools

import pytest
import torch
from torch import Tensor

import structured_voronoi as sv
from structured_voronoi.core.contracts import Enumerable
from structured_voronoi.geometry.cells import cells_of
from structured_voronoi.targets.categorical import TOY_PROBABILITIES, hypercube, toy


def test_tabular_target_returns_entries_of_its_table() -> None:
    target = sv.verify.random_target(1, tokens=3, length=2)
    target.table[1, 2] = -torch.inf
    tokens = torch.tensor([[0, 1], [2, 2], [1, 2]])
    log_prob, field = target.log_prob_and_grad(tokens)
    assert torch.equal(target.log_prob(tokens), log_prob)
    for row, (i, j) in enumerate(tokens.tolist()):
        assert log_prob[row] == target.table[i, j]
        assert torch.equal(field[row], target.gradient[i, j])


def test_tabular_target_lists_possible_states_with_their_probabilities() -> None:
    target = sv.verify.random_target(1, tokens=3, length=2)
    target.table[1, 2] = -torch.inf
    assert isinstance(target, Enumerable)
    states = [state for state in itertools.product(range(3), repeat=2) if state != (1, 2)]
    assert target.support().tolist() == [list(state) for state in states]
    weights = torch.stack([target.table[state].exp() for state in states])
    assert torch.allclose(target.probabilities(), weights / weights.sum(), rtol=1e-14)


def test_tabular_target_without_gradient_has_a_zero_field() -> None:
    target = sv.TabularTarget(torch.eye(3), torch.zeros(3, 3))
    log_prob, field = target.log_prob_and_grad(torch.tensor([[0, 1]]))
    assert log_prob.tolist() == [0]
    assert torch.equal(field, torch.zeros(1, 2, 3))


def potts(states: int) -> sv.PottsTarget:
    field = torch.randn(states, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return sv.PottsTarget(side=3, states=states, coupling=0.7, field=field)


def potts_log_prob(target: sv.PottsTarget, tokens: list[int]) -> float:
    """log p computed site by site."""
    grid = {(i, j): tokens[3 * i + j] for i in range(3) for j in range(3)}
    equal = sum(grid[i, j] == grid.get((i + a, j + b)) for i, j in grid for a, b in ((0, 1), (1, 0)))
    return target.coupling * equal + sum(float(target.field[token]) for token in tokens)


def potts_polynomial(target: sv.PottsTarget, v: Tensor) -> Tensor:
    """log p as a polynomial in the embeddings v (N, d) of the sites."""
    q = target.states
    neighbours = [(3 * i + j, 3 * i + j + 1) for i in range(3) for j in range(2)]
    neighbours += [(3 * i + j, 3 * i + j + 3) for i in range(2) for j in range(3)]
    equal = sum((((q - 1) * v[a] @ v[b]) + 1) / q for a, b in neighbours)
    return target.coupling * equal + ((((q - 1) * v @ target.embeddings.T) + 1) / q @ target.field).sum()


@pytest.mark.parametrize("states", [2, 3, 5])
def test_potts_log_prob_and_gradient(states: int) -> None:
    target = potts(states)
    tokens = torch.randint(states, (20, 9), generator=torch.Generator().manual_seed(3))
    log_prob, gradient = target.log_prob_and_grad(tokens)
    assert torch.equal(log_prob, target.log_prob(tokens))
    for row, state in enumerate(tokens):
        v = target.embeddings[state].clone().requires_grad_()
        value = potts_polynomial(target, v)
        value.backward()
        assert float(log_prob[row]) == pytest.approx(potts_log_prob(target, state.tolist()), abs=1e-12)
        assert float(value.detach()) == pytest.approx(float(log_prob[row]), abs=1e-12)
        assert torch.allclose(gradient[row], v.grad, atol=1e-12)


def test_potts_embeddings_are_equidistant() -> None:
    gaps = torch.pdist(potts(5).embeddings)
    assert torch.allclose(gaps, gaps[0].expand_as(gaps), atol=1e-12)


def test_potts_support_and_probabilities() -> None:
    target = sv.PottsTarget(side=2, states=3)
    weights = torch.tensor([target.log_prob(state[None]).exp() for state in target.support()], dtype=torch.float64)
    assert len(target.support().unique(dim=0)) == 3**4
    assert torch.allclose(target.probabilities(), weights / weights.sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_toy_probabilities(temperature: float) -> None:
    weights = torch.tensor(TOY_PROBABILITIES, dtype=torch.float64) ** (1 / temperature)
    assert torch.allclose(toy(temperature).probabilities(), weights / weights.sum())


def test_hypercube_probabilities() -> None:
    weights = torch.arange(1, 9, dtype=torch.float64) ** 2
    assert torch.allclose(hypercube(3).probabilities(), weights / weights.sum())


@pytest.mark.parametrize("target", [toy(), hypercube(1), hypercube(3), hypercube(4)], ids=["toy", "1", "3", "4"])
def test_cells_of_the_toy_and_the_hypercube_have_equal_volume(target: sv.CategoricalTarget) -> None:
    """Volumes are counted on the midpoints of a regular grid in the box."""
    dimensions = target.embeddings.shape[1]
    axis = (torch.arange(8) + 0.5) / 8 * 2 * target.box - target.box
    cells = cells_of(target.embeddings)
    grid = torch.cartesian_prod(*[axis.double()] * dimensions).view(-1, 1, dimensions) - cells.origin
    counts = torch.bincount(cells.nearest(grid).flatten(), minlength=len(cells.table))
    assert (counts == len(grid) // len(cells.table)).all()


def test_a_subclass_of_target_needs_log_prob_and_is_checked_by_attributes() -> None:
    class Incomplete(sv.Target):
        embeddings, length = torch.eye(2), 3

    class Uniform(sv.Target):
        def __init__(self) -> None:
            self.embeddings, self.length = torch.eye(2), 3

        def log_prob(self, tokens: Tensor) -> Tensor:
            return torch.zeros(len(tokens))

    with pytest.raises(TypeError, match="log_prob"):
        Incomplete()
    assert not isinstance(Uniform(), Enumerable)
    draws = sv.sample(Uniform(), sv.SVS(scale=0.5), chains=2, draws=3, warmup=0, progress=False)
    assert draws["posterior"]["tokens"].shape == (2, 3, 3)
