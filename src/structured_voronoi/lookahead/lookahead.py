"""Lookahead: proposals that know what is asked for.

With ψ_k(v) ≈ E_p[W_k | prefix, v] for the factors W_k of a target, a text is drawn token by token from
q(v) ∝ p(v) (ψ(v) + δ E_p[ψ]), ψ = Π_k ψ_k^β_k. The second term keeps q positive wherever p is, so that weights p W / q
correct whatever ψ gets wrong: a text that only ψ finds impossible is still drawn, and weighs the more. β_k is below 1,
as heads are too sure of themselves.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from structured_voronoi.contracts import Target
from structured_voronoi.errors import SamplingError, one_line
from structured_voronoi.lookahead.heads import (
    Head,
    LearntHead,
    PatternHead,
    Reader,
    Size,
    padded_rows,
    token_coordinates,
)
from structured_voronoi.lookahead.reading import (
    feature_width,
    hidden_features,
    identify,
    prefix_reader,
    sizes_of,
    token_automaton,
)
from structured_voronoi.problem.drawing import (
    check_autoregressive,
    redraw_by,
    rows_to_redraw,
)
from structured_voronoi.problem.problem import Problem, bind
from structured_voronoi.progress import show_note
from structured_voronoi.streams import BLOCK, in_blocks, index_at_level, widened

WEIGHTS, SETTINGS = "lookahead.safetensors", "lookahead.json"
WEIGHED = 2**20
"""Numbers, one a row and token, that every head computes at a time, which bounds its memory."""


class Proposal(NamedTuple):
    """Texts drawn with a lookahead, at least from some position on."""

    tokens: Int[Tensor, "row n"]
    log_p: Float[Tensor, "row n"]
    """log p of each token given those before it; 0 before the first drawn position."""
    log_q: Float[Tensor, "row n"]
    """log of the probability with which it was drawn; 0 before the first drawn position."""
    log_rest: Float[Tensor, " row"]

    @property
    def log_weight(self) -> Float[Tensor, " row"]:
        """log of p W / q but for a constant; -inf where the target gives no number."""
        weight = (self.log_p - self.log_q).sum(-1) + self.log_rest
        return torch.where(weight.isfinite(), weight, -torch.inf)


class Reading(NamedTuple):
    """What a head looked at, and what it makes of it."""

    features: Float[Tensor, "row d"]
    value: Float[Tensor, "row token"]
    """ψ of every token."""


class Weighed(NamedTuple):
    """The next token as a lookahead sees it: the proposal is q = p value / E_p[value]."""

    log_p: Float[Tensor, "row token"]
    value: Float[Tensor, "row token"]
    """What each token will come to, with δ in it, in units of the scale."""
    mass: Float[Tensor, "row token"]
    """p value: the proposal but for a factor."""
    log_scale: Float[Tensor, " row"]
    """Values of several heads together may be below the least number there is."""

    @classmethod
    def of(
        cls,
        log_p: Float[Tensor, "row token"],
        value: Float[Tensor, "row token"],
        log_scale: Float[Tensor, " row"] | None = None,
    ) -> Weighed:
        return cls(log_p, value, log_p.exp() * value, torch.zeros_like(log_p[:, 0]) if log_scale is None else log_scale)

    @property
    def log_expected(self) -> Float[Tensor, " row"]:
        """log of the mean value under the model."""
        return widened(self.mass.sum(-1)).log() + widened(self.log_scale)

    def draw(self, level: Float[Tensor, " row"]) -> Int[Tensor, " row"]:
        """A token of each row from q."""
        return index_at_level(self.mass, level)

    def log_q(self, token: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
        log_p = widened(self.log_p.gather(-1, token[:, None])[:, 0])
        return log_p + self.log_value(token) - self.log_expected

    def log_value(self, token: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
        return widened(self.value.gather(-1, token[:, None])[:, 0]).log() + widened(self.log_scale)


@dataclass(frozen=True, eq=False)
class Lookahead:
    """Heads for the factors of a target, and how much they are trusted; made by `Lookahead.fit`."""

    heads: dict[str, Head]
    delta: float
    """The share of plain model that is mixed into every step."""
    identity: dict[str, Any]
    """The target it was made for."""

    @classmethod
    def fit(
        cls,
        target: Target | Problem,
        texts: int = 2048,
        seed: int = 0,
        progress: bool = True,
        *,
        seconds: float | None = None,
    ) -> Lookahead:
        """Learn from ``texts`` draws of the model itself, or from as many as leave time to learn in ``seconds``.

        With a limit in seconds the result depends on the speed of the machine.
        """
        from structured_voronoi.lookahead.fitting import fit_lookahead

        return fit_lookahead(bind(target), texts, seed, progress, seconds)

    def adopted(self, problem: Problem) -> Lookahead:
        """The same for a target with the same factors, as after another prompt; it may serve there less well."""
        made = untrained(problem, {name: head.reader.size for name, head in self.heads.items()}, self.delta)
        for name, head in made.heads.items():
            head.reader.load_state_dict(self.heads[name].reader.state_dict())
        return made

    def propose(
        self, problem: Problem, tokens: Int[Tensor, "row n"], start: int, levels: Float[Tensor, "row count"]
    ) -> Proposal:
        """The tokens with all positions from ``start`` on drawn anew, each at its level."""

        def propose_block(tokens: Tensor, levels: Tensor) -> tuple[Tensor, ...]:
            return self._propose_block(problem, tokens, start, levels)

        return Proposal(*in_blocks(propose_block, tokens, levels, rows_at_a_time=rows_to_redraw(problem)))

    def draw(
        self, problem: Problem, levels: Float[Tensor, "row n"], prefix: Int[Tensor, "some kept"] | None = None
    ) -> Proposal:
        """Whole texts, each token at its level; the first rows with a prefix, if one is given for some."""
        tokens = problem.allowed_tokens[:1].expand(levels.shape).clone()
        if prefix is not None and prefix.shape[1]:
            rows, kept = prefix.shape
            tokens[:rows, :kept] = prefix
            levels = levels.clone()
            levels[:rows, :kept] = torch.nan
        return self.propose(problem, tokens, 0, levels)

    @torch.no_grad()
    def _propose_block(self, problem: Problem, tokens: Tensor, start: int, levels: Tensor | None) -> tuple[Tensor, ...]:
        """Tokens drawn at their levels; kept as they are where a level is NaN, or without levels."""
        states = {name: head.begin(tokens[:, :start]) for name, head in self.heads.items()}
        log_q = widened(torch.zeros(tokens.shape, device=tokens.device))
        at_a_time = max(BLOCK, WEIGHED // len(problem.embeddings) // BLOCK * BLOCK)

        def choose(n: int, log_probs: Tensor, hidden: Tensor | None) -> Tensor:
            token = tokens[:, n].clone()
            show_note(f"{len(token)} proposals, token {n + 1} of {problem.length}")
            for begin in range(0, len(token), at_a_time):
                rows = slice(begin, begin + at_a_time)
                some = {name: state[rows] for name, state in states.items()}
                weighed = self.weigh(problem, some, n, log_probs[rows], None if hidden is None else hidden[rows])
                if levels is not None:
                    token[rows] = _drawn_or_kept(weighed, levels[rows, n - start], token[rows])
                log_q[rows, n] = weighed.log_q(token[rows])
            for name, head in self.heads.items():
                states[name] = head.advance(states[name], token)
            return token

        redrawn = redraw_by(problem, tokens, start, problem.length, choose)
        log_p = torch.zeros_like(log_q)
        log_p[:, start:] = widened(redrawn.log_probs)
        return redrawn.tokens, log_p, log_q, widened(redrawn.log_rest)

    def score(self, problem: Problem, tokens: Int[Tensor, "row n"]) -> Proposal:
        """Given texts as if they had been proposed: what p and q say of each of their tokens."""

        def score_block(tokens: Tensor) -> tuple[Tensor, ...]:
            return self._propose_block(problem, tokens, 0, None)

        return Proposal(*in_blocks(score_block, tokens, rows_at_a_time=rows_to_redraw(problem)))

    def weigh(
        self, problem: Problem, states: dict[str, Tensor], n: int, log_probs: Tensor, hidden: Tensor | None
    ) -> Weighed:
        """What the lookahead makes of every token at position ``n``; nothing of those after the end of a text."""
        is_going = _which_go_on(problem, log_probs)
        if is_going.all():
            features = hidden_features(problem, hidden, len(log_probs))
            return self.combine(log_probs, self.read(problem, states, n, features))
        if not is_going.any():
            return Weighed.of(log_probs, torch.ones_like(log_probs))
        going = padded_rows(is_going.nonzero().squeeze(-1))
        some = {name: state[going] for name, state in states.items()}
        features = hidden_features(problem, None if hidden is None else hidden[going], len(going))
        weighed = self.combine(log_probs[going], self.read(problem, some, n, features))
        value, log_scale = torch.ones_like(log_probs), torch.zeros_like(log_probs[:, 0])
        value[going], log_scale[going] = weighed.value, weighed.log_scale
        return Weighed.of(log_probs, value, log_scale)

    def read(
        self, problem: Problem, states: dict[str, Tensor], n: int, hidden: Float[Tensor, "row d"]
    ) -> list[Reading]:
        """What every head says of every token at position ``n``."""
        readings = []
        for name, head in self.heads.items():
            features = head.features(states[name], hidden)
            readings.append(Reading(features, head.value(states[name], features, n, problem.length)))
        return readings

    def combine(self, log_probs: Float[Tensor, "row token"], readings: list[Reading]) -> Weighed:
        """The proposal that the model's probabilities and the heads' values make together."""
        log_value = torch.zeros_like(log_probs)
        for head, reading in zip(self.heads.values(), readings, strict=True):
            log_value = log_value + head.power * reading.value.to(log_value).log()
        log_scale = log_value.amax(-1, keepdim=True)
        log_scale = torch.where(log_scale > -torch.inf, log_scale, 0.0)
        value = (log_value - log_scale).exp()
        expected = (log_probs.exp() * value).sum(-1, keepdim=True)
        is_told = self.delta * expected > torch.finfo(expected.dtype).tiny  # else q may be 0 where p is not
        value = torch.where(is_told, value + self.delta * expected, 1.0)
        return Weighed.of(log_probs, value, torch.where(is_told, log_scale, 0.0).squeeze(-1))

    def check_fits(self, problem: Problem) -> None:
        """Refuse a target of another size, of whose texts this cannot say anything."""
        for name, value in sizes_of(problem).items():
            made_for = self.identity.get(name)
            if made_for != value:
                raise SamplingError(
                    f"the lookahead was made for another {name} ({made_for}, not {value}); fit one for this target"
                )

    def save(self, folder: str | Path) -> None:
        """Weights as safetensors, settings as JSON."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            f"{number}.{key}": tensor.detach().cpu().contiguous()
            for number, head in enumerate(self.heads.values())
            for key, tensor in head.reader.state_dict().items()
            if key != "coordinates"
        }
        settings = {
            "factors": {name: head.reader.size for name, head in self.heads.items()},
            "powers": {name: head.power for name, head in self.heads.items()},
            "delta": self.delta,
            "identity": self.identity,
        }
        save_file(weights, folder / WEIGHTS)
        (folder / SETTINGS).write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path, target: Target | Problem) -> Lookahead:
        """A lookahead that was saved for this target; one for another is refused."""
        folder, problem = Path(folder), bind(target)
        try:
            settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
            weights, sizes, saved = load_file(folder / WEIGHTS), settings["factors"], settings["identity"]
            for key, value in identify(problem).items():
                if saved.get(key) != value:
                    raise SamplingError(
                        f"the lookahead {folder} was made for another {key} ({saved.get(key)!r}, not {value!r}); "
                        "fit one for this target"
                    )
            made = untrained(problem, sizes, settings["delta"])
            if settings.get("powers") != {name: head.power for name, head in made.heads.items()}:
                raise SamplingError(f"the lookahead {folder} was made by another version of this package; fit it again")
            for number, head in enumerate(made.heads.values()):
                parts = {key.split(".", 1)[1]: part for key, part in weights.items() if key.startswith(f"{number}.")}
                head.reader.load_state_dict({**parts, "coordinates": head.reader.coordinates})
        except SamplingError:
            raise
        except Exception as error:  # the libraries below raise many kinds; each means that the folder is of no use
            raise SamplingError(
                f"the lookahead {folder} cannot be loaded ({type(error).__name__}: {one_line(error)}); fit it again"
            ) from error
        return made


