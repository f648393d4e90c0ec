"""The contracts of the package: what a target, a control and a sampler are, and what a step reports.

All are protocols: any object with these attributes will do, there is no base class to inherit.
"""

from __future__ import annotations

from bisect import bisect
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from structured_voronoi.core.streams import Rng

Guidance = Literal["forward", "full", "none"]
"""Which field steers: the target's cheap guide (else its gradient), its full gradient, or none."""


class Target(Protocol):
    """An unnormalised distribution p(m) ∝ exp(log_prob(m)) over sequences of N embedded tokens.

    Optional, used when present:

    * ``log_prob_and_grad(tokens) -> (log_prob, (chains, N, d))``: also its gradient at the embeddings;
    * ``guide(tokens) -> (chains, N, d)``: a steering field that is cheaper than the gradient;
      ``log_prob_and_guide(tokens)`` gives both from one evaluation;
    * ``allowed``, bool (M,): the tokens that may be sampled;
    * ``memory``, ``row_bytes``, numbers: how many bytes an evaluation may hold, and how many a row of it takes;
    * ``padding``, a token: it fills a row after the end of its text; moves of single tokens leave it where it is, and
      put it nowhere else;
    * ``box``, a number: every coordinate of x lies in [-box, box] (the paper's compact set K);
    * ``relaxed_target()``: the same target with impossible states merely improbable, along which starts are searched;
    * ``why_impossible(tokens) -> str``: what makes these states impossible, for the error when no start is found.
    """

    @property
    def embeddings(self) -> Float[Tensor, "token d"]: ...
    @property
    def length(self) -> int: ...
    def log_prob(self, tokens: Int[Tensor, "chain n"]) -> Float[Tensor, " chain"]: ...


@runtime_checkable
class Enumerable(Target, Protocol):
    """A target so small that every state can be listed: its truth is known."""

    def support(self) -> Int[Tensor, "state n"]: ...
    def probabilities(self) -> Float[Tensor, " state"]: ...


@runtime_checkable
class Autoregressive(Target, Protocol):
    """A target that knows each token's distribution given those before it: what redrawing moves need.

    Optional, used when present:

    * ``redraw(tokens, start, stop, choose) -> Redrawn``: a range of positions redrawn at the cost of one evaluation;
    * ``ended(tokens) -> bool (chains,)``, with ``padding``: which texts end within N tokens; the others are impossible;
    * ``reorders``: True if rows of that redraw may go on from other rows, as particles do; see `Choose`;
    * ``token_log_probs(tokens) -> (chains, N)``: log p of each token given those before it;
    * ``soft_reading(weights, candidates) -> SoftReading``: the same for texts whose tokens are merely probable, each a
      mixture of candidates (chains, N, k) by weights (chains, N, k) that sum to 1; COLD needs it;
    * ``masks_itself``: True if ``conditionals`` leave out tokens that are not ``allowed``; otherwise they are masked;
    * ``normalised``: False where ``log_prob`` is not the sum of the tokens' log-probabilities;
    * ``log_bound``, a number: log_prob never exceeds that sum by more; rejection needs it;
    * ``log_factors(tokens) -> {name: (chains,)}``: the terms that log_prob has besides, each minus its bound; a
      lookahead learns them one by one, and ``patterns``, {name: Pattern}, are those that it can compile instead, unless
      they are compiled already and have ``automaton(length)``;
    * ``why_above_bound(tokens) -> str``: what exceeds the bound, for the error when something does;
    * ``temperature``, if not 1: redraws are refused, as the conditionals of p^(1/T) are not those of p.
    """

    def conditionals(self, tokens: Int[Tensor, "chain n"], start: int) -> Float[Tensor, "chain rest token"]: ...


TARGET_ABILITIES = {
    "log_prob_and_grad": "method",
    "guide": "method",
    "log_prob_and_guide": "method",
    "allowed": "value",
    "box": "value",
    "padding": "value",
    "ended": "method",
    "row_bytes": "value",
    "relaxed_target": "method",
    "why_impossible": "method",
    "conditionals": "method",
    "redraw": "method",
    "reorders": "value",
    "token_log_probs": "method",
    "soft_reading": "method",
    "masks_itself": "value",
    "normalised": "value",
    "log_bound": "value",
    "log_factors": "method",
    "patterns": "value",
    "why_above_bound": "method",
    "temperature": "value",
}
"""The optional attributes of targets and their kinds; a similar, misspelt name is refused."""

Choice = Int[Tensor, " chain"] | tuple[Int[Tensor, " chain"], Int[Tensor, " chain"]]
"""The token of each chain; or also its parent, the chain whose tokens before this position it goes on from."""
Choose = Callable[[int, Float[Tensor, "chain token"], Float[Tensor, "chain d"] | None], Choice]
"""(position, log-probabilities of its tokens, the hidden states that predict it or None) -> what is chosen.

Parents are given only to a target that says it ``reorders``; others go through their conditionals then.
"""


