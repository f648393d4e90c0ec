"""What a target, a control and a sampler are, and what a step of a sampler reports.

All are protocols: any object with these attributes can be used, and subclassing is optional.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from structured_voronoi.core.info import Info

if TYPE_CHECKING:
    from structured_voronoi.core.streams import Rng

Guidance = Literal["forward", "full", "none"]
"""Steering field of a sampler: the target's guide (or its gradient, if it has none), its gradient, or none."""


class Target(Protocol):
    """Unnormalised distribution p(m) ∝ exp(log_prob(m)) over sequences m of N embedded tokens.

    Any object with these attributes is a target. `sv.Target` may be subclassed; then Python refuses to instantiate a
    class without ``log_prob``.

    Attributes
    ----------
    embeddings
        Tensor (M, d) with one row per token.
    length
        N, the number of positions.
    log_prob(tokens)
        log p up to a constant, shape (chains,), of tokens (chains, N); -inf for impossible states.

    Notes
    -----
    Optional attributes, with their defaults:

    * ``log_prob_and_grad(tokens) -> (log_prob, (chains, N, d))``: also the gradient at the embeddings; without it
      samplers are not guided;
    * ``guide(tokens) -> (chains, N, d)``: a steering field that is cheaper than the gradient, which is the default;
    * ``log_prob_and_guide(tokens)``: both from one evaluation; two evaluations;
    * ``allowed``: bool (M,), the tokens that may be sampled; all;
    * ``memory``: bytes that an evaluation may use; 256 MiB;
    * ``row_bytes``: bytes that one row of an evaluation uses; an estimate from N and d;
    * ``padding``: a token that fills a row after the end of its text, which moves of single tokens neither replace nor
      introduce; none;
    * ``box``: bound of every coordinate of x, in [-box, box], for ``base="uniform"``; none;
    * ``relaxed_target() -> Target``: the same target with impossible states merely improbable, for the search of
      starts; the target;
    * ``why_impossible(tokens) -> str``: why these states are impossible, for error messages; "".

    Examples
    --------
    >>> import torch
    >>> import structured_voronoi as sv
    >>> class Repeats(sv.Target):
    ...     embeddings, length = torch.eye(2), 3
    ...     def log_prob(self, tokens):
    ...         return (tokens[:, 1:] == tokens[:, :-1]).sum(-1).double()
    >>> draws = sv.sample(Repeats(), sv.SVS(scale=0.5), chains=2, draws=5, warmup=0, progress=False)
    >>> draws["posterior"]["tokens"].shape
    (2, 5, 3)
    """

    if TYPE_CHECKING:  # read-only, so that properties match

        @property
        def embeddings(self) -> Float[Tensor, "token d"]: ...
        @property
        def length(self) -> int: ...
    else:
        embeddings: Tensor
        length: int

    @abstractmethod
    def log_prob(self, tokens: Int[Tensor, "chain n"]) -> Float[Tensor, " chain"]: ...


@runtime_checkable
class Enumerable(Target, Protocol):
    """Target whose states can be listed with their exact probabilities, shapes (states, N) and (states,)."""

    def support(self) -> Int[Tensor, "state n"]: ...
    def probabilities(self) -> Float[Tensor, " state"]: ...


@runtime_checkable
class Autoregressive(Target, Protocol):
    """Target with the distribution of each token given the tokens before it.

    ``conditionals(tokens, start)`` returns the log-probabilities (chains, N - start, M) at every position from
    ``start`` on.

    Notes
    -----
    Optional attributes, with their defaults:

    * ``redraw(tokens, start, stop, choose) -> Redrawn``: draw a range of positions at the cost of one evaluation; by
      ``conditionals``, position by position;
    * ``reorders``: whether rows of ``redraw`` may continue other rows, as particles do (see `Choose`); False;
    * ``ended(tokens) -> bool (chains,)``: which texts end within N tokens, for targets with ``padding``; other texts
      are impossible; all end;
    * ``token_log_probs(tokens) -> (chains, N)``: log p of each token given those before it; by ``conditionals``;
    * ``soft_reading(weights, candidates) -> SoftReading``: the same for texts whose tokens are mixtures of candidates
      (chains, N, k) with weights that sum to 1; required by COLD;
    * ``masks_itself``: whether ``conditionals`` leave out tokens that are not ``allowed``; False;
    * ``normalised``: whether ``log_prob`` is the sum of the tokens' log-probabilities; True;
    * ``log_bound``: upper bound of ``log_prob`` minus that sum; required by rejection;
    * ``log_factors(tokens) -> {name: (chains,)}``: the other terms of ``log_prob``, each minus its bound; a lookahead
      learns one head for each; one factor;
    * ``patterns``: {name: Pattern} for the factors that a lookahead can compile, or compiled objects with
      ``automaton(length)``; none;
    * ``why_above_bound(tokens) -> str``: which term exceeds its bound, for error messages; "";
    * ``temperature``: redraws are refused where it is not 1, because the conditionals of p^(1/T) are not those of p; 1.
    """

    @abstractmethod
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
"""Optional attributes of targets; similar names are refused as misspelt."""

Choice = Int[Tensor, " chain"] | tuple[Int[Tensor, " chain"], Int[Tensor, " chain"]]
"""Token of each chain; or token and parent, the chain whose previous tokens it continues."""
Choose = Callable[[int, Float[Tensor, "chain token"], Float[Tensor, "chain d"] | None], Choice]
"""Function of (position, log-probabilities, hidden states or None); it may return parents if the target reorders."""


class Redrawn(NamedTuple):
    """Tokens of which a range was drawn from the model."""

    tokens: Int[Tensor, "chain n"]
    log_probs: Float[Tensor, "chain rest"]
    """log p of each token from the start of the range given those before it."""
    log_rest: Float[Tensor, " chain"]
    """Terms of log p(m) other than the tokens' log-probabilities: suffix, end, controls."""


