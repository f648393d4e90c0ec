"""`generate`: texts for one prompt or many, under control if asked for. It is what `svs sample` does, as a function."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from structured_voronoi.core.contracts import Control, Start
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.user_code import CONTROL_SECONDS, user_code
from structured_voronoi.core.validation import check_count, check_memory, check_positive, check_seed, check_tolerance
from structured_voronoi.engine.accepted_texts import EngineTexts, Outcome
from structured_voronoi.engine.plan import (
    DEFAULT_LENGTH,
    DEFAULT_TOLERANCE,
    Plan,
    choose_sampler,
    plan_texts,
    total_steps,
)
from structured_voronoi.engine.settings import EngineSettings
from structured_voronoi.engine.text_chains import TextRun, Watcher, closing_line, closing_warnings
from structured_voronoi.engine.texts import Text
from structured_voronoi.metrics.probability import Probability
from structured_voronoi.problem.problem import bind
from structured_voronoi.samplers.registry import TEXT_SCALE, Scale, check_sampler_name, find_sampler
from structured_voronoi.targets.controlled import Controlled
from structured_voronoi.targets.ending import Ends
from structured_voronoi.targets.language_model import LanguageModel

if TYPE_CHECKING:
    from pandas import DataFrame

    from structured_voronoi.engine.checkpoint import Checkpoint

KIND = "texts"
"""What runs of this are called in checkpoints."""
SHOWN = 8
"""Texts that are shown of all."""
TEXT_BYTES, TOKEN_BYTES, STEP_BYTES = 2000, 60, 5000
"""What is kept of a text, of each of its tokens, and of each step of the chains that run at a time; roughly."""
Say = Callable[[str], None]
"""Takes what a person at the screen would want to know."""


@dataclass(frozen=True)
class Request:
    """What is to be drawn."""

    model: str | LanguageModel = "bundled"
    prompts: Sequence[str] | None = None
    controls: Mapping[Control, float] = field(default_factory=dict)
    n: int = 8
    """Texts a prompt, each from a chain of its own."""
    length: int = DEFAULT_LENGTH
    suffix: str = ""
    ends: Ends | bool | None = None
    """"anywhere" unless there is a suffix."""
    stop: str | int | Sequence[str | int] = ()
    chat: bool = False
    system: str = ""
    sampler: str = "auto"
    scale: Scale = TEXT_SCALE
    warmup: int | None = None
    thin: int = 1
    start: Start = None
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    progress: bool = True
    checkpoint: str | Path | None = None
    """A folder in which the run is kept as it goes along."""
    resume: bool = True
    """Go on with the run that is there; otherwise such a folder is refused."""
    tolerance: float = DEFAULT_TOLERANCE
    """Bound on the total variation distance between texts under control and their exact distribution."""
    weighted: bool = False
    """All texts that satisfy the controls, with their weights; ``n`` counts effective texts."""
    time_limit: float | None = None
    """Stop after this many seconds with the texts so far."""
    settings: EngineSettings = field(default_factory=EngineSettings)
    control_timeout: float | None = CONTROL_SECONDS
    """Seconds after which a control that is asked about some texts is taken to hang; None for never."""
    workers: int | str = 1
    """How many processes draw texts; or a Ray cluster, "ray" or "ray://HOST:PORT"."""

    def __post_init__(self) -> None:
        check_count(n=self.n, thin=self.thin, length=self.length)
        if self.warmup is not None:
            check_count(0, warmup=self.warmup)
        check_positive(time_limit=self.time_limit, control_timeout=self.control_timeout)
        check_tolerance(self.tolerance)
        check_positive(scale=None if self.scale == "auto" else self.scale)
        check_seed(self.seed)
        check_sampler_name(self.sampler)
        _check_prompts(self.prompts)
        prompts = 1 if self.prompts is None else len(self.prompts)
        check_memory(prompts * self.n * (TEXT_BYTES + TOKEN_BYTES * self.length), f"{prompts * self.n} texts")
        steps = total_steps(self.warmup, self.thin)
        check_memory(STEP_BYTES * steps, f"the record of {steps} steps")


@dataclass(frozen=True, eq=False)
class Generated:
    """Texts in the order of their prompts, and what the run says of itself."""

    draws: list[Text]
    diagnosis: str
    """Whether the texts follow their target, and what they cost, in words."""
    probability: list[Probability] = field(default_factory=list)
    """P(controls) for each prompt; empty where chains drew the texts."""
    error_bound: list[float] = field(default_factory=list)
    """For each prompt, the 95 % upper limit of the total variation distance from the exact distribution."""
    evaluations: int = 0
    """Texts that were drawn from proposals."""

    @property
    def texts(self) -> list[str]:
        return [draw.text for draw in self.draws]

    def to_pandas(self) -> DataFrame:
        """A row a text: its prompt, text, log_prob, energy, and one column for every control."""
        import pandas

        return pandas.DataFrame([draw.line() for draw in self.draws])

    def to_jsonl(self, path: str | Path) -> None:
        """A line a text, with the keys that `svs sample --out` writes."""
        lines = [json.dumps(draw.line(), ensure_ascii=False, allow_nan=False) + "\n" for draw in self.draws]
        Path(path).write_text("".join(lines), encoding="utf-8")

    def __repr__(self) -> str:
        """The diagnosis and the first texts, a line each."""
        count = len(self.draws)
        shown = [" ".join(f"{draw.prompt}{draw.text}".split()) for draw in self.draws[:SHOWN]]
        more = [f"… and {count - SHOWN} more in .texts"] if count > SHOWN else []
        return "\n".join([self.diagnosis, *shown, *more])

    def _repr_html_(self) -> str:
        """The same as a table, with the energy and the controls."""
        from structured_voronoi.diagnostics.notebook import summary_html

        hidden = {"chain", "draw", "tokens", "log_prob"}
        rows = [{key: value for key, value in draw.line().items() if key not in hidden} for draw in self.draws[:SHOWN]]
        return summary_html(self.diagnosis, rows)


def generate(
    model: str | LanguageModel = "bundled",
    prompts: str | Sequence[str] | None = None,
    controls: Mapping[Control | str, float] | Sequence[Control | str] | None = None,
    n: int = 8,
    length: int = DEFAULT_LENGTH,
    **more: Any,
) -> Generated:
    """``n`` texts for every prompt from a model, by name or loaded, that satisfy controls, each with its weight.

    Controls may be written as on the command line: {"keyword=river": 1.0, my_control: 1.5}, or a list of them. All
    settings of a `Request` can be given: ends="anywhere", stop=(), sampler="auto", seed=0, chat=False, system="", ….
    With checkpoint="folder" the run is kept there, and the same call goes on with it after it was stopped. With
    workers=4 so many processes draw the same texts side by side; "ray://HOST:PORT" stands for a Ray cluster.
    """
    said: list[str] = []
    prompts = [prompts] if isinstance(prompts, str) else prompts
    device = str(more.get("device", "cpu"))
    request = Request(model, prompts, read_controls(controls or {}, device), n, length, **more)
    outcomes: list[Outcome] = []
    with contextlib.closing(fulfil(request, lambda _: None, said.append, outcomes=outcomes)) as batches:
        draws = [text for batch in batches for text in batch]
    order = {prompt: number for number, prompt in enumerate(prompts or [])}
    draws.sort(key=lambda text: (order.get(text.prompt, 0) if request.weighted else 0, text.chain))
    found = outcomes[0] if outcomes else Outcome([], [], 0, False)
    return Generated(draws, " ".join(said), found.probability, found.error_bound, found.evaluations)


def read_controls(
    controls: Mapping[Control | str, float] | Sequence[Control | str], device: str
) -> dict[Control, float]:
    """Controls and their weights; those that are written in words are read, and a weight in them counts, too."""
    if not isinstance(controls, Collection) or isinstance(controls, (str, bytes)):
        raise SamplingError(
            f"controls = {controls!r} is no list of controls",
            remedy="write controls=['keyword=river'], or a dict with weights",
        )
    given = controls.items() if isinstance(controls, Mapping) else [(control, 1.0) for control in controls]
    found: dict[Control, float] = {}
    for control, weight in given:
        if isinstance(control, str):
            from structured_voronoi.controls.parsing import parse_control

            control, written = parse_control(control, device)
            weight = weight * written if isinstance(weight, int | float) else weight  # which `Controlled` refuses
        with user_code(f"the control {type(control).__name__}", "mend it, or leave it out"):
            _check_control(control, found)
            found[control] = weight
    return found


def _check_control(control: Control, others: Mapping[Control, float]) -> None:
    """Refuse a control that cannot be told from the others, or whose name is that of another part of a text's line."""
    try:
        is_repeated = control in others
    except TypeError as error:
        raise SamplingError(
            f"the control {type(control).__name__} cannot be told from others",
            cause=error,
            remedy="write @dataclass(eq=False), or add __hash__ = object.__hash__",
        ) from error
    if is_repeated:
        raise SamplingError(f"the control {control.name} is given twice", remedy="leave one out")
    if getattr(control, "name", None) in Text._fields:
        raise SamplingError(
            f"a control is called {control.name!r}, as another part of the output is",
            remedy="give it another name",
        )


