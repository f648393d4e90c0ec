"""What samplers ask of a target: the energy and a steering field, checked, and a start that has them."""

from __future__ import annotations

import numbers
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.base import Rng, SamplingError, Start, Target, did_you_mean, in_blocks
from structured_voronoi.geometry.cells import MEMORY, Cells, cells_of, working_dtype
from structured_voronoi.samplers.autoregressive import ancestral_draw, satisfying

Guidance = Literal["forward", "full", "none"]
TRIES, LED_TRIES = 500, 1500
"""Draws of each chain that needs a start of finite energy; redraws that are led to one."""


class NoStartError(SamplingError):
    """No state of finite energy was found to start from."""


class Evaluation(NamedTuple):
    """U(m) and the steering field of each row; infinite and zero where either was not finite."""

    energy: Float[Tensor, " row"]
    field: Float[Tensor, "row n d"]
    finite: Bool[Tensor, " row"]


def evaluate(target: Target, tokens: Int[Tensor, "row n"], guidance: Guidance = "full") -> Evaluation:
    """One evaluation of the target for every row, with the field that the guidance asks for; energies in float64."""
    dtype = working_dtype(target.embeddings)

    def of(block: Tensor) -> tuple[Tensor, Tensor]:
        if guidance == "forward" and hasattr(target, "log_prob_and_guide"):
            log_prob, field = target.log_prob_and_guide(block)
        elif guidance == "forward" and hasattr(target, "guide"):
            log_prob, field = target.log_prob(block), target.guide(block)
        elif guidance != "none" and hasattr(target, "log_prob_and_grad"):
            log_prob, field = target.log_prob_and_grad(block)
        else:
            log_prob = target.log_prob(block)
            field = torch.zeros((), device=block.device).expand(*block.shape, target.embeddings.shape[1])
        _check_shapes(target, block, log_prob, field)
        return log_prob.detach().double(), field.detach().to(dtype)

    log_prob, field = in_blocks(of, tokens)
    finite = log_prob.isfinite() & field.isfinite().flatten(1).all(-1)
    return Evaluation(torch.where(finite, -log_prob, torch.inf), torch.where(finite[:, None, None], field, 0), finite)


def evaluate_where(
    target: Target, moved: Bool[Tensor, " chain"], tokens: Int[Tensor, "chain n"], known: Evaluation, guidance: Guidance
) -> Evaluation:
    """The evaluation of chains that have moved; the others keep what is known of them, at no cost."""
    energy, field, finite = (part.clone() for part in known)
    rows = moved.nonzero().squeeze(-1)
    if len(rows):
        energy[rows], field[rows], finite[rows] = evaluate(target, tokens[rows], guidance)
    return Evaluation(energy, field, finite)


def _check_shapes(target: Target, tokens: Tensor, log_prob: object, field: object) -> None:
    """Refuse what would be broadcast into nonsense."""
    expected = {"log_prob": tokens.shape[:1], "gradient": (*tokens.shape, target.embeddings.shape[1])}
    for (name, shape), found in zip(expected.items(), (log_prob, field), strict=True):
        if not isinstance(found, Tensor) or tuple(found.shape) != tuple(shape):
            what = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"type {type(found).__name__}"
            raise SamplingError(
                f"the {name} of {type(target).__name__} has {what} for {len(tokens)} rows of tokens; "
                f"it must be a tensor of shape {tuple(shape)}"
            )


def steers(target: Target, guidance: Guidance) -> bool:
    """Does an evaluation with this guidance also take a field from the target?"""
    if guidance == "forward" and (hasattr(target, "log_prob_and_guide") or hasattr(target, "guide")):
        return True
    return guidance != "none" and hasattr(target, "log_prob_and_grad")


def cells_of_target(target: Target, dimensions: int | None = None, memory: int = MEMORY) -> Cells:
    """The cells of a target's allowed tokens."""
    if target.length < 1:
        raise SamplingError(f"N = {target.length}: the target has no positions; its length must be 1 or more")
    return cells_of(target.embeddings, getattr(target, "allowed", None), dimensions, memory)