class SoftReading(NamedTuple):
    """What a target returns for texts whose tokens are mixtures of candidates."""

    log_probs: Float[Tensor, "chain n token"]
    """log p of every token given the mixtures before it."""
    log_rest: Float[Tensor, " chain"]
    """Other terms of log p(m), as far as they can be computed for mixtures."""
    slope: Float[Tensor, "chain n candidate"]
    """Gradient of ``log_rest`` with respect to the weights."""


@runtime_checkable
class Control(Protocol):
    """Requirement or preference on texts: log p(control | text), or any score.

    Any object with these attributes is a control; so is a function of the text that returns a bool or a probability.

    Attributes
    ----------
    name
        Key of its column in the output, unique within a target.
    log_prob(tokens, texts)
        Score of each text, shape (chains,); tokens have shape (chains, N), and texts are strings.

    Notes
    -----
    Optional attributes, with their defaults:

    * ``bound``: upper bound of the scores, so that rejection is possible; 0;
    * ``pattern``: a Pattern; texts that match it score 0, others -inf; a lookahead compiles it; none;
    * ``bind(target) -> Control``: the control prepared for a text target; the control;
    * ``log_prob_and_grad(tokens, texts) -> (log_prob, (chains, N, d))``: also the gradient at the embeddings;
    * ``log_prob_and_guide(tokens, texts)``: the same without a backward pass through the language model;
    * ``soft_log_prob_and_grad(embeds)``: score and gradient of input embeddings that may be mixtures of the tokens';
      without it the control does not steer COLD.

    Examples
    --------
    >>> import torch
    >>> import structured_voronoi as sv
    >>> class FewCommas(sv.Control):
    ...     name = "few commas"
    ...     def log_prob(self, tokens, texts):
    ...         return torch.tensor([-float(text.count(",")) for text in texts])
    >>> FewCommas().log_prob(torch.zeros(2, 1), ["one, two, three", "one"])
    tensor([-2., -0.])
    """

    if TYPE_CHECKING:

        @property
        def name(self) -> str: ...
    else:
        name: str

    @abstractmethod
    def log_prob(self, tokens: Int[Tensor, "chain n"], texts: list[str]) -> Float[Tensor, " chain"]: ...


CONTROL_ABILITIES = {
    "log_prob_and_grad": "method",
    "log_prob_and_guide": "method",
    "soft_log_prob_and_grad": "method",
    "bind": "method",
    "bound": "value",
    "pattern": "value",
}
"""Optional attributes of controls; similar names are refused as misspelt."""


@dataclass(frozen=True)
class Pattern:
    """Regular expression that a text must match, or must not match if it is negated."""

    expression: str
    ignore_case: bool = False
    whole: bool = False
    """Match the whole text; otherwise any part of it."""
    negated: bool = False


BOUND_TOLERANCE = 1e-4
"""Amount by which rounding may raise a score above its bound."""


Start = Literal["random", "ancestral"] | Int[Tensor, "chain n"] | None
"""Where chains start; None lets the sampler choose."""


class Synchronised(NamedTuple):
    """State of a sampler after another sampler moved the tokens, with the cost in each chain."""

    state: Any
    evaluations: Int[Tensor, " chain"]
    gradients: Int[Tensor, " chain"]


class Sampler(Protocol):
    """Immutable settings of a sampler, usually a frozen dataclass. All chains advance as one batch.

    A state is a NamedTuple with what the next step needs, including ``tokens`` (chains, N). ``target`` is a bound
    problem (structured_voronoi.problem), which has all attributes of the target.

    Notes
    -----
    Optional attributes, with their defaults:

    * ``tuned(target, seed, start) -> Sampler``: the sampler with settings found on pilot chains; the sampler;
    * ``independent``: whether every step is an independent draw, so that no warm-up is needed; False;
    * ``synchronise(target, rng, state, tokens, energy) -> Synchronised``: the state after another sampler moved the
      tokens; required by `Cycle`, together with a state that has ``energy`` (chains,).
    """

    def init(self, target: Any, rng: Rng, start: Start) -> Any: ...
    def step(self, target: Any, rng: Rng, state: Any) -> tuple[Any, Info]: ...


def is_independent(sampler: Sampler) -> bool:
    """Return whether every step is an independent draw."""
    return bool(getattr(sampler, "independent", False))


def describe_settings(sampler: Sampler) -> dict[str, Any]:
    """Return the settings of a sampler by name, with those of the samplers that it combines."""
    if not is_dataclass(sampler):
        return {"repr": repr(sampler)}
    settings = {field.name: getattr(sampler, field.name) for field in fields(sampler)}
    parts = settings.get("samplers")
    if isinstance(parts, tuple):
        settings["samplers"] = [{"sampler": type(part).__name__, **describe_settings(part)} for part in parts]
    return settings


def tune(sampler: Sampler, target: Any, seed: int, start: Start = None) -> Sampler:
    """Return the sampler with settings found on pilot chains, if it has such settings."""
    tuned: Callable[..., Sampler] | None = getattr(sampler, "tuned", None)
    return sampler if tuned is None else tuned(target, seed, start)


class Chains(Iterator[tuple[Any, Info]]):
    """Endless iterator over (state, info) of advancing chains; ``state`` is the current one."""

    def __init__(self, sampler: Sampler, target: Any, rng: Rng, start: Start = None) -> None:
        self.sampler, self.target, self.rng = sampler, target, rng
        self.state = sampler.init(target, rng, start)

    def __next__(self) -> tuple[Any, Info]:
        self.state, info = self.sampler.step(self.target, self.rng, self.state)
        return self.state, info