class Redrawn(NamedTuple):
    """Tokens of which a range was drawn from the model given those before it, and how probable all that follows is."""

    tokens: Int[Tensor, "chain n"]
    log_probs: Float[Tensor, "chain rest"]
    """log p of each token from the start of the range given those before it."""
    log_rest: Float[Tensor, " chain"]
    """What log p(m) holds besides the log-probabilities of all N tokens: suffix, end, controls."""


class SoftReading(NamedTuple):
    """What a target says of texts whose tokens are mixtures of candidates.

    Where each mixture is one token for certain, this is what ``conditionals`` and ``Redrawn.log_rest`` are.
    """

    log_probs: Float[Tensor, "chain n token"]
    """log p of every token given the mixtures before it."""
    log_rest: Float[Tensor, " chain"]
    """What log p(m) holds besides; terms that cannot read mixtures are left out."""
    slope: Float[Tensor, "chain n candidate"]
    """The gradient of ``log_rest`` at the weights."""


@runtime_checkable
class Control(Protocol):
    """A preference or constraint on texts: log p(t | m), or any log-score, of each text.

    Optional, used when present:

    * ``log_prob_and_grad(tokens, texts) -> (log_prob, (chains, N, d))``: also its gradient at the embeddings;
    * ``log_prob_and_guide(tokens, texts)``: the same without a backward pass through the language model;
    * ``soft_log_prob_and_grad(embeds) -> (log_prob, (chains, N, d))``: the score of input embeddings, which may be
      mixtures of tokens', and its gradient; without it the control does not steer COLD;
    * ``bind(model) -> Control``: the control made ready for a language model, or an error if it does not fit;
    * ``bound``, a number: scores never exceed it, so that rejection is possible; 0 if absent;
    * ``pattern``, a Pattern: texts that match it score 0, others -inf; a lookahead compiles it.
    """

    @property
    def name(self) -> str:
        """Unique within a target: the key of its column."""

    def log_prob(self, tokens: Int[Tensor, "chain n"], texts: list[str]) -> Float[Tensor, " chain"]: ...


CONTROL_ABILITIES = {
    "log_prob_and_grad": "method",
    "log_prob_and_guide": "method",
    "soft_log_prob_and_grad": "method",
    "bind": "method",
    "bound": "value",
    "pattern": "value",
}


@dataclass(frozen=True)
class Pattern:
    """What a text must match, or must not."""

    expression: str
    """As Python's `re` reads it."""
    ignore_case: bool = False
    whole: bool = False
    """Must the whole text match, or some part of it?"""
    negated: bool = False


BOUND_TOLERANCE = 1e-4
"""By how much rounding may lift a score above its bound."""


class Info(NamedTuple):
    """The statistics of one step of every chain.

    Over the steps of one thinned draw counts are added up and flags are or-ed; fields that describe the state are
    those of the last step.
    """

    energy: Float[Tensor, " chain"]
    """U(m) = -log p(m) of the state the step ended in."""
    evaluations: Int[Tensor, " chain"]
    """How often the target was evaluated at a state other than the current one."""
    gradients: Int[Tensor, " chain"]
    """How many of those evaluations also took a steering field."""
    events: Int[Tensor, " chain"]
    """Proposals met: walls or gates for SVS, proposed changes of cell for the other samplers."""
    swaps: Int[Tensor, " chain"]
    """Positions whose token differs from the one before the step."""
    reflections: Int[Tensor, " chain"]
    """Walls that reflected, the box included."""
    diverging: Bool[Tensor, " chain"]
    """The trajectory was abandoned (too many events); the chain stayed where it was."""
    nonfinite: Int[Tensor, " chain"]
    """Proposals whose energy was not finite; they count as impossible."""
    crossings: Int[Tensor, " chain"] | None = None
    """SVS: crossings that changed the token, some of them back again."""
    log_mass: Float[Tensor, " chain"] | None = None
    """Closed cells: log of the estimated mass of the cell the step ended in."""
    unreliable: Bool[Tensor, " chain"] | None = None
    """Closed cells: that mass comes from fewer than 50 counts at some position."""
    redraws: Int[Tensor, " chain"] | None = None
    """Refresh: blocks redrawn."""
    refreshed: Int[Tensor, " chain"] | None = None
    """Refresh: blocks redrawn and accepted."""
    redraws_by_length: Int[Tensor, "chain length"] | None = None
    """Refresh: blocks redrawn, by their length in tokens; see REDRAW_LENGTHS."""
    refreshed_by_length: Int[Tensor, "chain length"] | None = None
    """Refresh: those that were accepted."""
    log_weights: Float[Tensor, "chain choice fresh"] | None = None
    """Guided: log of p W / q of the fresh texts among which each choice of the last step was made."""


