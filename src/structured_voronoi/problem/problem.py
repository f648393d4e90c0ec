"""A target as samplers see it: every optional ability looked up once, energies checked, cells built once and kept."""

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
from structured_voronoi.geometry.cells import Cells, cells_of, spacing, working_dtype


class Evaluation(NamedTuple):
    """U(m) and the steering field of each row."""

    energy: Float[Tensor, " row"]
    """Infinite where log p(m) was not a finite number."""
    field: Float[Tensor, "row n d"]
    """Zero where it was not finite: any field will do, so that a broken one costs speed, not exactness."""

    @property
    def possible(self) -> Bool[Tensor, " row"]:
        return self.energy.isfinite()


class Geometry:
    """The cells of a target's allowed tokens, and the unit of their distances."""

    def __init__(self, cells: Cells) -> None:
        self.cells = cells

    @cached_property
    def spacing(self) -> float:
        """The median nearest-neighbour distance."""
        return spacing(self.cells)


def bind(target: Target | Problem) -> Problem:
    """The problem that a target poses; a problem is returned as it is."""
    return target if isinstance(target, Problem) else Problem(target)


class Problem:
    """A target bound for sampling. It has the target's own attributes, too, so that samplers may use those."""

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
        self.box: float | None = getattr(target, "box", None)
        self.padding: int | None = getattr(target, "padding", None)
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
        self.masks = self._leaves_out_tokens() and not getattr(target, "masks_itself", False)
        self.normalised = bool(getattr(target, "normalised", True))
        self._check_padding()
        self.relaxed_target = getattr(target, "relaxed_target", None)
        self.log_factors = getattr(target, "log_factors", None)
        self.patterns: dict[str, Any] = getattr(target, "patterns", None) or {}
        """Of type Pattern, or compiled already."""
        self.has_patterns = any(isinstance(pattern, Pattern) for pattern in self.patterns.values())
        self.why_impossible = getattr(target, "why_impossible", None)
        self.why_above_bound = getattr(target, "why_above_bound", None)

    def __getattr__(self, name: str) -> Any:
        """Attributes that the problem lacks are the target's."""
        if name.startswith("__") or "target" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.target, name)

    def steers(self, guidance: Guidance) -> bool:
        """Does an evaluation with this guidance also take a field from the target?"""
        return (guidance == "forward" and self.has_guide) or (guidance != "none" and self.has_gradient)

    def evaluate(self, tokens: Int[Tensor, "row n"], guidance: Guidance = "full") -> Evaluation:
        """One evaluation of the target for every row, with the field that the guidance asks for."""
        rows = block_rows(self.row_bytes, self.memory)
        log_prob, field = in_blocks(lambda block: self._evaluate_block(block, guidance), tokens, rows_at_a_time=rows)
        finite = field.isfinite().flatten(1).all(-1)
        return Evaluation(
            torch.where(log_prob.isfinite(), -log_prob, torch.inf), torch.where(finite[:, None, None], field, 0)
        )

    def evaluate_where(
        self, moved: Bool[Tensor, " chain"], tokens: Int[Tensor, "chain n"], known: Evaluation, guidance: Guidance
    ) -> Evaluation:
        """Evaluate the chains that have moved; the others keep their known evaluation, at no cost."""
        energy, field = known.energy.clone(), known.field.clone()
        rows = moved.nonzero().squeeze(-1)
        if len(rows):
            energy[rows], field[rows] = self.evaluate(tokens[rows], guidance)
        return Evaluation(energy, field)

    def geometry(self, dimensions: int | None = None, memory: int | None = None) -> Geometry:
        """The cells of the allowed tokens; built once for a table of embeddings and kept as long as it lives."""
        memory = self.memory if memory is None else memory
        mask = None if self.allowed is None else self.allowed.detach().cpu().numpy().tobytes()
        version = 0 if self.embeddings.is_inference() else self.embeddings._version
        kept: dict[Any, Geometry] = _KEPT.setdefault(self.embeddings, {})  # type: ignore[no-untyped-call]
        key = (version, mask, dimensions, memory, self.padding)
        if key not in kept:
            for outdated in [other for other in kept if other[0] != version]:
                del kept[outdated]
            kept[key] = Geometry(cells_of(self.embeddings, self.allowed, dimensions, memory, self.padding))
        return kept[key]

    def cells(self) -> Cells:
        """The cells in all dimensions."""
        return self.geometry().cells

    @cached_property
    def allowed_tokens(self) -> Int[Tensor, " allowed"]:
        """The tokens that may be sampled."""
        if self.allowed is None:
            return torch.arange(len(self.embeddings), device=self.device)
        return self.allowed.to(self.device).nonzero().squeeze(-1)

    def box_bounds(self, cells: Cells) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
        """The box K in the coordinates of the cells' table: what the uniform base needs."""
        if self.box is None:
            raise SamplingError(
                "the uniform base needs a bounded space and this target has no `box`",
                remedy="give it one or use base='gaussian'",
            )
        check_positive(box=self.box)
        low, high = -self.box - cells.origin, self.box - cells.origin
        outside = ((cells.table < low) | (cells.table > high)).any(-1).nonzero()
        if len(outside):
            token = int(cells.tokens[outside[0, 0]])
            raise SamplingError(
                f"box = {self.box} leaves out the embedding of token {token}",
                remedy="choose a larger box",
            )
        return low, high

    def _leaves_out_tokens(self) -> bool:
        """Does the `allowed` mask leave out any token? Refuses a mask of another shape or type."""
        if self.allowed is None:
            return False
        size = len(self.embeddings)
        if not isinstance(self.allowed, Tensor) or self.allowed.shape != (size,) or self.allowed.dtype != torch.bool:
            got = (
                f"shape {tuple(self.allowed.shape)} and type {self.allowed.dtype}"
                if isinstance(self.allowed, Tensor)
                else f"type {type(self.allowed).__name__}"
            )
            raise SamplingError(f"`allowed` has {got}", remedy=f"it must be a bool tensor of shape ({size},)")
        if not self.allowed.any():
            raise SamplingError(
                "`allowed` leaves out every token: there is nothing to sample",
                remedy="allow two or more",
            )
        return not bool(self.allowed.all())

    def _check_padding(self) -> None:
        """Refuse padding that is no token, or none that may be sampled."""
        if self.padding is None:
            return
        is_token = isinstance(self.padding, int) and 0 <= self.padding < len(self.embeddings)
        if not is_token or (self.allowed is not None and not self.allowed[self.padding]):
            raise SamplingError(
                f"`padding` is {self.padding!r}, which is no token that may be sampled",
                remedy="name an allowed one",
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
        self._check_shapes(block, log_prob, field)
        return widened(log_prob.detach()), field.detach().to(self.dtype)

    def _check_shapes(self, tokens: Tensor, log_prob: object, field: object) -> None:
        """Refuse results of a wrong shape, which would be broadcast silently."""
        expected = {"log_prob": tokens.shape[:1], "gradient": (*tokens.shape, self.embeddings.shape[1])}
        for (name, shape), value in zip(expected.items(), (log_prob, field), strict=True):
            if not isinstance(value, Tensor) or tuple(value.shape) != tuple(shape):
                got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
                raise SamplingError(
                    f"the {name} of {self.name} has {got} for {len(tokens)} rows of tokens",
                    remedy=f"it must be a tensor of shape {tuple(shape)}",
                )


def _check_target(target: Target) -> None:
    """Refuse what is not a target, naming what is wrong with it."""
    for name in ("embeddings", "length", "log_prob"):
        if not hasattr(target, name):
            raise SamplingError(
                f"{type(target).__name__} is not a target: it has no `{name}`",
                remedy="a target has `embeddings` (M, d), `length` and `log_prob(tokens)`",
            )
    if not isinstance(target.embeddings, Tensor) or target.embeddings.ndim != 2:
        raise SamplingError(
            f"the embeddings of {type(target).__name__} are no (M, d) tensor but {type(target.embeddings).__name__}",
            remedy="give a torch tensor with one row for each token",
        )
    if not isinstance(target.length, int) or target.length < 1:
        raise SamplingError(
            f"N = {target.length!r}: the target has no positions",
            remedy="its length must be 1 or more, a whole number",
        )


_KEPT: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The geometries of every table of embeddings that is still in use."""
