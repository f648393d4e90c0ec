"""Options that several commands share: their help, and how their values are read."""

from __future__ import annotations

from typing import Any

from structured_voronoi.core.errors import SamplingError

LENGTH_HELP = "Maximum number of tokens of a text."
ENDS_HELP = (
    "`any`: texts end by themselves or are cut at --max-tokens. `stop`: only texts that end by themselves. `length`: "
    "exactly --max-tokens tokens, without an end."
)
STOP_HELP = "Stop string; repeatable. \\n is a new line, \\t a tab."
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


def written_workers(workers: str) -> int | str:
    """The number of workers, or the address of a cluster."""
    return int(workers) if workers.isdecimal() else workers


def check_resume(resume: bool, checkpoint: object) -> None:
    """Raise an error where there is no folder to resume from."""
    if resume and checkpoint is None:
        raise SamplingError("--resume needs the folder of the run", remedy="add --checkpoint DIR")


def written_ending(ends: str | None, stop: list[str] | None, suffix: str = "") -> dict[str, Any]:
    """Where texts end, as `LanguageModel.load` takes it."""
    return {"ends": ends or ("never" if suffix else "anywhere"), "stop": read_stops(stop)}
