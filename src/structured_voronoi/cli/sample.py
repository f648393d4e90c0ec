"""`svs sample`: texts from a language model, under control if asked for."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from structured_voronoi.cli import WHOLE
from structured_voronoi.cli.options import (
    CHECKPOINT_HELP,
    CONTROL_TIMEOUT_HELP,
    ENDS_HELP,
    LENGTH_HELP,
    RESUME_HELP,
    STOP_HELP,
    TOLERANCE_HELP,
    WORKERS_HELP,
    check_resume,
    written_ending,
    written_workers,
)
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.user_code import CONTROL_SECONDS
from structured_voronoi.core.validation import check_seed
from structured_voronoi.engine.plan import DEFAULT_LENGTH, DEFAULT_TOLERANCE
from structured_voronoi.samplers.registry import TEXT_SAMPLERS, TEXT_SCALE, check_sampler_name


def sample(
    *,
    model: Annotated[
        str, Parameter(help="`bundled`, a name of `svs models ls`, a Hugging Face hub name, a folder, or a .gguf file.")
    ] = "bundled",
    prompt: Annotated[str | None, Parameter(help="Text on the left.")] = None,
    prompts: Annotated[
        Path | None,
        Parameter(help="File of prompts: one a line, or a column of a .csv, .tsv or .jsonl file; -n texts for each."),
    ] = None,
    prompt_column: Annotated[str, Parameter(help="The column of the prompts.")] = "prompt",
    chat: Annotated[
        bool,
        Parameter(help="The prompt is said to the model in its chat format, and texts are its answers.", negative=""),
    ] = False,
    system: Annotated[str, Parameter(help="The system message of a chat.")] = "",
    suffix: Annotated[str, Parameter(help="Text on the right: the model fills the gap.")] = "",
    length: Annotated[int, WHOLE, Parameter(help=LENGTH_HELP)] = DEFAULT_LENGTH,
    ends: Annotated[str | None, Parameter(help=ENDS_HELP)] = None,
    stop: Annotated[list[str] | None, Parameter(help=STOP_HELP)] = None,
    n: Annotated[int, WHOLE, Parameter(name="-n", help="Number of texts for each prompt.")] = 8,
    sampler: Annotated[
        str,
        Parameter(
            help=f"One of {', '.join(TEXT_SAMPLERS)}. `auto`: ancestral without controls, adaptive rejection with "
            "bounded ones, svs+refresh otherwise."
        ),
    ] = "auto",
    scale: Annotated[
        float | Literal["auto"],
        Parameter(help="Width of SVS in nearest-neighbour distances; `auto` tunes it on pilot chains."),
    ] = TEXT_SCALE,
    warmup: Annotated[
        int | None,
        WHOLE,
        Parameter(
            help="Steps of each chain before its text, for samplers with chains. Default: none where chains start from "
            "draws of the target, else 100."
        ),
    ] = None,
    thin: Annotated[int, WHOLE, Parameter(help="Further steps to the text.")] = 1,
    start: Annotated[Literal["ancestral", "random"], Parameter(help="Where chains start.")] = "ancestral",
    seed: Annotated[int, WHOLE, Parameter(help="Seed of all random streams.")] = 0,
    control: Annotated[
        list[str] | None,
        Parameter(
            help="What texts must be; repeatable. food=Italian (see `svs ls`), keyword=river, regex=^The, "
            "words=5..12, characters=..80, only=the,pub, "
            "./folder=label, module:function, or `not keyword=river`; a weight may follow: food=Italian@1.5."
        ),
    ] = None,
    out: Annotated[Path | None, Parameter(help="JSONL file, one line a text.")] = None,
    checkpoint: Annotated[Path | None, Parameter(help=CHECKPOINT_HELP)] = None,
    resume: Annotated[bool, Parameter(help=RESUME_HELP, negative="")] = False,
    workers: Annotated[str, Parameter(help=WORKERS_HELP)] = "1",
    device: Annotated[str, Parameter(help="cpu, cuda, …")] = "cpu",
    dtype: Annotated[str, Parameter(help="float32, float64, bfloat16 or float16.")] = "float32",
    tolerance: Annotated[float, Parameter(help=TOLERANCE_HELP)] = DEFAULT_TOLERANCE,
    weighted: Annotated[
        bool,
        Parameter(
            help="All texts that satisfy the controls, with their `log_weight` in --out; -n counts effective texts.",
            negative="",
        ),
    ] = False,
    time_limit: Annotated[float | None, Parameter(help="Stop after this many seconds, with the texts so far.")] = None,
    control_timeout: Annotated[float, Parameter(help=CONTROL_TIMEOUT_HELP)] = CONTROL_SECONDS,
) -> int:
    """Draw texts from a language model, under control if you like; they appear as they come.

    Example: svs sample -n 4 --prompt "Near the old bridge" --control food=Italian --out texts.jsonl
    """
    for name, value, least in (("-n", n, 1), ("--warmup", warmup or 0, 0), ("--thin", thin, 1)):
        if value < least:
            raise SamplingError(f"{name} {value} is too small", remedy=f"use {least} or more")
    check_resume(resume, checkpoint)
    if prompt is not None and prompts is not None:
        raise SamplingError("--prompt and --prompts cannot go together", remedy="put the prompt into the file")
    check_seed(seed)
    check_sampler_name(sampler)
    asked = None if prompt is None else [prompt]
    if prompts is not None:
        from structured_voronoi.cli.prompt_files import read_prompts

        asked = read_prompts(prompts, prompt_column)
    _check_writable(out)

    from structured_voronoi.engine.generation import Request, fulfil, read_controls

    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # a control may print, but not among the texts
        controls = read_controls(control or [], device)
    request = Request(
        model,
        asked,
        controls,
        n,
        length,
        suffix,
        **written_ending(ends, stop, suffix),
        chat=chat,
        system=system,
        sampler=sampler,
        scale=scale,
        warmup=warmup,
        thin=thin,
        start=start,
        seed=seed,
        device=device,
        dtype=dtype,
        checkpoint=checkpoint,
        resume=resume,
        tolerance=tolerance,
        weighted=weighted,
        time_limit=time_limit,
        control_timeout=control_timeout,
        workers=written_workers(workers),
    )

    def say(words: str) -> None:
        print(f"svs: {words}", file=sys.stderr)

    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as stack:
        lines, batches = None, stack.enter_context(contextlib.closing(fulfil(request, say, say)))
        for batch in batches:
            if out is not None:
                from structured_voronoi.storage.store import LineFile

                lines = lines or stack.enter_context(LineFile(out))
                lines.write([json.dumps(text.line(), ensure_ascii=False, allow_nan=False) for text in batch])
            for text in batch:
                print(text.text if prompts is None else f"{text.prompt} →{text.text}", flush=True, file=stdout)
    return 0


def _check_writable(path: Path | None) -> None:
    """Can the file be written? Asked before the long work, which leaves it as it is; a pipe needs a reader."""
    if path is None:
        return
    try:
        path = Path(os.path.realpath(path))  # a link stays what it is
        is_new = not path.exists()
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0), 0o666))
        if is_new:
            path.unlink()
    except (OSError, ValueError) as error:  # a ValueError where the name holds a NUL
        reason = getattr(error, "strerror", None) or error
        raise SamplingError(
            f"--out {str(path)[:200]!r} cannot be written ({reason})", remedy="choose another file"
        ) from error