def fulfil(
    request: Request,
    say: Say,
    conclude: Say,
    watcher: Watcher | None = None,
    outcomes: list[Outcome] | None = None,
) -> Generator[list[Text]]:
    """The texts of a request as they come; every prompt is checked before the first text is drawn."""
    with contextlib.ExitStack() as stack:
        kept = None
        if request.checkpoint is not None or request.workers != 1:
            from structured_voronoi.engine.checkpoint import open_checkpoint

            kept = stack.enter_context(open_checkpoint(request.checkpoint, request.resume, request.workers, KIND))
        models = _models_of(request)
        targets = make_targets(request, models)
        if kept is not None:
            if not find_sampler(choose_sampler(targets[0], request.sampler)[0]).independent:
                _refuse_growth(request, models, kept)
            kept.begin(KIND, bind(targets[0]), _described(request, models[0]), growing="n")
            if kept.other_versions:
                say(f"the run was begun with {kept.other_versions}: what is to come may end in other bits")
        name, reason = choose_sampler(targets[0], request.sampler)
        if reason:
            say(reason)
        if find_sampler(name).independent and not request.weighted:
            yield from _draw_by_engine(request, targets, name, conclude, kept, watcher, outcomes)
        elif request.weighted:
            if name not in ("adaptive", "rejection"):
                raise SamplingError(
                    "weighted texts need controls with a bound",
                    remedy="leave out weighted, or add a control",
                )
            yield from _draw_by_engine(request, targets, name, conclude, kept, watcher, outcomes)
        else:
            yield from _draw_by_chains(request, targets, models, name, conclude, kept, stack, watcher)


