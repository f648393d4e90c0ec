"""Samplers of text compared with an enumerated target: the bundled model over eight tokens and four positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from structured_voronoi.controls.classifier import Classifier
from structured_voronoi.controls.predicate import Predicate
from structured_voronoi.controls.texts import keyword, regex
from structured_voronoi.core.contracts import Choose, Control, Pattern, Redrawn, Sampler, is_independent
from structured_voronoi.experiments.exactness.guided import GUIDED, GUIDED_TWINS, guided_samplers
from structured_voronoi.experiments.report import table, write_report
from structured_voronoi.samplers.cycle import Cycle
from structured_voronoi.samplers.gwg import GibbsWithGradients
from structured_voronoi.samplers.pncg import PNCG
from structured_voronoi.samplers.refresh import Refresh
from structured_voronoi.samplers.rejection import Rejection
from structured_voronoi.samplers.svs import SVS
from structured_voronoi.targets.language_model import load
from structured_voronoi.targets.tabular import AutoregressiveTable
from structured_voronoi.targets.text import TextTarget
from structured_voronoi.verify.stationary import stationarity
from structured_voronoi.verify.twins import OutwardOnly
from structured_voronoi.workers.parallel import map_tasks

PROMPT, LENGTH = "The Old Mill is a", 4
WORDS = (" cheap", " expensive", " pub", " restaurant", " diner", " place", " and", " a")
DIMENSIONS = len(WORDS) - 1
"""Eight embeddings span seven dimensions."""
NO_CONTROL = "none"


def _samplers() -> dict[str, Sampler]:
    svs, refresh = SVS(0.5, dimensions=DIMENSIONS), Refresh(block=2, suffix=False)
    return {
        "svs": svs,
        "pncg": PNCG(4.0),
        "gwg": GibbsWithGradients(),
        "refresh": refresh,
        "svs+refresh": Cycle(svs, refresh),
        "twin: outward only": OutwardOnly(0.5, dimensions=DIMENSIONS),
    }


def _controlled_samplers() -> dict[str, Sampler]:
    plain = _samplers()
    names = ("svs", "refresh", "svs+refresh", "twin: outward only")
    return {name: plain[name] for name in names} | {"rejection": Rejection(batch_size=4096)}


@dataclass(frozen=True)
class Settings:
    runs: int = 20_000
    """Chains per sampler, started in the target distribution."""
    seed: int = 4
    progress: bool = True
    workers: int | None = None
    steps: int = 12
    words: tuple[str, ...] = WORDS
    samplers: dict[str, Sampler] = field(default_factory=_samplers)
    controlled_samplers: dict[str, Sampler] = field(default_factory=_controlled_samplers)
    guided: tuple[str, ...] = GUIDED + GUIDED_TWINS
    """Samplers with a lookahead, which run under every control."""
    guided_steps: int = 3


def score_pubs(text: str) -> float:
    """A control that is a function of the text."""
    return 0.9 if "pub" in text else 0.3


def controls() -> dict[str, Control]:
    return {
        "keyword": keyword("pub"),
        "regex": regex("cheap.*place|a$"),
        "classifier": Classifier.load("price", "expensive"),
        "black box": Predicate(score_pubs, "pubs"),
    }


class ListedTexts(AutoregressiveTable):
    """A table of all texts with what a lookahead reads: hidden states, the tokenizer and the score of the control."""

    def __init__(self, model: TextTarget, tokens: Int[Tensor, " token"], control: Control | None) -> None:
        texts = tokens[torch.cartesian_prod(*[torch.arange(len(tokens))] * model.length)]
        target = model if control is None else model.under([control])
        shape = (len(tokens),) * model.length
        log_prob, hidden = (part.double() for part in model.log_prob_and_guide(texts))
        total, guide = (part.double() for part in target.log_prob_and_guide(texts))
        scores = None if control is None else (total - log_prob).view(shape)
        super().__init__(
            model.embeddings[tokens].double(),
            (log_prob - log_prob.logsumexp(0)).view(shape),
            guide.view(*shape, model.length, -1),
            scores,
        )
        self.hidden = hidden.view(*shape, model.length, -1)
        self._scores = {} if control is None or scores is None else {control.name: scores}
        pattern: Pattern | None = getattr(control, "pattern", None)
        self.patterns = {} if control is None or pattern is None else {control.name: pattern}
        words = model.tokenizer.convert_ids_to_tokens(tokens.tolist())
        spelling = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
        spelling.decoder = decoders.ByteLevel()
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=spelling)

    def redraw(self, tokens: Int[Tensor, "chain n"], start: int, stop: int, choose: Choose) -> Redrawn:
        tokens = tokens.clone()
        for n in range(start, stop):
            choice = choose(n, self.conditionals(tokens, n)[:, 0], self.hidden[tokens.unbind(-1)][:, n])
            assert isinstance(choice, Tensor)
            tokens[:, n] = choice
        log_probs = self.conditionals(tokens, 0).gather(-1, tokens[..., None]).squeeze(-1)
        return Redrawn(tokens, log_probs[:, start:], self.log_prob(tokens) - log_probs.sum(-1))

    def log_factors(self, tokens: Int[Tensor, "chain n"]) -> dict[str, Float[Tensor, " chain"]]:
        return {name: scores[tokens.unbind(-1)] for name, scores in self._scores.items()}


@cache
def tabulated(control: str = NO_CONTROL, words: tuple[str, ...] = WORDS) -> ListedTexts:
    """All texts of the words, scored once by the model and a control, in float64."""
    model = load("bundled")
    tokens = torch.tensor([model.tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in words])
    return ListedTexts(TextTarget(model, PROMPT, LENGTH, allowed=tokens.tolist()), tokens, controls().get(control))


@cache
def guided_on(control: str, words: tuple[str, ...], seed: int) -> dict[str, Sampler]:
    """The samplers with a lookahead under one control."""
    return guided_samplers(tabulated(control, words), seed)


def run(settings: Settings, out: Path) -> list[Path]:
    """Test every sampler on the model alone and under each control."""
    tasks: list[tuple[str, tuple[str, Sampler | None]]]
    tasks = [(NO_CONTROL, sampler) for sampler in settings.samplers.items()]
    tasks += [(control, sampler) for control in controls() for sampler in settings.controlled_samplers.items()]
    tasks += [(control, (name, None)) for control in controls() for name in settings.guided]
    work = partial(_check, settings=settings)
    rows = map_tasks(work, tasks, "truth", settings.progress, settings.workers)
    results: dict[str, Any] = {"runs": settings.runs, "seed": settings.seed, "steps": settings.steps}
    results |= {"prompt": PROMPT, "words": settings.words, "guided_steps": settings.guided_steps, "rows": rows}
    return write_report(out, "truth", results, _markdown(results), {})


def _check(task: tuple[str, tuple[str, Sampler | None]], settings: Settings) -> dict[str, Any]:
    """Test one sampler; None stands for the sampler with a lookahead of that name."""
    control, (name, sampler) = task
    target, steps = tabulated(control, settings.words), settings.steps
    if sampler is None:
        sampler, steps = guided_on(control, settings.words, settings.seed)[name], settings.guided_steps
    elif is_independent(sampler):
        steps = 1
    result = stationarity(sampler, target, settings.runs, steps, settings.seed)
    row = {"control": control, "sampler": name, "moved": result.moved}
    return row | {"p": result.p_value, "tv": result.tv, "z": result.z, "energy_z": result.energy_z}


def _markdown(results: dict[str, Any]) -> str:
    words = results["words"]
    intro = (
        f"All {len(words)}^{LENGTH} texts of the tokens {', '.join(map(repr, words))} after “{PROMPT}”, bundled model; "
        f"{results['runs']:,} chains started in the target distribution, {results['steps']} steps "
        f"({results['guided_steps']} with a lookahead), seed {results['seed']}. z is (TV − mean)/sd "
        "against 200 sets of as many independent draws; p is of the chi-square test with states pooled to expected "
        "counts of at least 5; z of the energy is that of its mean."
    )
    body = [
        [row["control"], row["sampler"], f"{row['moved']:.0%}", row["p"], row["tv"], row["z"], row["energy_z"]]
        for row in results["rows"]
    ]
    header = ["control", "sampler", "moved", "p", "TV", "z", "z of the energy"]
    return "\n\n".join(["# Enumerated texts", intro, table(header, body)])
