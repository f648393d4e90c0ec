"""Sequential Monte Carlo: particles grow token by token and are resampled where their weights are uneven.

Doucet and Johansen (2009); twisted by a lookahead as in Zhao et al. (2024). With a lookahead ψ the intermediate targets
are p(m_≤n) ψ(m_≤n). A token drawn from q(v) ∝ p(v) ψ(v) multiplies the weight of its particle by E_p[ψ_n] / ψ_{n-1},
which does not depend on the token, and the last factor is W / ψ_N. The mean weight of a system is an unbiased estimate
of Z = E_p[W]. Texts are not exact: chosen among finitely many particles, they follow p W only as their number grows,
and particles with a common ancestor are alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from structured_voronoi.core.contracts import Choice, Start, Target
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.info import Info, blank_info
from structured_voronoi.core.streams import BLOCK, Rng, widened
from structured_voronoi.core.validation import check_count, check_finite
from structured_voronoi.lookahead.heads import Head, PatternHead
from structured_voronoi.lookahead.lookahead import Lookahead, untrained
from structured_voronoi.lookahead.weighing import Weighed
from structured_voronoi.problem.drawing import check_autoregressive, redraw_by, rows_to_redraw
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.problem.starts import placeholder_start


class Particles(NamedTuple):
    """The particles of every system after the last token."""

    tokens: Int[Tensor, "system particle n"]
    energy: Float[Tensor, "system particle"]
    log_weight: Float[Tensor, "system particle"]
    """log of the unnormalised weight; -inf if the text is impossible."""

    @property
    def log_z(self) -> Float[Tensor, " system"]:
        """log of every system's estimate of Z = Σ_m p(m) W(m); the estimate itself is unbiased."""
        return self.log_weight.logsumexp(-1) - math.log(self.log_weight.shape[-1])


class State(NamedTuple):
    """The tokens, and the number of draws so far, which selects the random stream of the next one."""

    tokens: Int[Tensor, "chain n"]
    draws: int
    lookahead: Lookahead | Literal["none"]