def make_targets(
    request: Request, models: Sequence[LanguageModel] | None = None
) -> Sequence[LanguageModel | Controlled]:
    """What is sampled, prompt by prompt."""
    models = _models_of(request) if models is None else models
    controls, timeout = request.controls, request.control_timeout
    return [Controlled(model, controls, timeout) if controls else model for model in models]


def _draw_by_engine(
    request: Request,
    targets: Sequence[LanguageModel | Controlled],
    name: str,
    conclude: Say,
    kept: Checkpoint | None,
    watcher: Watcher | None,
    outcomes: list[Outcome] | None,
) -> Iterator[list[Text]]:
    """Independent texts, by rejection that learns where it may."""
    if watcher is not None:
        watcher.planned(targets[0], name, 1)
    run = EngineTexts(
        targets,
        request.n,
        request.seed,
        request.tolerance,
        request.weighted,
        replace(request.settings, learns=request.settings.learns and name == "adaptive"),
        request.time_limit,
        kept,
        partial(make_targets, replace(request, checkpoint=None, workers=1, progress=False)),
        request.progress,
    )
    count = 0
    for texts in run.draw():
        count += len(texts)
        yield texts
    found = run.outcome()
    if outcomes is not None:
        outcomes.append(found)
    conclude(_engine_line(request, name, count, found))
    for prompt, bound in enumerate(found.error_bound):
        if bound > max(2 * request.tolerance, 0.5 / math.sqrt(request.n)):  # half the standard error of a share
            where = f"prompt {prompt + 1}: " if len(targets) > 1 else ""
            conclude(f"{where}warning: the error bound is {bound:.2g}; draw more texts, or loosen the controls.")


def _engine_line(request: Request, name: str, count: int, found: Outcome) -> str:
    """What was drawn, at what cost, and how probable the controls are."""
    kind = "weighted texts" if request.weighted else "texts"
    parts = [f"{count} {kind if count != 1 else kind[:-1]}", f"{found.evaluations:,} tries"]
    if name != "ancestral":
        if len(found.probability) == 1:
            parts.append(f"P(controls) = {found.probability[0]}")
        if request.tolerance and not request.weighted:
            parts.append(f"error bound {max(found.error_bound):.2g}")
    if found.stopped_early:
        parts.append(f"stopped after {request.time_limit:g} s")
    return "; ".join(parts) + "."


def _draw_by_chains(
    request: Request,
    targets: Sequence[LanguageModel | Controlled],
    models: Sequence[LanguageModel],
    name: str,
    conclude: Say,
    kept: Checkpoint | None,
    stack: contextlib.ExitStack,
    watcher: Watcher | None,
) -> Iterator[list[Text]]:
    """Texts from Markov chains, prompt by prompt."""
    progress, done, all_texts = request.progress, 0, request.n * len(models)
    plan = plan_prompt(request, targets[0], kept, 0)
    if kept is not None and kept.is_spread:
        from structured_voronoi.engine.worker_checkpoint import SpreadCheckpoint
        from structured_voronoi.engine.worker_texts import spread_texts

        assert isinstance(kept, SpreadCheckpoint)
        progress = False
        stack.enter_context(spread_texts(kept, request, targets, plan))
    for number, (target, model) in enumerate(zip(targets, models, strict=True)):
        if number:
            plan = plan_prompt(request, target, kept, number)
        if watcher is not None:
            watcher.planned(target, plan.name, plan.steps)
        first, batches, label = number * request.n, [], f"prompt {number + 1} of {len(models)}: "
        label = label if len(models) > 1 else ""
        run = TextRun(target, plan, request.seed, request.start, kept, watcher)
        for batch in run.draw(request.n, progress, first, label):
            batches.append(batch)
            done += len(batch.texts)
            if kept is not None and not kept.is_finished:
                kept.reach(done, all_texts, "texts")
                if done == all_texts or kept.is_due:
                    kept.save()
            yield batch.texts
        conclude(f"{label}{closing_line(batches, plan, model)}")
        for words in closing_warnings(batches, plan):
            conclude(f"{label}warning: {words}.")


