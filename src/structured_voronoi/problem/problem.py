"""A target bound for sampling: optional attributes looked up, results checked, cells cached."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from structured_voronoi.core.contracts import TARGET_ABILITIES, Guidance, Pattern, Target
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.streams import MEMORY, block_rows, in_blocks, widened
from structured_voronoi.core.validation import check_positive, refuse_misspelt
from structured_voronoi.geometry.cells import Cells, allowed_tokens, cells_of, spacing, working_dtype


class Evaluation(NamedTuple):
    """The energy and the steering field of each row."""

    energy: Float[Tensor, " row"]
    """U(m) = -log p(m); infinite if log p(m) is not finite."""
    field: Float[Tensor, "row n d"]
    """Zero if it is not finite: exactness does not depend on the field."""

    @property
    def possible(self) -> Bool[Tensor, " row"]:
        """The states of positive probability."""
        return self.energy.isfinite()


class Geometry:
    """The cells of a target's allowed tokens, and the unit of their distances."""

    def __init__(self, cells: Cells) -> None:
        self.cells = cells

    @cached_property
    def spacing(self) -> float:
        """The median distance between nearest neighbours."""
        return spacing(self.cells)


def bind(target: Target | Problem) -> Problem:
    """Check a target and look its optional attributes up, as samplers need them.

    Samplers bind their target themselves. Bind it once to call ``init`` and ``step`` of a sampler many times.

    Parameters
    ----------
    target
        A target, or a problem, which is returned unchanged.

    Returns
    -------
    Problem
        The bound target, which has all attributes of the target.

    Raises
    ------
    SamplingError
        If a required attribute is missing or wrong, or an optional one is misspelt.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> from structured_voronoi.problem.problem import bind
    >>> problem = bind(sv.PottsTarget(side=2))
    >>> problem.length, problem.is_autoregressive
    (4, False)
    """
    return target if isinstance(target, Problem) else Problem(target)


