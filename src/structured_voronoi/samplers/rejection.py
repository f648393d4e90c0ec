"""Rejection: draw from the language model, accept by everything else. Exact, and every draw is independent.

The target is p(m) ∝ p_LM(m) · Π_k exp(weight_k · score_k(m)), times the probability of what stands on the right of the
tokens. A try drawn from the model is accepted with probability Π_k exp(weight_k · (score_k - bound_k)), times that of
the text on the right, which is a probability as long as no score exceeds its bound (von Neumann 1951). Scores are
log-probabilities unless a control says otherwise, so their bound is 0 unless it declares another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.base import Info, Rng, SamplingError, Start, Target, quiet_info
from structured_voronoi.samplers.autoregressive import ancestral_draw, autoregressive, draw_all
from structured_voronoi.samplers.evaluation import whole

TOLERANCE = 1e-4
"""By how much rounding may lift a score above its bound."""
REMEDY = "lower the weight, loosen the control or use svs+refresh"


class NoBoundError(SamplingError):
    """Scores have no bound, or exceed the one that is declared: rejection would not be exact."""


class State(NamedTuple):
    tokens: Int[Tensor, "chain n"]
    draws: int
    """How many draws there were; each has random numbers of its own."""


@dataclass(frozen=True)
class Rejection:
    """Settings of rejection sampling."""

    max_tries: int = 100_000
    """Tries of one chain for one draw, before it gives up with an error."""
    wave: int = 64
    """Tries evaluated at a time, of one chain or of many; it does not change the draws."""

    independent: ClassVar[bool] = True
    """Draws need no warm-up."""

    def __post_init__(self) -> None:
        whole(max_tries=self.max_tries, wave=self.wave)

    def init(self, target: Target, rng: Rng, start: Start) -> State:
        """Tokens to begin with, which are no draw: rejection forgets them."""
        autoregressive(target, "rejection sampling")
        log_bound(target)
        return State(start if isinstance(start, Tensor) else ancestral_draw(target, rng.fork("start")).tokens, 0)

    def step(self, target: Target, rng: Rng, state: State) -> tuple[State, Info]:
        stream, chains = f"{rng.stream}/draw {state.draws}", len(rng)
        tokens, pending = state.tokens.clone(), torch.arange(chains, device=rng.device)
        tried, lost = torch.zeros_like(pending), torch.zeros_like(pending)
        energy = torch.full((chains,), math.inf, dtype=torch.float64, device=rng.device)
        best = -energy
        while len(pending):
            active, later = pending[: self.wave], pending[self.wave :]
            each = self._tries_each(len(active), int(tried.sum()), chains - len(pending))
            each = min(each, self.max_tries - int(tried[active].max()))
            places = torch.arange(each, device=rng.device)
            own = type(rng)(rng.seed, rng.chains[active].repeat_interleave(each).tolist(), stream, rng.device)
            drawn = tries(target, own, (tried[active][:, None] + places).flatten())
            drawn = Tries(*(part.reshape(len(active), each, *part.shape[1:]) for part in drawn))
            done, first = drawn.accepted.any(-1), drawn.accepted.long().argmax(-1)  # in the order of the chain's stream
            count = torch.where(done, first + 1, each)
            counted, finite = places < count[:, None], drawn.log_chance.isfinite()
            tokens[active[done]] = drawn.tokens[done, first[done]]
            energy[active[done]] = drawn.energy[done, first[done]]
            tried[active] += count
            lost[active] += (counted & ~finite).sum(-1)
            best[active] = torch.maximum(best[active], torch.where(finite, drawn.log_chance, -math.inf).amax(-1))
            self._give_up(rng, tried, best, active[~done])
            pending = torch.cat([active[~done], later])
        changed = (tokens != state.tokens).sum(-1)
        info = quiet_info(energy)._replace(evaluations=tried, events=tried, swaps=changed, nonfinite=lost)
        return State(tokens, state.draws + 1), info

    def _tries_each(self, active: int, tries: int, draws: int) -> int:
        """Tries of each chain in the next wave: as many as a draw took so far, if there is room for them."""
        return max(1, min(self.wave // active, 1 + tries // (1 + draws)))

    def _give_up(self, rng: Rng, tried: Tensor, best: Tensor, chains: Tensor) -> None:
        for chain in chains[tried[chains] >= self.max_tries].tolist()[:1]:
            raise SamplingError(
                f"chain {int(rng.chains[chain])} had {int(tried[chain]):,} tries and none was accepted; the best would "
                f"have been accepted with probability {math.exp(float(best[chain])):.2g}; {REMEDY}"
            )


class Tries(NamedTuple):
    tokens: Int[Tensor, "row n"]
    energy: Float[Tensor, " row"]
    log_chance: Float[Tensor, " row"]
    """log of the probability that the try is accepted."""
    accepted: Bool[Tensor, " row"]


def tries(target: Target, rng: Rng, numbers: Int[Tensor, " row"]) -> Tries:
    """One try for each row, which says the chain (by its stream) and which of its tries.

    A try reads its own stretch of the chain's random numbers, so that it is the same in any wave.
    """
    levels_each = target.length + 1
    rng.counter = numbers * ((levels_each + 1) // 2)
    levels = rng.uniform(levels_each)
    tokens, log_probs, right = draw_all(target, levels[:, :-1], "rejection sampling")
    right = torch.where(log_probs.isfinite().all(-1), right, -torch.inf)  # what has no score is no draw
    log_chance = log_acceptance(target, tokens, right)
    accepted = log_chance.isfinite() & (levels[:, -1].log() < log_chance)
    return Tries(tokens, -(log_probs.double().sum(-1) + right.double()), log_chance, accepted)


def log_acceptance(target: Target, tokens: Int[Tensor, "row n"], right: Float[Tensor, " row"]) -> Float[Tensor, " row"]:
    """log of the probability that a text drawn from the model is accepted; ``right`` is the rest of its log p(m)."""
    if getattr(target, "normalised", True):  # the model's own draws are the truth
        return torch.where(right.isfinite(), 0.0, -torch.inf).double()
    chance = right.detach().double() - log_bound(target)
    above = chance.isfinite() & (chance > TOLERANCE)
    if above.any():
        row = above.long().argmax()
        raise NoBoundError(_broken_bound(target, tokens[row][None], float(chance[row])))
    return chance


def _broken_bound(target: Target, tokens: Int[Tensor, "1 n"], excess: float) -> str:
    """What to say about a text whose score is higher than its bound: which control it was."""
    end = ": rejection would not be exact; declare a bound that scores never exceed or use svs+refresh"
    for control, score in target.control_log_probs(tokens).items() if hasattr(target, "control_log_probs") else ():
        bound = getattr(control, "bound", 0.0)
        if float(score) > bound + TOLERANCE:
            return f"control {control.name!r} scored {float(score):.6g}, above its bound of {bound:.6g}{end}"
    return f"log p of the target exceeds that of the model by {excess:.6g} more than its `log_bound`{end}"


def log_bound(target: Target) -> float:
    """What log p of the target never exceeds that of the model by; an error if it has no bound."""
    total = float(getattr(target, "log_bound", 0.0))
    if not math.isfinite(total):
        raise NoBoundError(f"the target's log_bound is {total}; rejection needs a finite one, or use svs+refresh")
    for control, weight in getattr(target, "controls", {}).items():
        bound = float(getattr(control, "bound", 0.0))
        if weight and not math.isfinite(bound):
            raise NoBoundError(
                f"control {control.name!r} has the bound {bound}, so that rejection is impossible; "
                "declare a `bound` that its scores never exceed or use svs+refresh"
            )
        total += weight * bound if weight else 0.0
    return total


def acceptance(target: Target, seed: int, count: int = 256, wave: int = 64) -> float:
    """An estimate of the share of tries that are accepted: the mean probability of some draws from the model."""
    log_bound(target)
    total = 0.0
    for begin in range(0, count, wave):
        rng = Rng(seed, range(begin, min(begin + wave, count)), "acceptance", target.embeddings.device)
        chance = tries(target, rng, torch.zeros_like(rng.chains)).log_chance
        total += float(torch.where(chance.isfinite(), chance, -math.inf).exp().sum())
    return total / count
