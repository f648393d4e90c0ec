"""The command `svs`, one file a command. They are imported when called, so that `svs --help` answers at once."""

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
    help="""Draw samples under control, and prove that they follow the distribution they should.

    Start with `svs sample`, which draws texts from the bundled language model, `svs verify`, which checks every sampler
    against known truth, or `svs reproduce toy`, which draws the paper's toy figures into ./results.""",
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(negative=()),
)
train = App(name="train", help="Train models of your own.")
models = App(name="models", help="Fetch pretrained models, once.")
runs = App(name="runs", help="Look at runs that were kept with --checkpoint.")
COMMANDS = (
    (app, "sample", "sample:sample", "Draw texts from a language model, under control if you like."),
    (app, "probability", "probability:probability", "Estimate how probable it is that a model satisfies controls."),
    (app, "diagnose", "diagnose:diagnose", "Say whether a run can be trusted, from what it wrote."),
    (app, "serve", "serve:serve", "Show the page: trajectories among cells, and texts under control by clicking."),
    (app, "verify", "verify:verify", "Check every sampler against targets whose truth is known."),
    (app, "reproduce", "reproduce:reproduce", "Reproduce a table or figure of the paper, or one of ours."),
    (app, "ls", "ls:ls", "List models, samplers, targets, controls and experiments."),
    (models, "get", "models:get", "Fetch a pretrained model into the user's cache."),
    (models, "ls", "models:ls", "List the models that can be fetched, and where they are."),
    (runs, "check", "runs:check", "Compare every file of a run with its checksum."),
    (runs, "show", "runs:show", "Say what a run is and how far it has come."),
    (train, "lm", "train:train_lm", "Train a small GPT-2 with a tokenizer of its own."),
    (train, "classifier", "train:train_classifier", "Train a control from labelled texts of your own."),
)
app.command(models)
app.command(runs)
app.command(train)
for parent, name, home, about in COMMANDS:
    parent.command(f"structured_voronoi.cli.{home}", name=name, help=about)


def whole_number(type_: Any, tokens: Sequence[Token]) -> int:
    """The whole number that an option was given in digits: to round 1.5 is to do what nobody asked for."""
    (token,) = tokens
    if not re.fullmatch(r"[+-]?[0-9](_?[0-9]){0,29}", token.value):
        from structured_voronoi.core.errors import SamplingError

        raise SamplingError(
            f"{token.keyword} {token.value[:40]!r} is not a whole number of at most 30 digits",
            remedy=f"write one, for example {token.keyword} 10",
        )
    return int(token.value)


WHOLE = Parameter(converter=whole_number)
"""Belongs to every option that is an int, or an int or nothing."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, on which a command ends as it does on Ctrl-C."""


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
    """What ended the command, what there is of it, as it has noted, and how to go on."""
    said = ["ended by SIGTERM" if isinstance(stop, Terminated) else "interrupted", *getattr(stop, "__notes__", ())]
    is_kept = any(word.partition("=")[0] == "--checkpoint" for word in words)
    if is_kept or (words[:1] == ["train"] and len(said) > 1):  # a training keeps itself
        missing = ["--resume"] if is_kept and "--resume" not in words else []
        command = shlex.join(["svs", *words, *missing])
        said.append(f"go on with: {command}" if command.isprintable() else "go on with the same command and --resume")
    elif words[:1] in (["sample"], ["probability"], ["reproduce"]):
        said.append("with --checkpoint DIR it could be resumed")
    return "; ".join(said)


def _show_full_help(words: list[str]) -> None:
    """A command that is asked for help shows its whole docstring, not the line of the overview."""
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
