"""`svs sample`: texts from a language model, under controls if there are any."""

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
    CHAT_HELP,
    CHECKPOINT_HELP,
    CONTROL_HELP,
    CONTROL_TIMEOUT_HELP,
    DEVICE_HELP,
    DTYPE_HELP,
    FINISH_HELP,
    MAX_TOKENS_HELP,
    MODEL_HELP,
    PROMPT_HELP,
    RESUME_HELP,
    SEED_HELP,
    STOP_HELP,
    TOLERANCE_HELP,
    WORKERS_HELP,
    check_resume,
    read_stops,
    read_workers,
    warning_line,
)
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.samplers.registry import TEXT_SAMPLERS, TEXT_SCALE, check_sampler_name


def sample(
    *,
    model: Annotated[str, Parameter(help=MODEL_HELP)] = "bundled",
    prompt: Annotated[str | None, Parameter(help=PROMPT_HELP)] = None,
    prompts: Annotated[
        Path | None,
        Parameter(help="File of prompts: one per line, or a column of a .csv, .tsv or .jsonl file; -n texts for each."),
    ] = None,
    prompt_column: Annotated[str, Parameter(help="The column of the prompts.")] = "prompt",
    chat: Annotated[bool, Parameter(help=CHAT_HELP, negative="")] = False,
    system: Annotated[str, Parameter(help="The system message of a chat.")] = "",
    suffix: Annotated[str, Parameter(help="Text on the right: the model fills the gap.")] = "",
    max_tokens: Annotated[int, WHOLE, Parameter(help=MAX_TOKENS_HELP)] = 60,
    finish: Annotated[str, Parameter(help=FINISH_HELP)] = "any",
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
    seed: Annotated[int, WHOLE, Parameter(help=SEED_HELP)] = 0,
    control: Annotated[list[str] | None, Parameter(help=CONTROL_HELP)] = None,
    out: Annotated[Path | None, Parameter(help="JSONL file, one line per text.")] = None,
    checkpoint: Annotated[Path | None, Parameter(help=CHECKPOINT_HELP)] = None,
    resume: Annotated[bool, Parameter(help=RESUME_HELP, negative="")] = False,
    workers: Annotated[str, Parameter(help=WORKERS_HELP)] = "1",
    device: Annotated[str, Parameter(help=DEVICE_HELP)] = "cpu",
    dtype: Annotated[str, Parameter(help=DTYPE_HELP)] = "float32",
    tolerance: Annotated[float, Parameter(help=TOLERANCE_HELP)] = 0.003,
    weighted: Annotated[
        bool,
        Parameter(
            help="All texts that satisfy the controls, with their `log_weight` in --out; -n counts effective texts.",
            negative="",
        ),
    ] = False,
    time_limit: Annotated[float | None, Parameter(help="Stop after this many seconds, with the texts so far.")] = None,
    control_timeout: Annotated[float, Parameter(help=CONTROL_TIMEOUT_HELP)] = 60.0,
) -> int:
    """Draw texts from a language model, under controls if there are any; texts appear as they are accepted.

    Example: svs sample -n 4 --prompt "Near the old bridge" --control food=Italian --out texts.jsonl
    """
    check_resume(resume, checkpoint)
    if prompt is not None and prompts is not None:
        raise SamplingError("--prompt and --prompts exclude each other", remedy="put the prompt into the file")
    check_sampler_name(sampler)
    asked = [prompt or ""]
    if prompts is not None:
        from structured_voronoi.cli.prompt_files import read_prompts

        asked = read_prompts(prompts, prompt_column)
    _check_writable(out)

    from structured_voronoi.controls.parsing import parse_control
    from structured_voronoi.engine.generation_run import GenerationRun
    from structured_voronoi.engine.request import Request
    from structured_voronoi.targets.language_model import load

    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as stack:  # a control may print
        request = Request(
            load(model, device=device, dtype=dtype),
            asked,
            [parse_control(written, device) for written in control or []],
            n=n,
            max_tokens=max_tokens,
            finish=finish,  # type: ignore[arg-type]
            stop=read_stops(stop),
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
            workers=read_workers(workers),
        )
        run = GenerationRun(request)
        lines, batches = None, stack.enter_context(contextlib.closing(run.batches()))
        for batch in batches:
            if run.reason:
                print(f"svs: {run.reason}", file=sys.stderr)
                run.reason = ""
            if out is not None:
                from structured_voronoi.storage.files import LineFile

                lines = lines or stack.enter_context(LineFile(out))
                lines.write([json.dumps(text.line(), ensure_ascii=False, allow_nan=False) for text in batch])
            for text in batch:
                print(text.text if prompts is None else f"{text.prompt} →{text.text}", flush=True, file=stdout)
        print(f"svs: {run.status}", file=sys.stderr)
        for warning in run.warnings:
            print(f"svs: warning: {warning_line(warning)}", file=sys.stderr)
    return 0


def _check_writable(path: Path | None) -> None:
    """Raise an error if the file cannot be written, before the long work starts."""
    if path is None:
        return
    try:
        path = Path(os.path.realpath(path))  # a link stays a link
        is_new = not path.exists()
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0), 0o666))
        if is_new:
            path.unlink()
    except (OSError, ValueError) as error:  # a ValueError where the name holds a NUL
        raise SamplingError(
            f"--out {str(path)[:200]!r} cannot be written",
            cause=getattr(error, "strerror", None) or error,
            remedy="choose another file",
        ) from error
