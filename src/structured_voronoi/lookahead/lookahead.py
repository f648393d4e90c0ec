"""Proposals that look ahead to what the controls require.

With ψ_k(v) ≈ E_p[W_k | prefix, v] for the factors W_k of a target, tokens are drawn from
q(v) ∝ p(v) (ψ(v) + δ E_p[ψ]), where ψ = Π_k ψ_k^β_k. Tokens after which a compiled pattern can no longer match have
probability 0. The term with δ keeps every other token possible, so that the weights p W / q correct whatever ψ gets
wrong. The exponents β_k are below 1 because heads are overconfident.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from structured_voronoi.core.contracts import Target
from structured_voronoi.core.errors import SamplingError, one_line
from structured_voronoi.core.streams import BLOCK, in_blocks, widened
from structured_voronoi.lookahead.heads import (
    Head,
    LearntHead,
    PatternHead,
    Reader,
    Size,
    padded_rows,
    token_coordinates,
)
from structured_voronoi.lookahead.observing import Observed, label, observe
from structured_voronoi.lookahead.reading import factor_names, feature_width, hidden_features, identify, sizes_of
from structured_voronoi.lookahead.settings import LookaheadSettings
from structured_voronoi.lookahead.weighing import (
    Proposal,
    Reading,
    Weighed,
    all_where_stuck,
    drawn_or_kept,
    unfinished_rows,
)
from structured_voronoi.problem.drawing import check_autoregressive, redraw_by, rows_to_redraw
from structured_voronoi.problem.patterns import token_automaton
from structured_voronoi.problem.problem import Problem, bind

WEIGHTS_FILE, SETTINGS_FILE = "lookahead.safetensors", "lookahead.json"
MAX_VALUES = 2**20
"""Largest number of values (rows x tokens) that a head computes at a time; it bounds the memory."""


@dataclass(frozen=True, eq=False)
class Lookahead:
    """Heads for the factors of a target, made by `Lookahead.fit`.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> target = sv.load("bundled").target(controls=[sv.keyword("river")], max_tokens=6)
    >>> lookahead = sv.Lookahead.fit(target, texts=64, seed=0)
    >>> sorted(lookahead.heads)
    ['keyword=river']
    """

    heads: dict[str, Head]
    settings: LookaheadSettings
    identity: dict[str, Any]
    """Description of the target that the lookahead was fitted to."""
    learned: bool = True
    """False for proposals from the model restricted to possible tokens."""

    @classmethod
    def fit(
        cls, target: Target | Problem, texts: int = 1024, seed: int = 0, settings: LookaheadSettings | None = None
    ) -> Lookahead:
        """Learn from texts that are drawn from the model.

        Parameters
        ----------
        target
            A left-to-right target with bounded controls.
        texts
            Number of texts to draw and to learn from.
        seed
            Seed of the texts and of the training.
        settings
            How heads are trained; the defaults are those of `generate`.

        Returns
        -------
        Lookahead
            Proposals for `sv.Guided`, or for `generate` and `probability`.

        Raises
        ------
        SamplingError
            If the target cannot be drawn token by token, or if no text satisfies a control that is not a pattern.
        """
        from structured_voronoi.lookahead.learning import fit_lookahead

        return fit_lookahead(bind(target), texts, seed, settings or LookaheadSettings())

    def for_target(self, problem: Problem) -> Lookahead:
        """The same heads for a target with the same factors, for example after another prompt."""
        return replace(self, identity={**self.identity, "prompt": str(getattr(problem, "prompt", ""))})

    def propose(
        self, problem: Problem, tokens: Int[Tensor, "row n"], start: int, levels: Float[Tensor, "row count"]
    ) -> Proposal:
        """Draw all positions from ``start`` on, each at its level."""

        def propose_block(tokens: Tensor, levels: Tensor) -> tuple[Tensor, ...]:
            return self._propose_block(problem, tokens, start, levels)

        return Proposal(*in_blocks(propose_block, tokens, levels, rows_at_a_time=rows_to_redraw(problem)))

    def draw(
        self, problem: Problem, levels: Float[Tensor, "row n"], prefix: Int[Tensor, "some kept"] | None = None
    ) -> Proposal:
        """Whole texts, each token at its level; the first rows begin with a prefix, if one is given for them."""
        tokens = problem.allowed_tokens[:1].expand(levels.shape).clone()
        if prefix is not None and prefix.shape[1]:
            rows, kept = prefix.shape
            tokens[:rows, :kept] = prefix
            levels = levels.clone()
            levels[:rows, :kept] = torch.nan
        return self.propose(problem, tokens, 0, levels)

    def draw_observed(
        self, problem: Problem, levels: Float[Tensor, "row n"], from_model: Bool[Tensor, " row"], is_observed: bool
    ) -> tuple[Proposal, Observed | None]:
        """Whole texts, and what heads can learn from them.

        Rows ``from_model`` are drawn from the model restricted to possible tokens.
        """

        def draw_block(levels: Tensor, from_model: Tensor) -> tuple[Tensor, ...]:
            blank = problem.allowed_tokens[:1].expand(levels.shape).clone()
            return self._propose_block(problem, blank, 0, levels, from_model, is_observed)

        parts = in_blocks(draw_block, levels, from_model, rows_at_a_time=rows_to_redraw(problem))
        drawn, rest = Proposal(*parts[:5]), parts[5:]
        return drawn, Observed.of(drawn.tokens, rest) if is_observed else None

    @torch.no_grad()
    def _propose_block(
        self,
        problem: Problem,
        tokens: Tensor,
        start: int,
        levels: Tensor | None,
        from_model: Tensor | None = None,
        is_observed: bool = False,
    ) -> tuple[Tensor, ...]:
        """Tokens drawn at their levels; kept where a level is NaN, and everywhere without levels."""
        states = {name: head.begin(tokens[:, :start]) for name, head in self.heads.items()}
        log_q = widened(torch.zeros(tokens.shape, device=tokens.device))
        log_base, seen, outputs = torch.zeros_like(log_q), list[tuple[Tensor, ...]](), list[Tensor]()
        rows_at_a_time = max(BLOCK, MAX_VALUES // len(problem.embeddings) // BLOCK * BLOCK)
        if from_model is None:
            from_model = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

        def choose(n: int, log_probs: Tensor, hidden: Tensor | None) -> Tensor:
            token, seen_here = tokens[:, n].clone(), list[tuple[Tensor, ...]]()
            for begin in range(0, len(token), rows_at_a_time):
                rows = slice(begin, begin + rows_at_a_time)
                some = {name: state[rows] for name, state in states.items()}
                hidden_rows = None if hidden is None else hidden[rows]
                if is_observed:
                    weighed, seen_rows = self._weigh(problem, some, n, log_probs[rows], hidden_rows, True)
                    seen_here.append(seen_rows)
                else:
                    weighed = self.weigh(problem, some, n, log_probs[rows], hidden_rows)
                if levels is not None:
                    mass = weighed.mass
                    if self.learned and from_model[rows].any():
                        mass = torch.where(from_model[rows, None], weighed.base_mass, mass)
                    token[rows] = drawn_or_kept(mass, levels[rows, n - start], token[rows])
                log_base[rows, n] = weighed.log_base(token[rows])
                log_q[rows, n] = weighed.log_q(token[rows]) if self.learned else log_base[rows, n]
            for name, head in self.heads.items():
                states[name] = head.advance(states[name], token)
            if is_observed:
                seen.append(tuple(torch.cat(column) for column in zip(*seen_here, strict=True)))
                outputs.append(
                    torch.stack([head.output_after(states[name]) for name, head in self.heads.items()], dim=-1)
                )
            return token

        redrawn = redraw_by(problem, tokens, start, problem.length, choose)
        log_p, log_rest = torch.zeros_like(log_q), widened(redrawn.log_rest)
        log_p[:, start:] = widened(redrawn.log_probs)
        drawn = redrawn.tokens, log_p, log_q, log_base, log_rest
        if not is_observed:
            return drawn
        log_ratio = log_p - torch.where(from_model[:, None], log_base, log_q)
        return *drawn, *label(problem, self.heads, redrawn.tokens, log_rest, log_ratio, seen, outputs)

    def score(self, problem: Problem, tokens: Int[Tensor, "row n"]) -> Proposal:
        """Given texts as if they had been proposed: p and q of each of their tokens."""

        def score_block(tokens: Tensor) -> tuple[Tensor, ...]:
            return self._propose_block(problem, tokens, 0, None)

        return Proposal(*in_blocks(score_block, tokens, rows_at_a_time=rows_to_redraw(problem)))

    def weigh(
        self, problem: Problem, states: dict[str, Tensor], n: int, log_probs: Tensor, hidden: Tensor | None
    ) -> Weighed:
        """The distribution of the token at position ``n``; padding is certain after the end of a text."""
        return self._weigh(problem, states, n, log_probs, hidden, is_observed=False)[0]

    def _weigh(
        self,
        problem: Problem,
        states: dict[str, Tensor],
        n: int,
        log_probs: Tensor,
        hidden: Tensor | None,
        is_observed: bool,
    ) -> tuple[Weighed, tuple[Tensor, ...]]:
        """Also what heads can learn from."""
        going_on = unfinished_rows(problem, log_probs)
        if going_on.all():
            return self._weigh_rows(problem, states, n, log_probs, hidden, is_observed)
        rows = padded_rows(going_on.nonzero().squeeze(-1))
        if not len(rows) and is_observed:
            rows = torch.zeros(BLOCK, dtype=torch.int64, device=log_probs.device)
        value, log_scale, possible = torch.ones_like(log_probs), torch.zeros_like(log_probs[:, 0]), None
        if not len(rows):
            return Weighed(log_probs, value, None, log_scale), ()
        some = {name: state[rows] for name, state in states.items()}
        hidden_rows = None if hidden is None else hidden[rows]
        weighed, seen = self._weigh_rows(problem, some, n, log_probs[rows], hidden_rows, is_observed)
        if going_on.any():
            value[rows], log_scale[rows] = weighed.value, weighed.log_scale
            if weighed.possible is not None:
                possible = torch.ones_like(log_probs, dtype=torch.bool)
                possible[rows] = weighed.possible
        spread = []
        for part in seen:
            spread.append(part.new_zeros(len(log_probs), *part.shape[1:]))
            spread[-1][rows] = part
        return Weighed(log_probs, value, possible, log_scale), tuple(spread)

    def _weigh_rows(
        self,
        problem: Problem,
        states: dict[str, Tensor],
        n: int,
        log_probs: Tensor,
        hidden: Tensor | None,
        is_observed: bool,
    ) -> tuple[Weighed, tuple[Tensor, ...]]:
        features = hidden_features(problem, hidden, len(log_probs))
        readings = self.read(problem, states, n, features) if self.learned else None
        seen = observe(self.heads, log_probs, features, readings) if is_observed else ()
        if readings is not None:
            return self.combine(log_probs, readings), seen
        possible = None
        for name, head in self.heads.items():
            if isinstance(head, PatternHead):
                found = head.possible(states[name], n, problem.length)
                if found is not None:
                    possible = found if possible is None else possible & found
        possible = all_where_stuck(log_probs, possible)
        value = torch.ones_like(log_probs) if possible is None else possible.to(log_probs)
        return Weighed(log_probs, value, possible, torch.zeros_like(log_probs[:, 0])), seen

    def read(
        self, problem: Problem, states: dict[str, Tensor], n: int, hidden: Float[Tensor, "row d"]
    ) -> list[Reading]:
        """The values of every head for every token at position ``n``."""
        readings = []
        for name, head in self.heads.items():
            features = head.features(states[name], hidden)
            readings.append(Reading(features, head.value(states[name], features, n, problem.length)))
        return readings

    def combine(self, log_probs: Float[Tensor, "row token"], readings: list[Reading]) -> Weighed:
        """The proposal made of the model's probabilities and the values of the heads."""
        log_value = torch.zeros_like(log_probs)
        for head, reading in zip(self.heads.values(), readings, strict=True):
            log_value = log_value + self.settings.power_of(head) * reading.value.to(log_value).log()
        possible = log_value > -torch.inf
        log_scale = log_value.amax(-1, keepdim=True)
        log_scale = torch.where(log_scale > -torch.inf, log_scale, 0.0)
        value = (log_value - log_scale).exp()
        expected = (log_probs.exp() * value).sum(-1, keepdim=True)
        is_known = self.settings.delta * expected > torch.finfo(expected.dtype).tiny  # else q may be 0 where p is not
        value = torch.where(is_known, value + self.settings.delta * expected, 1.0)
        kept = None if bool(possible.all()) else all_where_stuck(log_probs, possible)
        if kept is not None:
            value = value * kept
        return Weighed(log_probs, value, kept, torch.where(is_known, log_scale, 0.0).squeeze(-1))

    def check_fits(self, problem: Problem) -> None:
        """Raise an error if the target has another vocabulary, length or width."""
        for name, value in sizes_of(problem).items():
            fitted_to = self.identity.get(name)
            if fitted_to != value:
                raise SamplingError(
                    f"the lookahead was fitted to another {name} ({fitted_to}, not {value})",
                    remedy="fit one to this target",
                )

    def weights(self) -> dict[str, Tensor]:
        """The trained parameters of all heads."""
        return {
            f"{number}.{key}": tensor.detach().cpu().contiguous()
            for number, head in enumerate(self.heads.values())
            for key, tensor in head.reader.state_dict().items()
            if key != "coordinates"
        }

    def save(self, folder: str | Path) -> None:
        """Write the weights as safetensors and the settings as JSON."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "factors": {name: head.reader.size for name, head in self.heads.items()},
            "settings": self.settings.as_dict(),
            "identity": self.identity,
            "learned": self.learned,
        }
        save_file(self.weights(), folder / WEIGHTS_FILE)
        (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path, target: Target | Problem) -> Lookahead:
        """Read a lookahead that was saved for this target."""
        folder, problem = Path(folder), bind(target)
        try:
            saved = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
            for key, value in identify(problem).items():
                if saved["identity"].get(key) != value:
                    raise SamplingError(
                        f"the lookahead {folder} was fitted to another {key} ({saved['identity'].get(key)!r}, not "
                        f"{value!r})",
                        remedy="fit one to this target",
                    )
            settings = LookaheadSettings(**saved["settings"])
            made = restore(problem, saved["factors"], load_file(folder / WEIGHTS_FILE), settings)
        except SamplingError:
            raise
        except Exception as error:  # the libraries below raise many kinds; each means that the folder is unusable
            raise SamplingError(
                f"the lookahead {folder} cannot be loaded ({type(error).__name__}: {one_line(error)})",
                remedy="fit it again",
            ) from error
        return replace(made, learned=bool(saved["learned"]))


def restore(
    problem: Problem, sizes: dict[str, Size], weights: dict[str, Tensor], settings: LookaheadSettings
) -> Lookahead:
    """A lookahead with these trained parameters."""
    made = untrained(problem, sizes, settings)
    for number, head in enumerate(made.heads.values()):
        parts = {key.split(".", 1)[1]: part for key, part in weights.items() if key.startswith(f"{number}.")}
        head.reader.load_state_dict({**parts, "coordinates": head.reader.coordinates})
    return replace(made, learned=True)


def untrained(
    problem: Problem,
    sizes: dict[str, Size] | None = None,
    settings: LookaheadSettings | None = None,
    seed: int | None = None,
) -> Lookahead:
    """The model restricted to possible tokens, with untrained heads; with a seed, random heads that are used."""
    check_autoregressive(problem, "a lookahead")
    coordinates = token_coordinates(problem.embeddings)
    heads: dict[str, Head] = {}
    for name in factor_names(problem):
        automaton = token_automaton(problem, name) if name in problem.patterns else None
        outputs, size = 1 if automaton is None else len(automaton.live), (sizes or {}).get(name, "position")
        reader = Reader(feature_width(problem), problem.length, outputs, coordinates, size).to(problem.device)
        heads[name] = LearntHead(reader) if automaton is None else PatternHead(automaton, reader)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in nn.ModuleList(heads.values()).parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return Lookahead(heads, settings or LookaheadSettings(), identify(problem), learned=seed is not None)
