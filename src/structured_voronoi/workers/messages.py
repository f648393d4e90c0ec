"""What the main process and its workers send each other, as bytes.

Workers are sent Python objects, among them the user's, which are pickled. What they answer is data and is not pickled.
"""

from __future__ import annotations

import io
import os
import pickle
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from structured_voronoi.core import errors
from structured_voronoi.core.errors import SamplingError, one_line
from structured_voronoi.storage.packing import pack, unpack

Report = Callable[[Any], None]
"""Sends data to the main process during a task."""
Work = Callable[[Any, Report], Any]
"""(task, report) -> result. The result is data."""
Prepare = Callable[[], Work]
"""Called once in each worker; returns the function that computes tasks."""
PREPARED, REPORTED, FINISHED, FAILED = "prepared", "reported", "finished", "failed"
"""The kinds of answers."""


class Reported(NamedTuple):
    """A worker sent data during its task."""

    worker: int
    message: Any


class Finished(NamedTuple):
    """A worker finished its task."""

    worker: int
    result: Any


class Failed(NamedTuple):
    """A worker's task or preparation raised an error."""

    worker: int
    error: SamplingError
    traceback: str


class Lost(NamedTuple):
    """A worker died during its task."""

    worker: int
    cause: str


Event = Reported | Finished | Failed | Lost


class _Pickler(pickle.Pickler):
    """Pickles objects that have a ``recipe`` as their recipe: a language model is loaded by its name."""

    def reducer_override(self, content: Any) -> Any:
        recipe = getattr(type(content), "recipe", None)
        return NotImplemented if recipe is None else recipe(content)


def to_bytes(content: Any) -> bytes:
    """Objects for a worker. Tensors are copied; a pipe would share their memory, which ends with the process."""
    file = io.BytesIO()
    try:
        _Pickler(file).dump(content)
        return file.getvalue()
    except Exception as error:  # pickle raises many kinds, and objects of users may raise any
        raise SamplingError(
            "the target, the sampler or a control cannot be sent to workers",
            cause=f"{type(error).__name__}: {one_line(error)}",
            remedy="define functions and classes at the top of a module, or use workers=1",
        ) from error


def from_bytes(message: bytes) -> Any:
    """Objects from the main process."""
    try:
        return pickle.loads(message)
    except Exception as error:
        raise SamplingError(
            "a worker cannot load what it was sent",
            cause=f"{type(error).__name__}: {one_line(error)}",
            remedy="put your functions and classes into a module that workers can import, or use workers=1",
        ) from error


def handle_message(work: Work | None, message: bytes, send: Callable[[bytes], None]) -> Work | None:
    """Let a worker handle a message: the first one prepares it, the others are tasks.

    Returns the function that computes tasks; None if the worker is not prepared.
    """

    def answer(kind: str, *content: Any) -> None:
        send(pack_answer((kind, *content)))

    try:
        if work is None:
            work = from_bytes(message)()
            answer(PREPARED)
        else:
            answer(FINISHED, work(from_bytes(message), partial(answer, REPORTED)))
    except SamplingError as error:
        fields = {name: getattr(error, name) for name in ("predicate", "remedy", "cause", "argument")}
        answer(FAILED, type(error).__name__, fields, traceback.format_exc())
    except Exception as error:
        fields = {"predicate": f"{type(error).__name__}: {one_line(error)}"}
        answer(FAILED, "SamplingError", fields, traceback.format_exc())
    return work


def pack_answer(content: Any) -> bytes:
    """A worker's answer as bytes."""
    try:
        return pack(content, name="the answer")
    except SamplingError as error:
        raise SamplingError(
            "a worker's result cannot be sent",
            cause=error.message,
            remedy="return numbers, strings, tensors and arrays, in lists, plain tuples, and dicts with string keys",
        ) from error


def read_answer(worker: int, answer: bytes) -> Event | None:
    """The event that a worker's answer reports; None if the worker is prepared."""
    kind, *content = unpack(answer)
    if kind == PREPARED:
        return None
    if kind == FAILED:
        name, fields, where = content
        return Failed(worker, _error_class(name)(fields.pop("predicate"), **fields), where)
    return Reported(worker, *content) if kind == REPORTED else Finished(worker, *content)


def _error_class(name: str) -> type[SamplingError]:
    """One of our errors by its name; any other is a SamplingError."""
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, SamplingError) else SamplingError


def use_one_thread() -> None:
    """Compute on one thread, or on OMP_NUM_THREADS threads."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def count_cores() -> int:
    """Number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
