"""A process that computes for the page: it reads orders from its input, and writes what happens, one JSON line each.

The first line is END, once everything is loaded. An order is {"number", "kind", "form"}, and its last line is END, too.
{"stop": number} interrupts the work on that order as
Ctrl-C would, whatever it is at. When the input ends, so does the process.
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

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.web.forms import ControlForm, Form, Race, TextForm, Trajectories

END = b'{"kind": "end"}\n'
KINDS: dict[str, type[Form]] = {
    "trajectories": Trajectories,
    "race": Race,
    "text": TextForm,
    "check": ControlForm,
}
"""What can be ordered, and on which form."""


def main() -> None:
    """Work until the input ends. Stopping a job interrupts it, also where a script in whose background the server runs
    has had interruptions ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _Worker(os.dup(1)).run()


class _Worker:
    def __init__(self, out: int) -> None:
        os.dup2(2, 1)  # what libraries print goes elsewhere
        self.out = os.fdopen(out, "wb", buffering=0)
        self.orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.lock, self.current = threading.Lock(), -1

    def run(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        makers = _load_makers()
        self.out.write(END)
        while True:
            order = self.orders.get()
            with contextlib.suppress(KeyboardInterrupt):
                with self.lock:
                    self.current = order["number"]
                self._fulfil(makers[order["kind"]], KINDS[order["kind"]].model_validate(order["form"]))
                with self.lock:  # nobody interrupts what is done
                    self.current = -1
            self.current = -1
            self.out.write(b"\n" + END)  # an interrupted line must not swallow it

    def _listen(self) -> None:
        for line in sys.stdin.buffer:
            order = json.loads(line)
            if "stop" not in order:
                self.orders.put(order)
                continue
            with self.lock:
                if order["stop"] == self.current:
                    _thread.interrupt_main()
        os._exit(0)

    def _fulfil(self, make: Callable[..., None], form: Form) -> None:
        try:
            make(form, self._say)
        except SamplingError as error:
            self._say({"kind": "error", "words": " ".join(str(error).split())})
        except Exception:  # a mistake of ours: the person at the terminal sees all of it, the browser nothing
            traceback.print_exc()
            self._say({"kind": "error", "words": "this failed; the terminal in which `svs serve` runs shows why"})

    def _say(self, event: dict[str, Any]) -> None:
        self.out.write(json.dumps(event, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def _load_makers() -> dict[str, Callable[..., None]]:
    """The functions that fulfil orders; importing them takes seconds."""
    from structured_voronoi.web import playground, text

    return {
        "trajectories": playground.show_trajectories,
        "race": playground.race,
        "text": text.draw_texts,
        "check": text.check_control,
    }


if __name__ == "__main__":
    main()
