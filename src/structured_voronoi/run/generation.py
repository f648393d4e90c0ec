"""`generate`: texts for one prompt or many, under control if asked for. It is what `svs sample` does, as a function."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from structured_voronoi.contracts import Control, Start
from structured_voronoi.errors import (
    CONTROL_SECONDS,
    SamplingError,
    check_count,
    check_memory,
    check_positive,
    check_seed,
    user_code,
)
from structured_voronoi.problem.problem import bind
from structured_voronoi.run.presets import (
    DEFAULT_LENGTH,
    DEFAULT_PATIENCE,
    TEXT_SCALE,
    Plan,
    Scale,
    check_sampler_name,
    plan_texts,
    total_steps,
)
from structured_voronoi.run.texts import (
    Batch,
    Text,
    TextRun,
    Watcher,
    closing_line,
    closing_warnings,
    draw_for_prompts,
)
from structured_voronoi.targets.controlled import Controlled
from structured_voronoi.targets.ending import Ends
from structured_voronoi.targets.language_model import LanguageModel

if TYPE_CHECKING:
    from pandas import DataFrame

    from structured_voronoi.run.checkpoints import Checkpoint

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
    patience: float | None = DEFAULT_PATIENCE
    """Seconds after which rejection gives up if it has accepted nothing; None for never."""
    control_timeout: float | None = CONTROL_SECONDS
    """Seconds after which a control that is asked about some texts is taken to hang; None for never."""
    workers: int | str = 1
    """How many processes draw texts; or a Ray cluster, "ray" or "ray://HOST:PORT"."""

    def __post_init__(self) -> None:
        check_count(n=self.n, thin=self.thin, length=self.length)
        if self.warmup is not None:
            check_count(0, warmup=self.warmup)
        check_positive(patience=self.patience, control_timeout=self.control_timeout)
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
        from structured_voronoi.run.notebook import summary_html

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
    with contextlib.closing(fulfil(request, lambda _: None, said.append)) as batches:
        draws = [text for batch in batches for text in batch.texts]
    return Generated(sorted(draws, key=lambda text: text.chain), " ".join(said))


def read_controls(
    controls: Mapping[Control | str, float] | Sequence[Control | str], device: str
) -> dict[Control, float]:
    """Controls and their weights; those that are written in words are read, and a weight in them counts, too."""
    if not isinstance(controls, Collection) or isinstance(controls, (str, bytes)):
        raise SamplingError(
            f"controls = {controls!r} is no list of controls; write controls=['keyword=river'], or a dict with weights"
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
            f"the control {type(control).__name__} cannot be told from others ({error}); write @dataclass(eq=False), "
            "or add __hash__ = object.__hash__"
        ) from error
    if is_repeated:
        raise SamplingError(f"the control {control.name} is given twice; leave one out")
    if getattr(control, "name", None) in Text._fields:
        raise SamplingError(
            f"a control is called {control.name!r}, as another part of the output is; give it another name"
        )


def fulfil(request: Request, say: Say, conclude: Say, watcher: Watcher | None = None) -> Generator[Batch]:
    """The texts of a request, batch by batch; every prompt is looked at before the first text is drawn."""
    with contextlib.ExitStack() as stack:
        kept = None
        if request.checkpoint is not None or request.workers != 1:
            from structured_voronoi.run.checkpoints import open_checkpoint

            kept = stack.enter_context(open_checkpoint(request.checkpoint, request.resume, request.workers, KIND))
        models = _models_of(request)
        left_out = ", ".join(f"{count} {why}" for why, count in models[0].excluded.items() if count)
        say(f"tokens left out: {left_out or 'none'}")
        targets = make_targets(request, models)
        if kept is not None:
            _refuse_growth(request, models, kept)
            kept.begin(KIND, bind(targets[0]), _described(request, models[0]), growing="n")
            if kept.other_versions:
                say(f"the run was begun with {kept.other_versions}: what is to come may end in other bits")
        done, all_texts = 0, request.n * len(models)
        for batch in _draw(request, targets, models, say, conclude, kept, stack, watcher):
            done += len(batch.texts)
            if kept is not None and not kept.is_finished:
                kept.reach(done, all_texts, "texts")
                if done == all_texts or kept.is_due:
                    kept.save()
            yield batch


def make_targets(
    request: Request, models: Sequence[LanguageModel] | None = None
) -> Sequence[LanguageModel | Controlled]:
    """What is sampled, prompt by prompt."""
    models = _models_of(request) if models is None else models
    controls, timeout = request.controls, request.control_timeout
    return [Controlled(model, controls, timeout) if controls else model for model in models]


def _draw(
    request: Request,
    targets: Sequence[LanguageModel | Controlled],
    models: Sequence[LanguageModel],
    say: Say,
    conclude: Say,
    kept: Checkpoint | None,
    stack: contextlib.ExitStack,
    watcher: Watcher | None,
) -> Iterator[Batch]:
    """The texts, prompt by prompt or for many prompts together; what was kept comes from there."""
    plan = first_plan = plan_prompt(request, targets[0], kept, 0)
    if plan.reason:
        say(plan.reason)
    together = plan.name == "ancestral" and len(models) > 1 and models[0].normalised and not request.controls
    progress = request.progress
    if kept is not None and kept.is_spread:
        from structured_voronoi.run.spread import SpreadCheckpoint
        from structured_voronoi.run.spread_texts import spread_texts

        assert isinstance(kept, SpreadCheckpoint)
        progress = False
        stack.enter_context(spread_texts(kept, request, targets, models if together else None, plan))
    if together:
        batches = []
        for batch in draw_for_prompts(models, request.n, request.seed, progress, kept):
            batches.append(batch)
            yield batch
        conclude(closing_line(batches, plan, models[0]))
        return
    for number, (target, model) in enumerate(zip(targets, models, strict=True)):
        if number:
            plan = plan_prompt(request, target, kept, number, first_plan)
        if watcher is not None:
            watcher.planned(target, plan)
        first, batches, label = number * request.n, [], f"prompt {number + 1} of {len(models)}: "
        label = label if len(models) > 1 else ""
        run = TextRun(target, plan, request.seed, request.start, kept, watcher)
        for batch in run.draw(request.n, progress, first, label):
            batches.append(batch)
            yield batch
        conclude(f"{label}{closing_line(batches, plan, model)}")
        for words in closing_warnings(batches, plan):
            conclude(f"{label}warning: {words}.")


def _refuse_growth(request: Request, models: Sequence[LanguageModel], kept: Checkpoint) -> None:
    """More texts than at first can be had for one prompt: of several, those of the second begin at chain ``n``."""
    before = request.n if kept.store.manifest is None else kept.store.manifest.settings.get("n", request.n)
    if len(models) > 1 and request.n > before:
        raise SamplingError(
            f"{kept.store.folder} holds a run of {before} texts for each of {len(models)} prompts; with {request.n} "
            f"each those of all prompts but the first would be others; ask for {before} again, or choose another folder"
        )


def _check_prompts(prompts: Sequence[str] | None) -> None:
    """Refuse prompts that are no texts, or none at all."""
    if prompts is None:
        return
    if isinstance(prompts, str) or not isinstance(prompts, Collection):
        raise SamplingError(f"prompts = {prompts!r} are no list; give a list of texts")
    if not len(prompts):
        raise SamplingError("there are no prompts; give one or more, or leave them out")
    for number, prompt in enumerate(prompts, 1):
        if not isinstance(prompt, str):
            raise SamplingError(f"prompt {number} is {prompt!r} and no text; give texts")


def plan_prompt(
    request: Request,
    target: LanguageModel | Controlled,
    kept: Checkpoint | None,
    number: int,
    first: Plan | None = None,
) -> Plan:
    """How the texts of one prompt are drawn; decided once, as `auto` goes by the time that a pilot takes.

    A lookahead of the plan of the first prompt may serve the others.
    """
    problem = bind(target)

    def make() -> Plan:
        return plan_texts(
            problem,
            request.sampler,
            count=request.n,
            scale=request.scale,
            warmup=request.warmup,
            thin=request.thin,
            start=request.start,
            seed=request.seed,
            progress=request.progress,
            patience=request.patience,
            other=None if first is None else getattr(first.sampler, "lookahead", None),
        )

    return make() if kept is None else kept.plan(f"plan-{number:06}", problem, request.scale, make)


def _described(request: Request, model: LanguageModel) -> dict[str, Any]:
    """Everything that the texts depend on besides the target, as a checkpoint keeps it."""
    from structured_voronoi.run.stored import describe

    how = ("progress", "checkpoint", "resume", "workers", "patience", "control_timeout")
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
