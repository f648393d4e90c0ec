"""`svs probability`: how probable it is that a text of a model satisfies controls."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    WORKERS_HELP,
    check_resume,
    read_stops,
    read_workers,
)
from structured_voronoi.core.errors import SamplingError

if TYPE_CHECKING:
    from structured_voronoi.metrics.probability import Probability


def probability(
    *,
    control: Annotated[list[str], Parameter(help=CONTROL_HELP)],
    model: Annotated[str, Parameter(help=MODEL_HELP)] = "bundled",
    prompt: Annotated[str, Parameter(help=PROMPT_HELP)] = "",
    chat: Annotated[bool, Parameter(help=CHAT_HELP, negative="")] = False,
    system: Annotated[str, Parameter(help="The system message of a chat.")] = "",
    max_tokens: Annotated[int, WHOLE, Parameter(help=MAX_TOKENS_HELP)] = 60,
    finish: Annotated[str, Parameter(help=FINISH_HELP)] = "any",
    stop: Annotated[list[str] | None, Parameter(help=STOP_HELP)] = None,
    texts: Annotated[
        int,
        WHOLE,
        Parameter(help="Maximum number of weighted texts; fewer once the relative standard error is below 10 %."),
    ] = 2048,
    seed: Annotated[int, WHOLE, Parameter(help=SEED_HELP)] = 0,
    monte_carlo: Annotated[
        bool,
        Parameter(help="Also draw as many texts of the model itself, and count those that satisfy all.", negative=""),
    ] = False,
    as_json: Annotated[bool, Parameter(name="--json", help="One line of JSON.")] = False,
    checkpoint: Annotated[Path | None, Parameter(help=CHECKPOINT_HELP)] = None,
    resume: Annotated[bool, Parameter(help=RESUME_HELP, negative="")] = False,
    workers: Annotated[str, Parameter(help=WORKERS_HELP)] = "1",
    device: Annotated[str, Parameter(help=DEVICE_HELP)] = "cpu",
    dtype: Annotated[str, Parameter(help=DTYPE_HELP)] = "float32",
    control_timeout: Annotated[float, Parameter(help=CONTROL_TIMEOUT_HELP)] = 60.0,
) -> int:
    """Estimate the probability that a text of a model satisfies the controls, even if it is tiny.

    With `--finish stop` it is the probability given that a text ends within --max-tokens. Texts are drawn from a
    proposal that learns what the controls require, and weighted, so that the estimate is unbiased.

    Example: svs probability --control keyword=Italian --control keyword=river --prompt "Near the"
    """
    if texts < 64:
        raise SamplingError(f"{texts} is too few for an interval", argument="texts", remedy="use 64 or more")
    check_resume(resume, checkpoint)

    from structured_voronoi.controls.parsing import parse_control
    from structured_voronoi.engine.probability import probability as estimate
    from structured_voronoi.targets.language_model import load

    with contextlib.redirect_stdout(sys.stderr):  # a control may print
        found = estimate(
            load(model, device=device, dtype=dtype),
            prompt,
            [parse_control(written, device) for written in control],
            texts=texts,
            max_tokens=max_tokens,
            finish=finish,  # type: ignore[arg-type]
            stop=read_stops(stop),
            chat=chat,
            system=system,
            seed=seed,
            monte_carlo=monte_carlo,
            control_timeout=control_timeout,
            checkpoint=checkpoint,
            resume=resume,
            workers=read_workers(workers),
        )
    if as_json:
        print(json.dumps({**_as_numbers(found), "verdict": found.verdict}, ensure_ascii=False, allow_nan=False))
        return 0
    print(found.verdict)
    print(f"P = {found}")
    print(found.comparison)
    return 0


def _as_numbers(found: Probability) -> dict[str, Any]:
    """Its fields as JSON values: infinities are null."""
    intervals = {"monte_carlo": found.monte_carlo, "ending": found.ending}
    numbers = {**asdict(found), **{name: interval and interval._asdict() for name, interval in intervals.items()}}
    return {key: None if isinstance(value, float) and math.isinf(value) else value for key, value in numbers.items()}
