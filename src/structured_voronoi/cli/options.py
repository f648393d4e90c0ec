"""Options that several commands share: their help, and how their values are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from structured_voronoi.core.errors import SamplingError

if TYPE_CHECKING:
    from structured_voronoi.diagnostics.checks import DiagnosticWarning

MODEL_HELP = "`bundled`, a name of `svs models ls`, a Hugging Face hub name, a folder, or a .gguf file."
PROMPT_HELP = "Text on the left."
CHAT_HELP = "The prompt is a user's message in the model's chat format, and texts are answers."
MAX_TOKENS_HELP = "Maximum number of tokens of a text."
FINISH_HELP = (
    "`any`: texts end by themselves or are cut at --max-tokens. `stop`: only texts that end by themselves. `length`: "
    "exactly --max-tokens tokens, without an end; the default with a suffix."
)
STOP_HELP = "Stop string; repeatable. \\n is a new line, \\t a tab."
CONTROL_HELP = (
    "What texts must satisfy; repeatable. food=Italian (`svs ls` lists labels), keyword=river, regex=^The, "
    "words=5..12, characters=..80, only=the,pub, ./folder=label, module:function, or `not keyword=river`. A weight may "
    "follow: food=Italian@1.5."
)
SEED_HELP = "Seed of all random streams."
DEVICE_HELP = "cpu, cuda, …"
DTYPE_HELP = "float32, float64, bfloat16 or float16."
CHECKPOINT_HELP = "Checkpoint folder; an interrupted run resumes from it."
RESUME_HELP = "Resume the run in --checkpoint, or start it if there is none."
CONTROL_TIMEOUT_HELP = "Maximum number of seconds for one call of a control."
WORKERS_HELP = (
    "Number of worker processes, or a Ray cluster: `ray` on this machine, `ray:NUMBER` for that many workers there, "
    "`ray://HOST:PORT` for another one. Texts do not depend on it."
)
TOLERANCE_HELP = (
    "Largest distance (total variation) from the exact distribution, at least 0 and below 0.5; 0 is exact and slow."
)


def read_stops(stop: list[str] | None) -> tuple[str, ...]:
    """Stop strings with their escapes replaced."""
    return tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in stop or ())


def read_workers(workers: str) -> int | str:
    """The number of workers, or the address of a cluster."""
    return int(workers) if workers.isdecimal() else workers


def check_resume(resume: bool, checkpoint: object) -> None:
    """Raise an error where there is no folder to resume from."""
    if resume and checkpoint is None:
        raise SamplingError("--resume needs the folder of the run", remedy="add --checkpoint DIR")


def warning_line(warning: DiagnosticWarning) -> str:
    """A warning whose remedy names options."""
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in warning.arguments.items())
    remedy = f"use {options}" if options else warning.remedy
    return f"{warning.message}; {remedy}" if remedy else warning.message
