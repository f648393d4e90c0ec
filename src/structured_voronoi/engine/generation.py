"""Texts from a language model, under controls if there are any: `generate` and `stream`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from structured_voronoi.core.contracts import Start
from structured_voronoi.core.user_code import CONTROL_SECONDS
from structured_voronoi.engine.checkpoint import CheckpointSettings
from structured_voronoi.engine.generation_run import GenerationRun
from structured_voronoi.engine.plan import DEFAULT_MAX_TOKENS, DEFAULT_TOLERANCE
from structured_voronoi.engine.request import Request
from structured_voronoi.engine.result import Generation
from structured_voronoi.engine.settings import EngineSettings
from structured_voronoi.engine.texts import Text
from structured_voronoi.samplers.registry import TEXT_SCALE, Scale
from structured_voronoi.targets.ending import Finish
from structured_voronoi.targets.language_model import Controls, LanguageModel, as_model


def generate(
    model: str | LanguageModel = "bundled",
    prompt: str | Sequence[str] | None = None,
    controls: Controls = (),
    *,
    n: int = 8,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    finish: Finish = "any",
    stop: str | int | Sequence[str | int] = (),
    suffix: str = "",
    chat: bool = False,
    system: str = "",
    sampler: str = "auto",
    scale: Scale = TEXT_SCALE,
    warmup: int | None = None,
    thin: int = 1,
    start: Start = None,
    seed: int = 0,
    tolerance: float = DEFAULT_TOLERANCE,
    weighted: bool = False,
    time_limit: float | None = None,
    control_timeout: float | None = CONTROL_SECONDS,
    checkpoint: str | Path | CheckpointSettings | None = None,
    resume: bool = True,
    workers: int | str = 1,
    progress: bool = True,
    settings: EngineSettings | None = None,
) -> Generation:
    """Draw texts that satisfy controls, distributed as the model's texts that do.

    Parameters
    ----------
    model
        A name for `load`, or a model.
    prompt
        Text on the left, or a list of them; ``n`` texts are drawn for each.
    controls
        What texts must satisfy, all of it: ``sv.keyword("river")``, ``~sv.keyword("pub")``, ``sv.words(8, 20)``,
        ``sv.label("food", "Italian")``, functions of the text, and others.
    n
        Number of texts for each prompt; of effective texts if ``weighted``.
    max_tokens, finish, stop, suffix, chat, system
        What texts are like; see `LanguageModel.target`. With a suffix, ``finish`` is "length".
    sampler
        A name of `svs ls`. "auto" is "ancestral" without controls, "adaptive" with bounded controls, and
        "svs+refresh" otherwise.
    scale, warmup, thin, start
        Settings of samplers with Markov chains: the scale of SVS, steps before the text, further steps, and the
        start ("ancestral", "random" or tokens).
    seed
        Text t of prompt j depends on (seed, j, t) and the model alone.
    tolerance
        Bound on the total variation distance between texts under control and their exact distribution. 0 is exact,
        and slow for rare controls.
    weighted
        Return all texts that satisfy the controls, with their ``log_weight``.
    time_limit
        Stop after this many seconds with the texts so far.
    control_timeout
        Maximum number of seconds for one call of a control.
    checkpoint, resume
        Folder of the run; the same call resumes it. Without ``resume`` a folder that holds a run is refused.
    workers
        Number of worker processes, or a Ray cluster ("ray", "ray://HOST:PORT"). Texts do not depend on it.
    progress
        Show progress on a terminal.
    settings
        Settings of the engine.

    Returns
    -------
    Generation
        The texts, P(controls), an error bound and diagnostics.

    Raises
    ------
    SamplingError
        If an argument is wrong, or if no text satisfies the controls.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> result = sv.generate("bundled", "Near the", [sv.keyword("river")], n=2, max_tokens=30, progress=False)
    >>> all("river" in text.lower() for text in result)
    True
    """
    request = Request(
        as_model(model),
        _as_prompts(prompt),
        controls,
        n=n,
        max_tokens=max_tokens,
        finish=finish,
        stop=stop,
        suffix=suffix,
        chat=chat,
        system=system,
        sampler=sampler,
        scale=scale,
        warmup=warmup,
        thin=thin,
        start=start,
        seed=seed,
        tolerance=tolerance,
        weighted=weighted,
        time_limit=time_limit,
        control_timeout=control_timeout,
        checkpoint=checkpoint,
        resume=resume,
        workers=workers,
        progress=progress,
        settings=settings or EngineSettings(),
    )
    run = GenerationRun(request)
    with contextlib.closing(run.batches()) as batches:
        draws = [text for batch in batches for text in batch]
    draws.sort(key=lambda text: (text.prompt_number, text.index))
    return Generation(draws, run.diagnosis(), run.probability, run.error_bound, run.evaluations)


def stream(
    model: str | LanguageModel = "bundled",
    prompt: str | Sequence[str] | None = None,
    controls: Controls = (),
    *,
    n: int = 8,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    finish: Finish = "any",
    stop: str | int | Sequence[str | int] = (),
    suffix: str = "",
    chat: bool = False,
    system: str = "",
    sampler: str = "auto",
    seed: int = 0,
    tolerance: float = DEFAULT_TOLERANCE,
    time_limit: float | None = None,
    control_timeout: float | None = CONTROL_SECONDS,
    settings: EngineSettings | None = None,
) -> Iterator[Text]:
    """Yield the texts of `generate` as they are accepted.

    Parameters
    ----------
    model, prompt, controls, n, max_tokens, finish, stop, suffix, chat, system, sampler, seed, tolerance, time_limit,
    control_timeout, settings
        As for `generate`.

    Yields
    ------
    Text
        ``str(text)`` is the text; it also has the prompt, tokens, log-probabilities and controls.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> first = next(sv.stream("bundled", "Near the", [sv.keyword("river")], n=2, max_tokens=30))
    >>> "river" in str(first).lower()
    True
    """
    request = Request(
        as_model(model),
        _as_prompts(prompt),
        controls,
        n=n,
        max_tokens=max_tokens,
        finish=finish,
        stop=stop,
        suffix=suffix,
        chat=chat,
        system=system,
        sampler=sampler,
        seed=seed,
        tolerance=tolerance,
        time_limit=time_limit,
        control_timeout=control_timeout,
        progress=False,
        settings=settings or EngineSettings(),
    )
    with contextlib.closing(GenerationRun(request).batches()) as batches:
        for batch in batches:
            yield from batch


def _as_prompts(prompt: str | Sequence[str] | None) -> Sequence[str]:
    return [prompt or ""] if prompt is None or isinstance(prompt, str) else prompt
