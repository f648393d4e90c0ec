"""The command `svs`, one file per command. They are imported when called, so that `svs --help` starts quickly."""

from __future__ import annotations

import gc
import io
import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import Any

from cyclopts import App, CycloptsError, Parameter, Token

app = App(
    name="svs",
    help="""Exact samples of language models under control.

    Start with `svs sample`, which draws texts from the bundled language model, `svs probability`, which estimates how
    probable controls are, `svs verify`, which checks every sampler against known truth, or `svs reproduce toy`, which
    writes the paper's toy figures into ./results.""",
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(negative=()),
)
train = App(name="train", help="Train models and classifiers.")
models = App(name="models", help="Download pretrained models.")
runs = App(name="runs", help="Inspect checkpoints.")
COMMANDS = (
    (app, "sample", "sample:sample", "Draw texts from a language model, under controls if there are any."),
    (app, "probability", "probability:probability", "Estimate how probable it is that a text satisfies controls."),
    (app, "diagnose", "diagnose:diagnose", "Check a run for convergence and other problems."),
    (app, "serve", "serve:serve", "Serve the web page: trajectories among cells, and texts under control."),
    (app, "verify", "verify:verify", "Check every sampler against targets with known truth."),
    (app, "reproduce", "reproduce:reproduce", "Reproduce a table or figure of the paper, or one of ours."),
    (app, "ls", "ls:ls", "List models, samplers, targets, controls and experiments."),
    (models, "get", "models:get", "Download a pretrained model into the user's cache."),
    (models, "ls", "models:ls", "List the models that can be downloaded."),
    (runs, "check", "runs:check", "Compare every file of a checkpoint with its checksum."),
    (runs, "show", "runs:show", "Show what a checkpoint holds and its progress."),
    (train, "lm", "train:train_lm", "Train a small GPT-2 and its tokenizer."),
    (train, "classifier", "train:train_classifier", "Train a control from labelled texts."),
)
app.command(models)
app.command(runs)
app.command(train)
for parent, name, home, about in COMMANDS:
    parent.command(f"structured_voronoi.cli.{home}", name=name, help=about)


def whole_number(type_: Any, tokens: Sequence[Token]) -> int:
    """The whole number of an option, in digits; 1.5 is not rounded."""
    (token,) = tokens
    if not re.fullmatch(r"[+-]?[0-9](_?[0-9]){0,29}", token.value):
        from structured_voronoi.core.errors import SamplingError

        raise SamplingError(
            f"{token.keyword} {token.value[:40]!r} is not a whole number of at most 30 digits",
            remedy=f"write one, for example {token.keyword} 10",
        )
    return int(token.value)


WHOLE = Parameter(converter=whole_number)
"""For every option that is an int, or an int or None."""


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM: a command ends as on Ctrl-C."""


def run(words: list[str], debug: bool = False) -> int:
    """Run a command: 0 for success, 1 for a failed check, 2 for a mistake in what was asked, 130 on Ctrl-C.

    143 on SIGTERM, if that raises `Terminated`.
    """
    _show_full_help(words)
    try:
        return app(words, exit_on_error=False, print_error=False, result_action="return_value") or 0
    except KeyboardInterrupt as stop:
        print(f"svs: {_parting_words(stop, words)}", file=sys.stderr)
        return 143 if isinstance(stop, Terminated) else 130
    except CycloptsError as error:
        print(f"svs: {' '.join(str(error).split())} See `svs --help`.", file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise
    except Exception as error:
        from structured_voronoi.core.errors import SamplingError

        if debug or not isinstance(error, (SamplingError, OSError, MemoryError)):
            raise
        print(f"svs: {_error_line(error)}", file=sys.stderr)
        return 2


def _error_line(error: Exception) -> str:
    """An error in one line, with the option in place of the Python argument at fault."""
    from structured_voronoi.core.errors import SamplingError

    if not isinstance(error, SamplingError):
        return f"{' '.join(str(error).split()) or type(error).__name__}; free some memory or disk space, or use less"
    names = {"n": "-n", "prompt": "--prompt"}
    option = names.get(error.argument, f"--{error.argument.replace('_', '-')}") if error.argument else ""
    return " ".join(error.written(option).split())


def _parting_words(stop: KeyboardInterrupt, words: list[str]) -> str:
    """What interrupted the command, what is saved, and how to resume."""
    said = ["ended by SIGTERM" if isinstance(stop, Terminated) else "interrupted", *getattr(stop, "__notes__", ())]
    is_kept = any(word.partition("=")[0] == "--checkpoint" for word in words)
    if is_kept or (words[:1] == ["train"] and len(said) > 1):  # a training keeps itself
        missing = ["--resume"] if is_kept and "--resume" not in words else []
        command = shlex.join(["svs", *words, *missing])
        said.append(f"resume with: {command}" if command.isprintable() else "resume with the same command and --resume")
    elif words[:1] in (["sample"], ["probability"], ["reproduce"]):
        said.append("a run with --checkpoint DIR can be resumed")
    return "; ".join(said)


def _show_full_help(words: list[str]) -> None:
    """Show the whole docstring of a command in its help, not the line of the overview."""
    for parent, name, *_ in COMMANDS:
        if words[:-1] == [*([] if parent is app else parent.name), name] and words[-1] in ("--help", "-h"):
            parent[name].help = None


def _end(*_: object) -> None:
    raise Terminated


def main() -> None:
    """Run the command that was typed."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait in vain would slow a busy machine down
    gc.set_threshold(100_000)  # collecting garbage amid the imports of thousands of modules takes a second
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the terminal may lack a letter
    signal.signal(signal.SIGTERM, _end)
    words = [word for word in sys.argv[1:] if word != "--debug"]
    try:
        code = run(words, debug=len(words) < len(sys.argv) - 1)
        gc.freeze()  # what is left need not be collected, which would take a second or two at the exit
        sys.exit(code)
    except BrokenPipeError:  # the reader, `head` for example, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