class Problem:
    """A target bound for sampling. Attributes that it lacks are the target's."""

    def __init__(self, target: Target) -> None:
        _check_target(target)
        refuse_misspelt(target, TARGET_ABILITIES, "target")
        self.target, self.name = target, type(target).__name__
        self.embeddings: Float[Tensor, "token d"] = target.embeddings
        self.length: int = target.length
        self.memory: int = getattr(target, "memory", None) or MEMORY
        self.row_bytes: int = getattr(target, "row_bytes", None) or 4 * 8 * self.length * self.embeddings.shape[1]
        self.device = self.embeddings.device
        self.dtype = working_dtype(self.embeddings)
        self.allowed: Bool[Tensor, " token"] | None = getattr(target, "allowed", None)
        self.allowed_tokens = allowed_tokens(self.allowed, len(self.embeddings), self.device)
        self.masks = len(self.allowed_tokens) < len(self.embeddings) and not getattr(target, "masks_itself", False)
        """Whether conditionals have to be masked: the target leaves that to the sampler."""
        self.box: float | None = getattr(target, "box", None)
        self.padding: int | None = getattr(target, "padding", None)
        self._check_padding()
        self.ended: Any = None if self.padding is None else getattr(target, "ended", None)
        self.has_gradient = getattr(target, "log_prob_and_grad", None) is not None
        self._log_prob_and_guide = getattr(target, "log_prob_and_guide", None)
        self._guide = getattr(target, "guide", None)
        self.has_guide = self._log_prob_and_guide is not None or self._guide is not None
        self.is_autoregressive = getattr(target, "conditionals", None) is not None
        self.temperature: float = getattr(target, "temperature", None) or 1.0
        self.own_redraw = getattr(target, "redraw", None)
        self.own_token_log_probs = getattr(target, "token_log_probs", None)
        self.soft_reading = getattr(target, "soft_reading", None)
        self.normalised = bool(getattr(target, "normalised", True))
        self.relaxed_target = getattr(target, "relaxed_target", None)
        self.log_factors = getattr(target, "log_factors", None)
        self.patterns: dict[str, Any] = getattr(target, "patterns", None) or {}
        """Of type Pattern, or compiled already."""
        self.has_patterns = any(isinstance(pattern, Pattern) for pattern in self.patterns.values())
        self.why_impossible = getattr(target, "why_impossible", None)
        self.why_above_bound = getattr(target, "why_above_bound", None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "target" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.target, name)

    def steers(self, guidance: Guidance) -> bool:
        """Whether evaluations with this guidance take a field from the target."""
        return (guidance == "forward" and self.has_guide) or (guidance != "none" and self.has_gradient)

    def evaluate(self, tokens: Int[Tensor, "row n"], guidance: Guidance = "full") -> Evaluation:
        """The energy of every row and the field of this guidance, from one evaluation of the target."""
        rows = block_rows(self.row_bytes, self.memory)
        log_prob, field = in_blocks(lambda block: self._evaluate_block(block, guidance), tokens, rows_at_a_time=rows)
        finite = field.isfinite().flatten(1).all(-1)
        return Evaluation(
            torch.where(log_prob.isfinite(), -log_prob, torch.inf), torch.where(finite[:, None, None], field, 0)
        )

    def evaluate_where(
        self, moved: Bool[Tensor, " chain"], tokens: Int[Tensor, "chain n"], known: Evaluation, guidance: Guidance
    ) -> Evaluation:
        """Evaluate the chains that have moved; the others keep their known evaluation."""
        energy, field = known.energy.clone(), known.field.clone()
        rows = moved.nonzero().squeeze(-1)
        if len(rows):
            energy[rows], field[rows] = self.evaluate(tokens[rows], guidance)
        return Evaluation(energy, field)

    def geometry(self, dimensions: int | None = None, memory: int | None = None) -> Geometry:
        """The cells of the allowed tokens, cached as long as the tensor of embeddings lives."""
        memory = self.memory if memory is None else memory
        mask = None if self.allowed is None else self.allowed.detach().cpu().numpy().tobytes()
        version = 0 if self.embeddings.is_inference() else self.embeddings._version
        cached: dict[Any, Geometry] = GEOMETRIES.setdefault(self.embeddings, {})  # type: ignore[no-untyped-call]
        key = (version, mask, dimensions, memory, self.padding)
        if key not in cached:
            for outdated in [other for other in cached if other[0] != version]:
                del cached[outdated]
            cached[key] = Geometry(cells_of(self.embeddings, self.allowed, dimensions, memory, self.padding))
        return cached[key]

    def cells(self) -> Cells:
        """The cells in all dimensions."""
        return self.geometry().cells

    def box_bounds(self, cells: Cells) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
        """The box K of the uniform base, in the coordinates of the cells' table."""
        if self.box is None:
            raise SamplingError(
                "the uniform base needs a bounded space and this target has no `box`",
                remedy="set the attribute `box` of the target, or base='gaussian'",
            )
        check_positive(box=self.box)
        low, high = -self.box - cells.origin, self.box - cells.origin
        outside = ((cells.table < low) | (cells.table > high)).any(-1).nonzero()
        if len(outside):
            token = int(cells.tokens[outside[0, 0]])
            raise SamplingError(
                f"{self.box} excludes the embedding of token {token}", argument="box", remedy="choose a larger box"
            )
        return low, high

    def _check_padding(self) -> None:
        if self.padding is None:
            return
        is_token = isinstance(self.padding, int) and 0 <= self.padding < len(self.embeddings)
        if not is_token or (self.allowed is not None and not self.allowed[self.padding]):
            raise SamplingError(
                f"`padding` is {self.padding!r}, which is no allowed token", remedy="name an allowed one"
            )

    def _evaluate_block(self, block: Tensor, guidance: Guidance) -> tuple[Tensor, Tensor]:
        target: Any = self.target
        if guidance == "forward" and self._log_prob_and_guide is not None:
            log_prob, field = self._log_prob_and_guide(block)
        elif guidance == "forward" and self._guide is not None:
            log_prob, field = target.log_prob(block), self._guide(block)
        elif guidance != "none" and self.has_gradient:
            log_prob, field = target.log_prob_and_grad(block)
        else:
            log_prob = target.log_prob(block)
            field = torch.zeros((), device=block.device).expand(*block.shape, self.embeddings.shape[1])
        check_shape(self, "log_prob", log_prob, block.shape[:1])
        check_shape(self, "gradient", field, (*block.shape, self.embeddings.shape[1]))
        return widened(log_prob.detach()), field.detach().to(self.dtype)


def check_shape(problem: Problem, name: str, value: object, shape: tuple[int, ...]) -> None:
    """Raise an error for a result of another shape, which might be broadcast silently."""
    if not isinstance(value, Tensor) or tuple(value.shape) != tuple(shape):
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
        raise SamplingError(
            f"the {name} of {problem.name} has {found} for {shape[0]} rows of tokens",
            remedy=f"return a tensor of shape {tuple(shape)}",
        )


def _check_target(target: Target) -> None:
    name = type(target).__name__
    for attribute in ("embeddings", "length", "log_prob"):
        if not hasattr(target, attribute):
            raise SamplingError(
                f"{name} is not a target: it has no `{attribute}`",
                remedy="give an object with `embeddings` (M, d), `length` and `log_prob(tokens)`",
            )
    if not isinstance(target.embeddings, Tensor) or target.embeddings.ndim != 2:
        raise SamplingError(
            f"the embeddings of {name} are no (M, d) tensor but {type(target.embeddings).__name__}",
            remedy="give a torch tensor with one row for each token",
        )
    if not isinstance(target.length, int) or target.length < 1:
        raise SamplingError(
            f"the length of {name} is {target.length!r}", remedy="give the number of positions, 1 or more"
        )


GEOMETRIES: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The cached geometries of each tensor of embeddings that is still in use."""