STATE_FIELDS = ("energy", "log_mass", "unreliable", "log_weights")
"""Fields of Info that describe the state or the texts a step ended with, and are not added up."""
REDRAW_LENGTHS = (1, 2, 4, 8, 16, 32)
"""Redraws are counted by length: of one token, of two or three, of four to seven, …, of 32 and more."""


def blank_info(energy: Float[Tensor, " chain"]) -> Info:
    """The report of a step in which nothing happened: the starting point for every sampler's counts."""
    zero = torch.zeros(len(energy), dtype=torch.int64, device=energy.device)
    return Info(energy, zero, zero, zero, zero, zero, zero.bool(), zero)


def count_redraws(accepted: Bool[Tensor, " chain"], length: int) -> dict[str, Tensor]:
    """The fields of Info about one redraw of each chain, all of this length."""
    by_length = torch.zeros(len(accepted), len(REDRAW_LENGTHS), dtype=torch.int64, device=accepted.device)
    by_length[:, bisect(REDRAW_LENGTHS, length) - 1] = 1
    return {
        "redraws": torch.ones_like(accepted, dtype=torch.int64),
        "refreshed": accepted.long(),
        "redraws_by_length": by_length,
        "refreshed_by_length": by_length * accepted[:, None],
    }


def merge_infos(earlier: Info, later: Info) -> Info:
    """The report of two steps: counts are added, flags or-ed, and the fields of the state are the later one's."""
    merged = {}
    for name, value in later._asdict().items():
        before = getattr(earlier, name)
        if name in STATE_FIELDS or before is None or value is None:
            merged[name] = before if value is None else value
        else:
            merged[name] = before | value if value.dtype == torch.bool else before + value
    return type(later)(**merged)


def restored_info(fields: dict[str, Any]) -> Any:
    """A report as it was before its fields were put into a checkpoint; a sampler may have an Info of its own."""
    return namedtuple("Restored", fields)(**fields)


Start = Literal["random", "ancestral"] | Int[Tensor, "chain n"] | None


class Synchronised(NamedTuple):
    """A sampler's state after another sampler has moved the tokens, and what that took of each chain."""

    state: Any
    evaluations: Int[Tensor, " chain"]
    gradients: Int[Tensor, " chain"]


class Sampler(Protocol):
    """An immutable settings object. All chains advance together as one batch.

    State is a NamedTuple that holds what the next step needs, ``tokens`` (chains, N) among it. ``target`` is the bound
    problem (structured_voronoi.problem), which has all attributes of the user's target.

    Optional, used when present:

    * ``tuned(target, seed, start) -> Sampler``: the same with settings found on pilot chains;
    * ``independent``, True where every step is a draw of its own, so that no warm-up is needed;
    * ``synchronise(target, rng, state, tokens, energy) -> Synchronised``: the state after another sampler has moved the
      tokens; `Cycle` needs it, and a state with ``energy`` (chains,).
    """

    def init(self, target: Any, rng: Rng, start: Start) -> Any: ...
    def step(self, target: Any, rng: Rng, state: Any) -> tuple[Any, Info]: ...


def is_independent(sampler: Sampler) -> bool:
    """Is every step a draw of its own?"""
    return bool(getattr(sampler, "independent", False))


def describe_settings(sampler: Sampler) -> dict[str, Any]:
    """The settings of a sampler, and of those it is made of, by name."""
    if not is_dataclass(sampler):
        return {"repr": repr(sampler)}
    settings = {field.name: getattr(sampler, field.name) for field in fields(sampler)}
    parts = settings.get("samplers")
    if isinstance(parts, tuple):
        settings["samplers"] = [{"sampler": type(part).__name__, **describe_settings(part)} for part in parts]
    return settings


def tune(sampler: Sampler, target: Any, seed: int, start: Start = None) -> Sampler:
    """The sampler with the settings that its pilot chains find, if it has any to find."""
    tuned: Callable[..., Sampler] | None = getattr(sampler, "tuned", None)
    return sampler if tuned is None else tuned(target, seed, start)


class Chains(Iterator[tuple[Any, Info]]):
    """The chains of a sampler as they advance: an endless iterator over (state, info), and the state they are in.

    Every run is such a loop: `sample`, texts, pilots, experiments and verification.
    """

    def __init__(self, sampler: Sampler, target: Any, rng: Rng, start: Start = None) -> None:
        self.sampler, self.target, self.rng = sampler, target, rng
        self.state = sampler.init(target, rng, start)

    def __next__(self) -> tuple[Any, Info]:
        self.state, info = self.sampler.step(self.target, self.rng, self.state)
        return self.state, info