def _refuse_growth(request: Request, models: Sequence[LanguageModel], kept: Checkpoint) -> None:
    """More texts than at first can be had for one prompt: of several, those of the second begin at chain ``n``."""
    before = request.n if kept.store.manifest is None else kept.store.manifest.settings.get("n", request.n)
    if len(models) > 1 and request.n > before:
        raise SamplingError(
            f"{kept.store.folder} holds a run of {before} texts for each of {len(models)} prompts; with {request.n} "
            "each those of all prompts but the first would be others",
            remedy=f"ask for {before} again, or choose another folder",
        )


def _check_prompts(prompts: Sequence[str] | None) -> None:
    """Refuse prompts that are no texts, or none at all."""
    if prompts is None:
        return
    if isinstance(prompts, str) or not isinstance(prompts, Collection):
        raise SamplingError(f"prompts = {prompts!r} are no list", remedy="give a list of texts")
    if not len(prompts):
        raise SamplingError("there are no prompts", remedy="give one or more, or leave them out")
    for number, prompt in enumerate(prompts, 1):
        if not isinstance(prompt, str):
            raise SamplingError(f"prompt {number} is {prompt!r} and no text", remedy="give texts")


def plan_prompt(request: Request, target: LanguageModel | Controlled, kept: Checkpoint | None, number: int) -> Plan:
    """How the chains of one prompt are drawn."""
    problem = bind(target)

    def make() -> Plan:
        return plan_texts(
            problem,
            request.sampler,
            scale=request.scale,
            warmup=request.warmup,
            thin=request.thin,
            start=request.start,
            seed=request.seed,
        )

    return make() if kept is None else kept.plan(f"plan-{number:06}", problem, request.scale, make)


def _described(request: Request, model: LanguageModel) -> dict[str, Any]:
    """Everything that the texts depend on besides the target, as a checkpoint keeps it."""
    from structured_voronoi.storage.packing import describe

    how = ("progress", "checkpoint", "resume", "workers", "time_limit", "control_timeout")
    left_out = (*how, "model", "prompts", "controls")
    settings = {name: describe(value) for name, value in vars(request).items() if name not in left_out}
    return {
        "model": request.model if isinstance(request.model, str) else type(model.model).__name__,
        "prompts": describe(list(request.prompts or [model.prompt])),
        "controls": {control.name: weight for control, weight in request.controls.items()},
        **settings,
    }


def _models_of(request: Request) -> list[LanguageModel]:
    """The language model after every prompt; the network is loaded once."""
    prompts, shape = [""] if request.prompts is None else list(request.prompts), _shape_of(request)
    models: list[LanguageModel] = []
    for number, prompt in enumerate(prompts):
        try:
            if models:
                model = models[0].with_prompt(prompt)
            elif isinstance(request.model, LanguageModel):
                own = request.model
                prompt = own.prompt if request.prompts is None else prompt
                model = LanguageModel(own.model, own.tokenizer, prompt, memory=own.memory, allowed=own.asked, **shape)
                model.origin = own.origin
            else:
                model = LanguageModel.load(
                    request.model, prompt=prompt, device=request.device, dtype=request.dtype, **shape
                )
        except SamplingError as error:
            if len(prompts) == 1:
                raise
            raise type(error)(f"prompt {number + 1}, {prompt[:40]!r}: {error}") from error
        models.append(model)
    return models


def _shape_of(request: Request) -> dict[str, Any]:
    """What texts are like; a loaded model keeps its suffix, stops and conversation where the request has none."""
    shape: dict[str, Any] = {
        "suffix": request.suffix,
        "stop": request.stop,
        "chat": request.chat,
        "system": request.system,
    }
    ends, own = request.ends, request.model
    if isinstance(own, LanguageModel):
        kept = {"suffix": own.suffix, "stop": own.stop, "chat": own.is_chat, "system": own.system}
        shape = {name: value or kept[name] for name, value in shape.items()}
        ends = own.ends if ends is None and own.ends == "at length" else ends
    if ends is None:
        ends = "never" if shape["suffix"] else "anywhere"
    return {**shape, "ends": ends, "length": request.length}
