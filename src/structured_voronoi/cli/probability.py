"""`svs probability`: how probable it is that a model satisfies controls."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from structured_voronoi.errors import SamplingError, check_seed


def probability(
    *,
    control: Annotated[list[str], Parameter(help="What texts must be; repeatable, as for `svs sample`.")],
    model: Annotated[str, Parameter(help="`bundled`, a Hugging Face hub name, a folder, or a .gguf file.")] = "bundled",
    prompt: Annotated[str, Parameter(help="Text on the left.")] = "",
    length: Annotated[int, Parameter(help="Tokens of each text.")] = 20,
    texts: Annotated[int, Parameter(help="Weighted texts; half as many are drawn to learn from.")] = 2048,
    seed: Annotated[int, Parameter(help="Seed of all random streams.")] = 0,
    as_json: Annotated[bool, Parameter(name="--json", help="One line of JSON.")] = False,
    device: Annotated[str, Parameter(help="cpu, cuda, …")] = "cpu",
    dtype: Annotated[str, Parameter(help="float32, float64, bfloat16 or float16.")] = "float32",
) -> int:
    """Estimate the probability that a model's text satisfies the controls, also where it is tiny.

    The texts are drawn by proposals that have learnt what is asked for, and weighed, so that the estimate is unbiased.

    Example: svs probability --control keyword=Italian --control keyword=river --prompt "Near the"
    """
    check_seed(seed)
    if texts < 64:
        raise SamplingError(f"--texts {texts} are too few for an interval; use 64 or more")

    from structured_voronoi.controls.parsing import parse_control
    from structured_voronoi.run.probability import probability as estimate
    from structured_voronoi.targets.controlled import Controlled
    from structured_voronoi.targets.language_model import LanguageModel

    controls = dict(parse_control(written, device) for written in control)
    language_model = LanguageModel.load(model, prompt=prompt, length=length, device=device, dtype=dtype)
    found = estimate(Controlled(language_model, controls), texts=texts, seed=seed)
    if as_json:
        numbers = {key: value if value != float("inf") else None for key, value in asdict(found).items()}
        print(json.dumps({**numbers, "verdict": found.verdict}))
        return 0
    print(f"P = {found.value:.3g} (95 %: {found.low:.3g} – {found.high:.3g})")
    print(found.verdict)
    return 0
