"""The contracts of the package: what a target is, what a sampler is, where randomness comes from.

Nothing here imports the rest of the package. Targets and samplers are protocols: any object with these
attributes will do, there is no base class to inherit.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class SamplingError(Exception):
    """A problem the user can mend: the message names the value, the cause and the remedy."""


class Target(Protocol):
    """An unnormalised distribution p(m) ∝ exp(log_prob(m)) over sequences of N embedded tokens.

    Optional attributes, used when present:

    * ``log_prob_and_grad(tokens) -> (log_prob, (chains, N, d))``: also its gradient at the embeddings;
    * ``guide(tokens) -> (chains, N, d)``: a steering field that is cheaper than the gradient;
      ``log_prob_and_guide(tokens)`` gives both from one evaluation;
    * ``allowed``, bool (M,): the tokens that may be sampled;
    * ``box``, a number: every coordinate of x lies in [-box, box] (the paper's compact set K);
    * ``controls`` {control: weight}, ``control_log_probs(tokens)`` and ``softened()``: as `Controlled` has them, for
      targets with hard constraints of their own.
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
    """A target that draws each token given those before it: what redrawing moves need.

    Optional attributes, used when present:

    * ``redraw(tokens, start, stop, levels) -> Redrawn``: a range of positions redrawn at the cost of one evaluation;
    * ``token_log_probs(tokens) -> (chains, N)``: log p of each token given those before it;
    * ``normalised``: False where something stands on the right of the tokens;
    * ``log_bound``, a number: log p of the target never exceeds that of its model by more; rejection needs it.
    """

    def conditionals(self, tokens: Int[Tensor, "chain n"], start: int) -> Float[Tensor, "chain rest token"]: ...


class Redrawn(NamedTuple):
    """Tokens of which a range was drawn from the model given those before it, and how probable all that follows is."""

    tokens: Int[Tensor, "chain n"]
    log_probs: Float[Tensor, "chain rest"]
    """log p of each token from the start of the range given those before it."""
    right: Float[Tensor, " chain"]
    """The rest of log p(m): the suffix, the end, the controls."""


class Control(Protocol):
    """What a text must be: log p(t | m), or any log-score, of each text.

    Optional attributes, used when present:

    * ``log_prob_and_grad(tokens, texts) -> (log_prob, (chains, N, d))``: also its gradient at the embeddings;
    * ``log_prob_and_guide(tokens, texts)``: the same without a backward pass through the language model;
    * ``bind(model) -> Control``: the control made ready for a language model, or an error if it does not fit;
    * ``bound``, a number: scores never exceed it, so that rejection is possible; 0 if absent.
    """

    @property
    def name(self) -> str:
        """Unique within a target: the key of its column."""

    def log_prob(self, tokens: Int[Tensor, "chain n"], texts: list[str]) -> Float[Tensor, " chain"]: ...


class Info(NamedTuple):
    """What a reader of the run wants to know about one step of every chain.

    Over the steps of one thinned draw counts are added up and flags are or-ed; what describes the state is kept from
    the last step.
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
    """Tokens that changed."""
    reflections: Int[Tensor, " chain"]
    """Walls that reflected, the box included."""
    diverging: Bool[Tensor, " chain"]
    """The trajectory was abandoned (too many events); the chain stayed where it was."""
    nonfinite: Int[Tensor, " chain"]
    """Proposals whose energy or steering field was not finite; they count as impossible."""
    log_mass: Float[Tensor, " chain"] | None = None
    """Closed cells: log of the estimated mass of the cell the step ended in."""
    unreliable: Bool[Tensor, " chain"] | None = None
    """Closed cells: that mass comes from fewer than 50 counts at some position."""
    redraws: Int[Tensor, " chain"] | None = None
    """Refresh: blocks redrawn …"""
    refreshed: Int[Tensor, " chain"] | None = None
    """… and how many of them were accepted."""


def quiet_info(energy: Float[Tensor, " chain"]) -> Info:
    """The report of a step in which nothing happened: the starting point for every sampler's counts."""
    zero = torch.zeros(len(energy), dtype=torch.int64, device=energy.device)
    return Info(energy, zero, zero, zero, zero, zero, zero.bool(), zero)


OF_THE_STATE = ("energy", "log_mass", "unreliable")
"""Fields that describe the state a step ended in, rather than the step."""


def added(first: Info, second: Info) -> Info:
    """The report of two steps: counts are added, flags or-ed, and what describes the state is the later one's."""
    parts = {}
    for name, later in second._asdict().items():
        earlier = getattr(first, name)
        if name in OF_THE_STATE or earlier is None or later is None:
            parts[name] = earlier if later is None else later
        else:
            parts[name] = earlier | later if later.dtype == torch.bool else earlier + later
    return type(second)(**parts)


Start = Literal["random", "ancestral"] | Int[Tensor, "chain n"] | None


class Sampler(Protocol):
    """An immutable settings object. All chains advance together as one batch.

    State is a NamedTuple that holds what the next step needs, ``tokens`` (chains, N) among it.

    Optional attributes, used when present:

    * ``tuned(target, seed, start) -> Sampler``: the same with settings found on pilot chains;
    * ``independent``, True where every step is a draw of its own, so that no warm-up is needed;
    * ``resume(target, state, tokens, energy) -> (state, evaluated)``: the state after another sampler has moved the
      tokens, and for which chains it had to be evaluated. `Cycle` needs it.
    """

    def init(self, target: Target, rng: Rng, start: Start) -> Any: ...
    def step(self, target: Target, rng: Rng, state: Any) -> tuple[Any, Info]: ...


def is_independent(sampler: Sampler) -> bool:
    """Is every step a draw of its own?"""
    return bool(getattr(sampler, "independent", False))


class Rng:
    """One random stream per chain, derived from (seed, chain index): counter-based, so that a chain's numbers
    depend neither on the batch it runs in nor on the device.

    The generator is Philox4x32-10 (Salmon et al. 2011). The whole state is ``counter``, one number a chain.
    """

    def __init__(
        self,
        seed: int,
        chains: int | Sequence[int],
        stream: str = "run",
        device: torch.device | str = "cpu",
    ) -> None:
        if not isinstance(seed, (int, np.integer)) or seed < 0:
            raise SamplingError(f"seed {seed!r} is not a whole number ≥ 0; give one, for example seed=0")
        seed = int(seed)
        self.seed, self.stream, self.device = seed, stream, torch.device(device)
        indices = range(chains) if isinstance(chains, int) else chains
        self.chains = torch.tensor(list(indices), dtype=torch.int64, device=self.device)
        self.counter = torch.zeros_like(self.chains)
        words = np.random.SeedSequence([seed, *stream.encode()]).generate_state(2, np.uint32)
        self._key = (int(words[0]), int(words[1]))

    def __len__(self) -> int:
        return len(self.chains)

    def fork(self, stream: str, chains: int | None = None) -> Self:
        """An independent source with the same seed: for pilots and for what all chains share."""
        own = self.chains.tolist() if chains is None else chains
        return type(self)(self.seed, own, f"{self.stream}/{stream}", self.device)

    def of_rows(self, rows: Int[Tensor, " row"]) -> Self:
        """The same streams at the same places, of some chains alone."""
        some = type(self)(self.seed, self.chains[rows].tolist(), self.stream, self.device)
        some.counter = self.counter[rows]
        return some

    def uniform(self, *shape: int) -> Float[Tensor, chain * shape]:
        """Uniform on (0, 1), with 52 random bits, float64."""
        count = math.prod(shape)
        blocks = (count + 1) // 2  # a block of four words makes two numbers
        steps = self.counter[:, None] + torch.arange(blocks, device=self.device)
        self.counter = self.counter + blocks
        words = philox(
            (steps & _MASK, steps >> 32, (self.chains & _MASK)[:, None], (self.chains >> 32)[:, None]),
            self._key,
        )
        pairs = torch.stack([_unit(words[0], words[1]), _unit(words[2], words[3])], dim=-1)
        return pairs.flatten(1)[:, :count].reshape(len(self), *shape)

    def normal(self, *shape: int) -> Float[Tensor, chain * shape]:
        """Standard normal, float64 (Box–Muller)."""
        count = math.prod(shape)
        u, v = self.uniform((count + 1) // 2, 2).unbind(-1)
        radius = (-2 * u.log()).sqrt()
        pairs = torch.stack([radius * (2 * math.pi * v).cos(), radius * (2 * math.pi * v).sin()], dim=-1)
        return pairs.flatten(1)[:, :count].reshape(len(self), *shape)

    def categorical(self, log_weights: Float[Tensor, "chain *shape token"]) -> Int[Tensor, chain * shape]:
        """One index per row with probability ∝ exp(log_weights), by inversion in float64."""
        return inverse_cdf(log_weights, self.uniform(*log_weights.shape[1:-1]))


def inverse_cdf(log_weights: Float[Tensor, "*shape token"], level: Float[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """The index at which the cumulative distribution ∝ exp(log_weights) passes ``level``."""
    cumulative = log_weights.double().softmax(-1).cumsum(-1)
    scaled = level[..., None] * cumulative[..., -1:]
    found = torch.searchsorted(cumulative, scaled).squeeze(-1)
    return found.clamp(max=log_weights.shape[-1] - 1)  # weights that are no numbers have no place


_MASK = 0xFFFFFFFF


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words; products wrap modulo 2^64, which keeps their bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def _unit(high: Tensor, low: Tensor) -> Tensor:
    return ((high << 20 | low >> 12).double() + 0.5) * 2.0**-52


BLOCK = 8


def in_blocks(function: Callable[[Tensor], Any], rows: Tensor) -> Any:
    """``function(rows)`` with the rows padded to a multiple of 8, the padding cut off again.

    Matrix products of few rows differ from those of many in the last bits; padded, a chain's numbers no longer
    depend on how many chains run beside it. The result is a tensor or a tuple of tensors.
    """
    count = len(rows)
    extra = -count % BLOCK
    result = function(torch.cat([rows, rows[-1:].expand(extra, *rows.shape[1:])]) if extra else rows)
    if isinstance(result, Tensor):
        return result[:count]
    return tuple(part[:count] for part in result)


def checked_device(device: torch.device | str) -> torch.device:
    """The device, if this machine has it."""
    try:
        return torch.empty(0, device=device).device
    except Exception as error:  # torch raises many kinds
        said = " ".join(str(error).split())[:120]
        raise SamplingError(
            f"device {str(device)!r} cannot be used here ({said}); use cpu, or a device you have"
        ) from error


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The tail of an error about an unknown name: the nearest known one, then all of them."""
    names = sorted(known)
    alike = {known.lower(): known for known in names}
    close = [alike[found] for found in difflib.get_close_matches(name.lower(), list(alike), n=1)]
    return (f"did you mean {close[0]!r}? " if close else "") + "known: " + ", ".join(names)