def _drawn_or_kept(weighed: Weighed, level: Float[Tensor, " row"], kept: Int[Tensor, " row"]) -> Int[Tensor, " row"]:
    """The token at the level, or the kept one where there is none."""
    is_kept = level.isnan()
    return torch.where(is_kept, kept, weighed.draw(level.masked_fill(is_kept, 0.5)))


def untrained(problem: Problem, sizes: dict[str, Size], delta: float, seed: int | None = None) -> Lookahead:
    """Heads that know the patterns but have learnt nothing; with a seed, random ones."""
    check_autoregressive(problem, "a lookahead")
    coordinates = token_coordinates(problem.embeddings)
    heads: dict[str, Head] = {}
    for name, size in sizes.items():
        automaton = token_automaton(problem, name) if name in problem.patterns else None
        outputs = 1 if automaton is None else len(automaton.live)
        if automaton is not None and size in ("said", "prefix"):
            size = "token"  # its state is all that a pattern needs to know of what was said
        reader = Reader(feature_width(problem), problem.length, outputs, coordinates, size).to(problem.device)
        learnt = LearntHead(reader, prefix_reader(problem, name))
        heads[name] = learnt if automaton is None else PatternHead(automaton, reader)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in nn.ModuleList(heads.values()).parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return Lookahead(heads, delta, identify(problem))


def _which_go_on(problem: Problem, log_probs: Float[Tensor, "row token"]) -> Bool[Tensor, " row"]:
    """The rows whose text is not over."""
    if problem.padding is None:
        return torch.ones_like(log_probs[:, 0], dtype=torch.bool)
    return log_probs[:, problem.padding] < 0
