"""`svs probability`: how probable it is that a model satisfies controls."""

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
    CHECKPOINT_HELP,
    CONTROL_TIMEOUT_HELP,
    ENDS_HELP,
    LENGTH_HELP,
    RESUME_HELP,
    STOP_HELP,
    WORKERS_HELP,
    check_resume,
    written_ending,
    written_workers,
)
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.user_code import CONTROL_SECONDS
from structured_voronoi.core.validation import check_count, check_positive, check_seed
from structured_voronoi.engine.plan import DEFAULT_LENGTH

if TYPE_CHECKING:
    from structured_voronoi.metrics.probability import Probability


def probability(
    *,
    control: Annotated[list[str], Parameter(help="What texts must be; repeatable, as for `svs sample`.")],
    model: Annotated[
        str, Parameter(help="`bundled`, a name of `svs models ls`, a Hugging Face hub name, a folder, or a .gguf file.")
    ] = "bundled",
    prompt: Annotated[str, Parameter(help="Text on the left.")] = "",
    length: Annotated[int, WHOLE, Parameter(help=LENGTH_HELP)] = DEFAULT_LENGTH,
    ends: Annotated[str | None, Parameter(help=ENDS_HELP)] = None,
    stop: Annotated[list[str] | None, Parameter(help=STOP_HELP)] = None,
    texts: Annotated[
        int, WHOLE, Parameter(help="Number of weighted texts; a few hundred more are drawn to learn from.")
    ] = 2048,
    seed: Annotated[int, WHOLE, Parameter(help="Seed of all random streams.")] = 0,
    monte_carlo: Annotated[
        bool, Parameter(help="Also draw as many texts of the model itself, and count those that fit.", negative="")
    ] = False,
    as_json: Annotated[bool, Parameter(name="--json", help="One line of JSON.")] = False,
    checkpoint: Annotated[Path | None, Parameter(help=CHECKPOINT_HELP)] = None,
    resume: Annotated[bool, Parameter(help=RESUME_HELP, negative="")] = False,
    workers: Annotated[str, Parameter(help=WORKERS_HELP)] = "1",
    device: Annotated[str, Parameter(help="cpu, cuda, …")] = "cpu",
    dtype: Annotated[str, Parameter(help="float32, float64, bfloat16 or float16.")] = "float32",
    control_timeout: Annotated[float, Parameter(help=CONTROL_TIMEOUT_HELP)] = CONTROL_SECONDS,
) -> int:
    """Estimate the probability that a model's text satisfies the controls, also where it is tiny.

    Where texts end anywhere, it is that of the controls given that a text ends within --length.

    The texts are drawn from a proposal that has learnt what the controls require, and weighted, so that the estimate is
    unbiased.

    Example: svs probability --control keyword=Italian --control keyword=river --prompt "Near the"
    """
    check_seed(seed)
    if texts < 64:
        raise SamplingError(f"--texts {texts} are too few for an interval", remedy="use 64 or more")
    check_resume(resume, checkpoint)
    check_count(texts=texts)
    check_positive(control_timeout=control_timeout)

    from structured_voronoi.engine.probability import estimate, open_kept

    kept_in = open_kept(checkpoint, resume, written_workers(workers))
    with contextlib.redirect_stdout(sys.stderr), kept_in as kept:  # a control may print, but not into the result
        from structured_voronoi.engine.generation import read_controls
        from structured_voronoi.targets.controlled import Controlled
        from structured_voronoi.targets.language_model import LanguageModel

        controls = read_controls(control, device)
        language_model = LanguageModel.load(
            model, prompt=prompt, length=length, **written_ending(ends, stop), device=device, dtype=dtype
        )
        target = Controlled(language_model, controls, control_timeout)
        found = estimate(target, texts, seed, None, progress=True, monte_carlo=monte_carlo, kept=kept)
    if as_json:
        print(json.dumps({**_as_numbers(found), "verdict": found.verdict}, ensure_ascii=False, allow_nan=False))
        return 0
    print(found.verdict)
    print(f"P = {found}")
    print(found.comparison)
    return 0


def _as_numbers(found: Probability) -> dict[str, Any]:
    """Its fields as JSON has them: infinities are null."""
    intervals = {"monte_carlo": found.monte_carlo, "ending": found.ending}
    numbers = {**asdict(found), **{name: interval and interval._asdict() for name, interval in intervals.items()}}
    return {key: None if isinstance(value, float) and math.isinf(value) else value for key, value in numbers.items()}
