"""A worker process of the page: reads jobs from standard input and writes events to standard output, as JSON lines.

A job is {"number", "kind", "form"}; its last line is END. The first line of a worker is END, too, written when all
modules are loaded. {"stop": number} interrupts that job as Ctrl-C would. The process ends when its input ends.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from structured_voronoi.core.errors import SamplingError, one_line
from structured_voronoi.web.forms import ControlForm, Form, Race, TextForm, Trajectories

END = b'{"kind": "end"}\n'
FORMS: dict[str, type[Form]] = {
    "trajectories": Trajectories,
    "race": Race,
    "text": TextForm,
    "check": ControlForm,
}
"""Kinds of jobs and their forms."""


def main() -> None:
    """Run jobs until the input ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell inherit an ignored SIGINT
    _Worker(os.dup(1)).run()


class _Worker:
    def __init__(self, out: int) -> None:
        os.dup2(2, 1)  # libraries that print must not write among the events
        self.out = os.fdopen(out, "wb", buffering=0)
        self.jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.lock, self.current = threading.Lock(), -1

    def run(self) -> None:
        threading.Thread(target=self._read_input, daemon=True).start()
        functions = _load_functions()
        self.out.write(END)
        while True:
            job = self.jobs.get()
            with contextlib.suppress(KeyboardInterrupt):
                with self.lock:
                    self.current = job["number"]
                self._run_job(functions[job["kind"]], FORMS[job["kind"]].model_validate(job["form"]))
                with self.lock:  # a finished job must not be interrupted
                    self.current = -1
            self.current = -1
            self.out.write(b"\n" + END)  # END must not continue an interrupted line

    def _read_input(self) -> None:
        for line in sys.stdin.buffer:
            message = json.loads(line)
            if "stop" not in message:
                self.jobs.put(message)
                continue
            with self.lock:
                if message["stop"] == self.current:
                    _thread.interrupt_main()
        os._exit(0)

    def _run_job(self, function: Callable[..., None], form: Form) -> None:
        try:
            function(form, self._write)
        except SamplingError as error:
            message = one_line(error, longest=2000)
            self._write({"kind": "error", "code": "sampling", "message": message, "field": error.argument})
        except Exception:  # a bug: the traceback goes to the terminal, not to the client
            traceback.print_exc()
            message = "this failed; the terminal of `svs serve` shows why"
            self._write({"kind": "error", "code": "internal", "message": message})

    def _write(self, event: dict[str, Any]) -> None:
        self.out.write(json.dumps(event, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def _load_functions() -> dict[str, Callable[..., None]]:
    """The function of each kind of job; importing them takes seconds."""
    from structured_voronoi.web import playground, text

    return {
        "trajectories": playground.show_trajectories,
        "race": playground.race,
        "text": text.draw_texts,
        "check": text.check_control,
    }


if __name__ == "__main__":
    main()