@dataclass(frozen=True, eq=False)
class SMC:
    """Sequential Monte Carlo. Not exact with finitely many particles.

    A chain is one particle of a system of ``particles`` consecutive chains. A system is always run as a whole, even if
    only some of its chains are sampled, and its texts depend on each other.

    Parameters
    ----------
    lookahead
        Proposal and intermediate targets. None: fit one to the target. ``"none"``: draw from the model and weigh at the
        end, see `bootstrap`.
    particles
        Particles of a system.
    threshold
        Resample if the effective share of the weights is smaller.
    texts
        Texts from which a lookahead is learned if none is given.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> target = sv.verify.sentences(controlled=True)
    >>> draws = sv.sample(target, sv.baselines.SMC.bootstrap(16), chains=4, draws=2, progress=False)
    >>> draws["posterior"]["tokens"].shape
    (4, 2, 3)
    """

    lookahead: Lookahead | Literal["none"] | None = None
    particles: int = 64
    threshold: float = 0.5
    texts: int = 2048

    exact: ClassVar[bool] = False
    independent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.lookahead, Lookahead | None) and self.lookahead != "none":
            raise SamplingError(
                f"{self.lookahead!r} is no lookahead",
                argument="lookahead",
                remedy='give a Lookahead, None to have one fitted, or "none"',
            )
        check_count(particles=self.particles, texts=self.texts)
        check_finite(threshold=self.threshold)
        if not 0 <= self.threshold <= 1:
            raise SamplingError(
                f"{self.threshold!r} is not from 0 to 1", argument="threshold", remedy="choose a share, for example 0.5"
            )

    @classmethod
    def bootstrap(cls, particles: int = 64, threshold: float = 0.5) -> SMC:
        """A bootstrap filter: tokens are drawn from the model, and controls weigh at the end.

        A particle weighs 0 as soon as a pattern can no longer match.

        Parameters
        ----------
        particles
            Particles of a system.
        threshold
            Resample if the effective share of the weights is smaller.

        Returns
        -------
        SMC
            A sampler without lookahead.
        """
        return cls("none", particles, threshold)

    def tuned(self, target: Target | Problem, seed: int, start: Start = None) -> SMC:
        """A copy with a lookahead that is fitted to the target."""
        if self.lookahead is not None:
            return self
        return replace(self, lookahead=Lookahead.fit(target, texts=self.texts, seed=seed))

    def init(self, target: Target | Problem, rng: Rng, start: Start) -> State:
        """Placeholder tokens, which the first step does not read."""
        problem = bind(target)
        check_autoregressive(problem, "SMC")
        lookahead = self.tuned(problem, rng.seed).lookahead
        assert lookahead is not None
        if isinstance(lookahead, Lookahead):
            lookahead.check_fits(problem)
        return State(placeholder_start(problem, rng, start), 0, lookahead)

    def step(self, target: Target | Problem, rng: Rng, state: State) -> tuple[State, Info]:
        """Run every system; each chain gets a text of its system with probability ∝ weight."""
        problem, chains = bind(target), rng.chains.to(rng.device)
        systems, place = torch.unique(chains // self.particles, return_inverse=True)
        system_rng = type(rng)(rng.seed, systems.tolist(), f"{rng.stream}/systems {state.draws}", rng.device)
        found = replace(self, lookahead=state.lookahead).run(problem, system_rng)
        lost = (~found.log_z.isfinite()).nonzero().squeeze(-1)
        if len(lost):
            raise SamplingError(
                f"no particle satisfies the controls in {len(lost)} of {len(systems)} systems of {self.particles}",
                remedy="use more particles, or sv.Guided()",
            )
        chosen = resampled(found.log_weight, system_rng.uniform())
        order = system_rng.uniform(self.particles).argsort(-1)  # resampling sorts particles by their number
        chosen = chosen.gather(-1, order)[place, chains % self.particles]
        tokens, energy = found.tokens[place, chosen], found.energy[place, chosen]
        kept = torch.bincount(place)[place]
        info = blank_info(energy)._replace(
            evaluations=(self.particles + kept - 1) // kept,
            events=torch.ones_like(kept),
            swaps=(tokens != state.tokens).sum(-1),
            nonfinite=(~found.log_weight.isfinite()).long()[place, chains % self.particles],
        )
        return State(tokens, state.draws + 1, state.lookahead), info

    def run(self, target: Target | Problem, rng: Rng) -> Particles:
        """Run one system for each stream of ``rng``.

        Parameters
        ----------
        target
            A target with conditionals.
        rng
            One stream per system.

        Returns
        -------
        Particles
            The texts of all particles with their weights.
        """
        problem, count = bind(target), self.particles
        check_autoregressive(problem, "SMC")
        levels, resample_levels = rng.uniform(count, problem.length), rng.uniform(problem.length)
        whole = BLOCK // math.gcd(count, BLOCK)  # systems with whole blocks of rows
        heads = len(self._heads(problem))
        size = max(1, rows_to_redraw(problem, reorders=True) // (2 + heads) // count // whole) * whole
        parts = []
        for begin in range(0, len(rng), size):
            block, at = levels[begin : begin + size], resample_levels[begin : begin + size]
            extra = -len(block) % whole
            block, at = (torch.cat([part, part[-1:].expand(extra, *part.shape[1:])]) for part in (block, at))
            drawn = self._run_systems(problem, block, at)
            parts.append([part[: len(part) - extra] for part in drawn])
        return Particles(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def log_increment(
        self, log_expected: Float[Tensor, " row"], log_value: Float[Tensor, " row"]
    ) -> Float[Tensor, " row"]:
        """log E_p[ψ_n] / ψ_{n-1}, the factor of a particle's weight."""
        return log_expected - log_value

    def _run_systems(
        self,
        problem: Problem,
        levels: Float[Tensor, "system particle n"],
        resample_levels: Float[Tensor, "system n"],
    ) -> Particles:
        systems, count, length = levels.shape
        levels = levels.flatten(0, 1)
        heads = self._heads(problem)
        tokens = problem.allowed_tokens[:1].expand(levels.shape).clone()
        states = {name: head.begin(tokens[:, :0]) for name, head in heads.items()}
        log_weight, log_value, decoded = (torch.zeros_like(levels[:, 0]) for _ in range(3))

        def choose(n: int, log_probs: Tensor, hidden: Tensor | None) -> Choice:
            nonlocal states, log_weight, log_value, decoded
            weighed = self._weigh(problem, states, n, log_probs, hidden)
            log_weight = log_weight + self.log_increment(weighed.log_expected, log_value)
            log_weight = _finite_where(_is_alive(heads, states, length - n, log_weight), log_weight)
            resampling = self._resample(log_weight.view(systems, count), resample_levels[:, n])
            if resampling is not None:
                parents, log_weight = resampling
                weighed = weighed.at(parents)
                states, decoded = {name: state[parents] for name, state in states.items()}, decoded[parents]
            token = weighed.draw(levels[:, n])
            log_value = weighed.log_value(token)
            decoded = decoded + widened(weighed.log_p).gather(-1, token[:, None])[:, 0]
            states = {name: head.advance(states[name], token) for name, head in heads.items()}
            return token if resampling is None else (token, parents)

        tokens, log_probs, log_rest = redraw_by(problem, tokens, 0, length, choose, reorders=True)
        log_p, log_rest = widened(log_probs).sum(-1), widened(log_rest)
        # in half precision the final scores differ from those while decoding, and weights use the final ones
        log_weight = log_weight + self.log_increment(log_rest + log_p - decoded, log_value)
        log_weight = _finite_where(log_weight.isfinite(), log_weight)
        energy = -_finite_where((log_p + log_rest).isfinite(), log_p + log_rest)
        return Particles(*(part.view(systems, count, *part.shape[1:]) for part in (tokens, energy, log_weight)))

    def _heads(self, problem: Problem) -> dict[str, Head]:
        """The heads of the lookahead; without one those of the compiled patterns."""
        if isinstance(self.lookahead, Lookahead):
            return self.lookahead.heads
        heads = untrained(problem).heads
        return {name: head for name, head in heads.items() if name in problem.patterns}

    def _weigh(
        self, problem: Problem, states: dict[str, Tensor], n: int, log_probs: Tensor, hidden: Tensor | None
    ) -> Weighed:
        if isinstance(self.lookahead, Lookahead):
            return self.lookahead.weigh(problem, states, n, log_probs, hidden)
        return Weighed.of(log_probs, widened(torch.ones_like(log_probs)))

    def _resample(
        self, log_weight: Float[Tensor, "system particle"], level: Float[Tensor, " system"]
    ) -> tuple[Int[Tensor, " row"], Float[Tensor, " row"]] | None:
        """The parent of each row and its new weight; None if no system is resampled."""
        systems, count = log_weight.shape
        mean = log_weight.logsumexp(-1, keepdim=True) - math.log(count)
        share = (2 * mean - (2 * log_weight).logsumexp(-1, keepdim=True) + math.log(count)).exp()
        uneven = mean.isfinite() & (share < self.threshold)
        if not uneven.any():
            return None
        here = torch.arange(count, device=log_weight.device).expand(systems, -1)
        index = torch.where(uneven, resampled(torch.where(uneven, log_weight, 0.0), level), here)
        first = torch.arange(systems, device=log_weight.device)[:, None] * count
        return (first + index).flatten(), torch.where(uneven, mean, log_weight).flatten()


def resampled(
    log_weight: Float[Tensor, "system particle"], level: Float[Tensor, " system"]
) -> Int[Tensor, "system particle"]:
    """Systematic resampling: the index of the parent of each particle."""
    count, cumulative = log_weight.shape[-1], widened(log_weight).softmax(-1).cumsum(-1)
    levels = (torch.arange(count, device=log_weight.device) + level[:, None]) / count
    index: Tensor = torch.searchsorted(cumulative, levels * cumulative[:, -1:]).clamp(max=count - 1)
    return index


def _is_alive(
    heads: dict[str, Head], states: dict[str, Tensor], left: int, like: Float[Tensor, " row"]
) -> Bool[Tensor, " row"]:
    """Whether every pattern can still match within the tokens that are left."""
    alive = torch.ones_like(like, dtype=torch.bool)
    for name, head in heads.items():
        if isinstance(head, PatternHead):
            alive &= head.automaton.reachable[left][states[name]]
    return alive


def _finite_where(condition: Bool[Tensor, " row"], values: Float[Tensor, " row"]) -> Float[Tensor, " row"]:
    return torch.where(condition & ~values.isnan(), values, -torch.inf)
