"""The Potts model on a square lattice."""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.core.errors import SamplingError


class PottsTarget:
    """Potts model on a side × side lattice without periodic boundaries; the Ising model with two states.

    log p(m) = coupling · (number of equal neighbours) + Σ_n field[m_n] + const. The embeddings of the q states are the
    corners of a regular simplex in R^(q-1), so that log p is a polynomial in the embeddings with an exact gradient.

    Parameters
    ----------
    side
        Number of rows and columns.
    states
        q, the number of states of a site.
    coupling
        Weight of a pair of equal neighbours.
    field
        Weight of each state; zeros by default.
    device
        Device of the tensors.

    Raises
    ------
    SamplingError
        If there are no sites, fewer than two states, or a field of another size.

    Examples
    --------
    >>> import torch
    >>> import structured_voronoi as sv
    >>> target = sv.PottsTarget(side=2, states=2, coupling=1.0)
    >>> target.log_prob(torch.tensor([[0, 0, 0, 0], [0, 1, 1, 0]]))
    tensor([4., 0.], dtype=torch.float64)
    """

    def __init__(
        self,
        side: int,
        states: int = 2,
        coupling: float = 0.4,
        field: Float[Tensor, " state"] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if side < 1 or states < 2:
            raise SamplingError(
                f"side = {side}, states = {states} is not a lattice", remedy="use side ≥ 1 and two or more states"
            )
        self.states, self.coupling, self.length = states, coupling, side * side
        self.field = (torch.zeros(states) if field is None else field).double().to(device)
        if self.field.shape != (states,):
            raise SamplingError(
                f"field has shape {tuple(self.field.shape)}",
                remedy=f"give one number for each of the {states} states",
            )
        self.embeddings = _simplex(states).to(device)
        sites = torch.arange(self.length, device=device).view(side, side)
        across, down = (sites[:, :-1], sites[:, 1:]), (sites[:-1], sites[1:])
        self.edges = torch.cat([torch.stack([a.flatten(), b.flatten()], -1) for a, b in (across, down)])

    def log_prob(self, tokens: Int[Tensor, "chain n"]) -> Float[Tensor, " chain"]:
        """Return log p up to a constant."""
        equal = tokens[:, self.edges[:, 0]] == tokens[:, self.edges[:, 1]]
        return self.coupling * equal.sum(-1).double() + self.field[tokens].sum(-1)

    def log_prob_and_grad(self, tokens: Int[Tensor, "chain n"]) -> tuple[Tensor, Tensor]:
        """Return log p and its gradient at the embeddings.

        [m = m'] equals ((q-1) v·v' + 1)/q, and field[m] equals (q-1)/q Σ_k field[k] v_k·v + const: linear in v.
        """
        v, share = self.embeddings[tokens], (self.states - 1) / self.states
        grad = (share * self.field @ self.embeddings).expand_as(v).clone()
        a, b = self.edges.unbind(-1)
        grad.index_add_(1, a, self.coupling * share * v[:, b])
        grad.index_add_(1, b, self.coupling * share * v[:, a])
        return self.log_prob(tokens), grad

    def support(self) -> Int[Tensor, "state n"]:
        """Return every state; an error if there are more than about a million."""
        if self.states**self.length > 2**20:
            raise SamplingError(
                f"{self.states}^{self.length} states are too many to list",
                remedy="use a smaller side or fewer states",
            )
        return torch.tensor(
            list(itertools.product(range(self.states), repeat=self.length)), device=self.embeddings.device
        )

    def probabilities(self) -> Float[Tensor, " state"]:
        """Return the exact probability of each state."""
        return self.log_prob(self.support()).softmax(0)


def _simplex(corners: int) -> Float[Tensor, "corner d"]:
    """Return unit vectors in R^(corners-1) with equal angles between them."""
    centred = torch.eye(corners, dtype=torch.float64) - 1 / corners
    axes: Tensor = torch.linalg.eigh(centred).eigenvectors[:, 1:]
    points: Tensor = centred @ axes
    return torch.nn.functional.normalize(points)