def begin(
    target: Target, cells: Cells, rng: Rng, start: Start, guidance: Guidance
) -> tuple[Int[Tensor, "chain n"], Evaluation]:
    """The tokens the chains start from, all of finite energy, and their evaluation."""
    shape = (len(rng), target.length)
    if isinstance(start, Tensor):
        tokens = _checked(start, shape, cells)
        first = evaluate(target, tokens, guidance)
        if not first.finite.all():
            chain = int((~first.finite).nonzero()[0, 0])
            raise SamplingError(
                f"the start of chain {chain}, tokens {tokens[chain].tolist()}, has no finite energy and gradient; "
                "start from a state with positive probability"
            )
        return tokens, first
    rng = rng.fork("start")  # retries of one chain must not shift the random numbers of another
    if start is None:
        start = "ancestral" if hasattr(target, "conditionals") else "random"
    if not isinstance(start, str) or start not in ("random", "ancestral"):
        choices = did_you_mean(str(start), ["random", "ancestral"])
        raise SamplingError(f"start = {start!r} is not possible; {choices}; or an int64 tensor of shape {shape}")

    def drawn() -> Tensor:
        return ancestral_draw(target, rng).tokens if start == "ancestral" else _random(cells, rng, shape)

    tokens = drawn()
    if hasattr(target, "softened"):
        tokens = satisfying(target, rng, tokens, LED_TRIES)
    for _ in range(TRIES):
        first = evaluate(target, tokens, guidance)
        if first.finite.all():
            return tokens, first
        if hasattr(target, "softened"):  # what redraws that are led to it do not find, blind ones will not
            break
        tokens = torch.where(first.finite[:, None], tokens, drawn())
    failed = int((~first.finite).sum())
    draws = f"{failed * LED_TRIES} redraws" if hasattr(target, "softened") else f"{failed * TRIES} {start} draws"
    raise NoStartError(
        f"{failed} of {len(rng)} chains found no state of finite energy: none of their {draws} had one"
        f"{_refusals(target, tokens[~first.finite])} lengthen the text, try rejection, or give tokens to start from"
    )


def _refusals(target: Target, tokens: Int[Tensor, "row n"]) -> str:
    """Which controls, if there are any, find these tokens impossible, and how many of them; with the remedy."""
    if not hasattr(target, "control_log_probs"):
        return ";"
    scores = target.control_log_probs(tokens)
    shares = {control.name: float((~score.isfinite()).double().mean()) for control, score in scores.items()}
    said = ", ".join(f"{name} refused {share:.0%} of the last ones" for name, share in shares.items() if share)
    return f" ({said}); loosen the control, or" if said else ";"


def positive(**values: float | None) -> None:
    """Refuse settings that are not positive finite numbers; None stands for "not set"."""
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < value < float("inf"):
            raise SamplingError(f"{name} = {value!r} is not a positive number; choose one, for example {name}=0.5")


def number(**values: float) -> None:
    """Refuse settings that are not finite numbers."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not abs(value) < float("inf"):
            raise SamplingError(f"{name} = {value!r} is not a finite number; choose one, for example {name}=1.0")


def whole(**values: int) -> None:
    """Refuse settings that are not whole numbers of at least 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
            raise SamplingError(f"{name} = {value!r} is not a whole number of at least 1; choose one")


def box_of(target: Target, cells: Cells) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
    """The box K of a target, in the coordinates of the cells' table: what the uniform base needs."""
    box = getattr(target, "box", None)
    if box is None:
        raise SamplingError(
            "the uniform base needs a bounded space and this target has no `box`; give it one or use base='gaussian'"
        )
    positive(box=box)
    low, high = -box - cells.origin, box - cells.origin
    outside = ((cells.table < low) | (cells.table > high)).any(-1).nonzero()
    if len(outside):
        token = int(cells.tokens[outside[0, 0]])
        raise SamplingError(f"box = {box} leaves out the embedding of token {token}; choose a larger box")
    return low, high


def one_of(kind: object, **values: object) -> None:
    """Refuse settings that are not among the words of a Literal type."""
    for name, value in values.items():
        if value not in get_args(kind):
            raise SamplingError(f"{name} = {value!r} is unknown; {did_you_mean(str(value), get_args(kind))}")


def _random(cells: Cells, rng: Rng, shape: tuple[int, int]) -> Tensor:
    return cells.tokens[(rng.uniform(shape[1]) * len(cells.tokens)).long()]


def _checked(start: Tensor, shape: tuple[int, int], cells: Cells) -> Tensor:
    if start.shape != shape or start.dtype != torch.int64:
        raise SamplingError(
            f"start has shape {tuple(start.shape)} and type {start.dtype}; "
            f"it must be int64 of shape {shape}: (chains, N)"
        )
    start = start.to(cells.table.device)
    known = (start >= 0) & (start < len(cells.cell_of))
    bad = ~known | (cells.cell_of[torch.where(known, start, 0)] < 0)
    if bad.any():
        chain, n = bad.nonzero()[0].tolist()
        raise SamplingError(
            f"start holds token {int(start[chain, n])} at chain {chain}, position {n}, which is not "
            f"allowed or outside the vocabulary of {len(cells.cell_of)}; start from allowed tokens"
        )
    return start
