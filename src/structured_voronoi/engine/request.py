"""What `generate`, `stream` and `svs sample` are asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from structured_voronoi.core.contracts import Control, Start
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.user_code import CONTROL_SECONDS
from structured_voronoi.core.validation import (
    check_choice,
    check_count,
    check_memory,
    check_positive,
    check_seed,
    check_tolerance,
)
from structured_voronoi.engine.checkpoint import Checkpoint, CheckpointSettings
from structured_voronoi.engine.plan import DEFAULT_MAX_TOKENS, DEFAULT_TOLERANCE, Plan, plan_texts, total_steps
from structured_voronoi.engine.settings import EngineSettings
from structured_voronoi.engine.texts import LINE_KEYS
from structured_voronoi.problem.problem import bind
from structured_voronoi.samplers.registry import TEXT_SCALE, Scale, check_sampler_name
from structured_voronoi.targets.controlled import ControlledTarget, check_controls
from structured_voronoi.targets.ending import Finish, checked_stops
from structured_voronoi.targets.language_model import Controls, LanguageModel
from structured_voronoi.targets.text import TextTarget


@dataclass(frozen=True)
class Request:
    """Texts for some prompts; the arguments of `generate`."""

    model: LanguageModel
    prompts: Sequence[str] = ("",)
    controls: Controls = ()
    n: int = 8
    max_tokens: int = DEFAULT_MAX_TOKENS
    finish: Finish = "any"
    stop: str | int | Sequence[str | int] = ()
    suffix: str = ""
    chat: bool = False
    system: str = ""
    sampler: str = "auto"
    scale: Scale = TEXT_SCALE
    warmup: int | None = None
    thin: int = 1
    start: Start = None
    seed: int = 0
    tolerance: float = DEFAULT_TOLERANCE
    weighted: bool = False
    time_limit: float | None = None
    control_timeout: float | None = CONTROL_SECONDS
    checkpoint: str | Path | CheckpointSettings | None = None
    resume: bool = True
    workers: int | str = 1
    progress: bool = True
    settings: EngineSettings = field(default_factory=EngineSettings)

    def __post_init__(self) -> None:
        check_count(n=self.n, thin=self.thin, max_tokens=self.max_tokens)
        if self.warmup is not None:
            check_count(0, warmup=self.warmup)
        check_positive(time_limit=self.time_limit, control_timeout=self.control_timeout)
        check_positive(scale=None if self.scale == "auto" else self.scale)
        check_tolerance(self.tolerance)
        check_seed(self.seed)
        check_sampler_name(self.sampler)
        check_choice(Finish, finish=self.finish)
        checked_stops(self.stop)
        _check_prompts(self.prompts)
        _check_names(check_controls(self.controls))
        texts, steps = len(self.prompts) * self.n, total_steps(self.warmup, self.thin)
        check_memory(texts * (2000 + 60 * self.max_tokens), f"{texts} texts")  # bytes per text and token, roughly
        check_memory(5000 * steps, f"the record of {steps} steps")

    def targets(self) -> list[TextTarget | ControlledTarget]:
        """The target of every prompt; the network and the controls are shared."""
        found: list[TextTarget] = []
        finish = "length" if self.suffix and self.finish == "any" else self.finish
        for number, prompt in enumerate(self.prompts):
            try:
                if found:
                    found.append(found[0].with_prompt(prompt))
                    continue
                first = TextTarget(
                    self.model,
                    prompt,
                    self.max_tokens,
                    suffix=self.suffix,
                    finish=finish,
                    stop=self.stop,
                    chat=self.chat,
                    system=self.system,
                )
                found.append(first)
            except SamplingError as error:
                if len(self.prompts) == 1:
                    raise
                raise error.with_message(f"prompt {number + 1}, {prompt[:40]!r}: ") from error
        if not self.controls:
            return list(found)
        return [target.under(self.controls, self.control_timeout) for target in found]

    def plan(self, target: TextTarget | ControlledTarget, checkpoint: Checkpoint, number: int) -> Plan:
        """The plan of the Markov chains of one prompt, made once per run."""
        problem = bind(target)

        def make() -> Plan:
            return plan_texts(
                problem,
                self.sampler,
                scale=self.scale,
                warmup=self.warmup,
                thin=self.thin,
                start=self.start,
                seed=self.seed,
            )

        return checkpoint.plan(f"plan-{number:06}", problem, self.scale, make)

    def description(self) -> dict[str, Any]:
        """Everything that the texts depend on, as a checkpoint stores it."""
        from structured_voronoi.storage.packing import describe

        separate = ("model", "controls", "checkpoint", "resume", "workers", "progress", "time_limit", "control_timeout")
        controls = check_controls(self.controls)
        return {
            "model": self.model.name,
            "controls": {control.name: getattr(control, "weight", 1.0) for control in controls},
            **{name: describe(value) for name, value in vars(self).items() if name not in separate},
        }


def _check_prompts(prompts: Sequence[str]) -> None:
    if isinstance(prompts, str) or not isinstance(prompts, Collection):
        raise SamplingError(f"prompts = {prompts!r} is not a list", remedy="give a list of texts")
    if not len(prompts):
        raise SamplingError("there are no prompts", remedy="give one or more, or leave them out")
    for number, prompt in enumerate(prompts, 1):
        if not isinstance(prompt, str):
            raise SamplingError(f"prompt {number} is {prompt!r}, which is not a text", remedy="give texts")


def _check_names(controls: Sequence[Control]) -> None:
    """Raise an error for a control whose name is another key of a text's line."""
    for control in controls:
        name = getattr(control, "name", None)
        if name in LINE_KEYS:
            raise SamplingError(
                f"a control has the name {name!r}, which is another key of the output", remedy="give it another name"
            )
