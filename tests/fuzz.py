"""Bad input by the thousand: command lines, files, folders and Python objects that nobody should meet with a traceback.

`python tests/fuzz.py 2500` tries so many and counts what became of them; tests/system/test_hostile.py tries some.
Every input is either accepted, with sizes so small that it is done at once, or refused: with one line, nothing half
written, and in time.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

os.environ["HF_HUB_OFFLINE"] = "1"

import structured_voronoi as sv
from structured_voronoi.cli.prompt_files import read_prompts
from structured_voronoi.controls import BUNDLED_CONTROLS
from structured_voronoi.controls.parsing import parse_control
from structured_voronoi.core.errors import one_line
from structured_voronoi.lookahead.lookahead import untrained
from structured_voronoi.models.corpora import Corpus, labelled_texts, load_corpus
from structured_voronoi.models.loading import BUNDLED, load_model
from structured_voronoi.models.restaurants import descriptions
from structured_voronoi.models.training import TrainingSettings, train_language_model
from structured_voronoi.models.training_run import CHECKPOINT_FOLDER, TrainingCheckpoint
from structured_voronoi.problem.problem import bind
from system.commands import as_if_fresh
from system.gguf_files import write_gguf

Draw = Callable[[st.SearchStrategy[Any]], Any]
Word = Literal["accepted", "refused", "unclear", "traceback", "hang", "half written"]
GOOD = ("accepted", "refused")
MOST_SECONDS, MOST_WAITING = 30.0, 240.0
"""Of computing, and of waiting on a machine where others compute too, before an input counts as a hang."""
MOST_MEMORY = 2 * 2**30
"""Bytes that a damaged file may take, of which a whole one takes a few millions."""
GGUF_HEADER = 24_000
"""Bytes of the header of a GGUF file of the bundled model, roughly."""
CHECKS = list(HealthCheck)
"""Hypothesis's own, which are left out: inputs are few and slow on purpose."""


class Outcome(NamedTuple):
    """What became of an input."""

    case: str
    word: Word
    said: str = ""
    """The error, or where it came from."""

    @property
    def is_good(self) -> bool:
        return self.word in GOOD


class Hang(BaseException):
    """Raised by an alarm."""


class Unclear(Exception):
    """An error was told otherwise than in one line, or with another exit code."""


def judge(case: str, attempt: Callable[[], object], folder: Path | None = None) -> Outcome:
    """Try it; a refusal must leave the folder as it was."""
    before = _contents(folder)
    try:
        with _alarms():
            attempt()
        return Outcome(case, "accepted")
    except sv.SamplingError as error:
        outcome = Outcome(case, "refused", str(error))
    except Unclear as error:
        outcome = Outcome(case, "unclear", str(error))
    except Hang:
        outcome = Outcome(case, "hang")
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {one_line(error)} ({place.filename}, line {place.lineno})"
        outcome = Outcome(case, "traceback", said)
    if outcome.is_good and _contents(folder) != before:
        return Outcome(case, "half written", outcome.said)
    return outcome


def command(words: list[str], folder: Path) -> None:
    """Run a command; a refusal is raised as in Python. Anything but one line for each thing said is unclear."""
    out, err = io.StringIO(), io.StringIO()
    with as_if_fresh(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            from structured_voronoi import cli

            code = cli.run(words)
        except SystemExit as stop:  # --help
            code = int(stop.code or 0)
    lines = err.getvalue().splitlines()
    if code not in (0, 2) or not all(line.startswith("svs: ") for line in lines) or (code == 2 and not lines):
        raise Unclear(f"exit code {code}: {err.getvalue()[:400]!r}")
    if code == 2:
        raise sv.SamplingError(lines[-1])


@contextlib.contextmanager
def _alarms() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    before = [(number, signal.signal(number, stop)) for number in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, MOST_WAITING)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before:
            signal.signal(number, handler)


def _contents(folder: Path | None) -> dict[str, bytes]:
    """Every file in the folder, and what is in it; pipes, folders and what is large are listed by name alone."""
    if folder is None:
        return {}
    small = [path for path in folder.iterdir() if path.is_file() and path.stat().st_size < 2**20]
    return {path.name: b"" for path in folder.iterdir()} | {path.name: path.read_bytes() for path in small}


# Command lines

TINY = {"-n": "1", "--max-tokens": "2", "--finish": "length", "--sampler": "ancestral"}
"""Of `svs sample`: what is accepted is done at once."""
NOT_WHOLE = ["1.5", "0x10", "1e3", "1e12", "nan", "inf", "-", "", " ", "٣", "1,000", "--", "½", "0b1", "1.0", "１"]
ABSURD = [str(10**12), str(2**63), str(2**70), str(10**29), "9" * 400, "-1", "0", "-0", str(-(2**63))]
NOT_REAL = ["1e300", "1e-300", "nan", "inf", "-inf", "-1", "0", "one", "", "0x1p3", "1_0", "1e400"]
STRANGE = [
    "",
    " ",
    "\0",
    "a\0b",
    "\udcff",
    "caf\udce9",
    "[red]",
    "[/]",
    "[/nope]",
    ":smile:",
    "…" * 50,
    "x" * 300,
    "x" * 5000,
    "../" * 200,
    "%s{}{0}",
    "\n",
    "\r\n\t",
    "\u202e",
    "🙂",
    "-",
    "--",
    "~",
    "NUL",
    "e\u0301" * 99,
]
INTEGERS = st.one_of(
    st.sampled_from(NOT_WHOLE + ABSURD),
    st.integers(10**11, 10**60).map(str),
    st.integers(max_value=-1).map(str),
    st.floats(allow_nan=True).map(str).filter(lambda written: not re.fullmatch(r"\d+", written)),
    st.text(max_size=8).filter(lambda written: not re.fullmatch(r"\s*\+?[\d_]+\s*", written)),
)
REALS = st.one_of(st.sampled_from(NOT_REAL), st.text(max_size=6))
TEXTS = st.one_of(st.sampled_from(STRANGE), st.text(max_size=40), st.characters(categories=["Cs"]))
NAMES = st.one_of(TEXTS, st.sampled_from(["bundle", "./nowhere", "/dev/null", "/", ".", "no/such", "a/b/c", "x.gguf"]))
PLACES = [
    "/dev/zero",
    "/dev/full",
    "/dev/stdin/x",
    "pipe",
    "socket",
    "folder",
    "folder/",
    "nowhere/file",
    "file/below",
    "damaged.csv",
    "damaged.jsonl",
    "latin.txt",
    "empty.csv",
    "no-rights",
    "x" * 300,
    "a\0b",
    "\udcff",
    "",
    "/proc/self/mem",
    "huge.csv",
]
CONTROLS = st.one_of(
    st.builds("{}={}".format, st.sampled_from(["food", "keyword", "words", "characters", "only", "./folder"]), TEXTS),
    st.builds("regex={}".format, st.text("ab(|)*+?{}[]^$.\\1,-9:<=!P", min_size=1, max_size=12)),
    st.builds("{}@{}".format, st.sampled_from(["food=Italian", "keyword=a", "not only=a,b"]), REALS),
    st.builds("rules:{}".format, st.sampled_from(["raises", "leaves", "text", "none", "broken", "unnamed", "missing"])),
    st.sampled_from(["damaged:f", ":", "os:", "os:path", "sys:exit", "not", "not not keyword=a", "words=1..2..3"]),
    st.builds("{}:{}".format, st.text(max_size=5), st.text(max_size=5)),
    TEXTS,
)
RULES = """
import sys
def raises(text):
    raise KeyError("no idea")
def leaves(text):
    sys.exit(0)
def text(text):
    return text
def none(text):
    return None
class Broken:
    name = "broken"
    def log_prob(self, tokens, texts):
        return [0.0]
broken = Broken()
class Unnamed:
    def log_prob(self, tokens, texts):
        return tokens[:, 0] * 0.0
unnamed = Unnamed()
"""


@lru_cache
def strange_places() -> Path:
    """A folder with all that should not be given as a file: pipes, sockets, folders, damaged files."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "socket"))
    (folder / "folder").mkdir()
    (folder / "file").write_text("a file\n")
    (folder / "damaged.csv").write_bytes(b'text,label\n"never closed,\xff\xfe\n')
    (folder / "damaged.jsonl").write_text('{"prompt": ' + "[" * 3000 + "\n")
    (folder / "latin.txt").write_bytes("Café\n".encode("latin-1"))
    (folder / "empty.csv").touch()
    (folder / "no-rights").touch(mode=0)
    (folder / "rules.py").write_text(RULES)
    sys.dont_write_bytecode = True  # a __pycache__ beside the rules would look like something half written
    (folder / "damaged.py").write_text("def f(text:\n")
    with (folder / "huge.csv").open("wb") as file:
        file.truncate(5 * 2**30)  # holes, which take no room
    return folder


def fuzz_sample(draw: Draw) -> Outcome:
    options = dict(TINY)
    hostile: dict[str, st.SearchStrategy[str]] = {
        **dict.fromkeys(["-n", "--max-tokens", "--seed", "--warmup", "--thin"], INTEGERS),
        **dict.fromkeys(["--scale", "--tolerance", "--control-timeout"], REALS),
        **dict.fromkeys(["--prompt", "--suffix", "--stop", "--system", "--finish", "--sampler", "--start"], TEXTS),
        **dict.fromkeys(["--model", "--device", "--dtype", "--prompt-column"], NAMES),
        "--device": st.sampled_from(["meta", "cuda", "cuda:99", "xla", "cpu:7", "tpu", "", "vulkan"]),
        "--dtype": st.sampled_from(["int8", "float8", "double", "complex64", "", "float"]),
        "--prompts": st.sampled_from(PLACES),
        "--out": st.sampled_from([*PLACES[:-1], "folder"]),
        "--checkpoint": st.sampled_from([*PLACES, "new/run"]),
        "--workers": st.sampled_from(["0", "-1", "1.5", "rays", "ray://", "ray://nobody:1", "ray:x", "9" * 30, ""]),
        "--control": CONTROLS,
    }
    for name in draw(st.lists(st.sampled_from(sorted(hostile)), min_size=1, max_size=2, unique=True)):
        options[name] = draw(hostile[name])
    if "--control" in options:
        options |= {"--sampler": "rejection", "--time-limit": "5"}
    return run(["sample", *_joined(options)])


def fuzz_other_commands(draw: Draw) -> Outcome:
    """Commands that would work long if they were accepted: each is given something that must be refused."""
    places, refused = st.sampled_from(PLACES[:13]), st.sampled_from(NOT_WHOLE + ABSURD[:5] + ["-1", "-7"])
    kinds: dict[str, Callable[[], list[str]]] = {
        "probability": lambda: ["--control", draw(CONTROLS), f"--texts={draw(refused)}"],
        "verify": lambda: [f"--chains={draw(refused)}"],
        "reproduce": lambda: [draw(st.sampled_from(["toy", "truth", "topic", "all"])), f"--runs={draw(refused)}"],
        "reproduce ": lambda: [draw(NAMES), f"--data={draw(places)}"],
        "train lm": lambda: [f"--data={draw(places)}", "--out=new", f"--epochs={draw(REALS)}"],
        "train classifier": lambda: [f"--data={draw(places)}", "--label", draw(TEXTS), "--out=new"],
        "models get": lambda: [draw(NAMES)],
        "ls": lambda: [draw(TEXTS)],
    }
    kind = draw(st.sampled_from(sorted(kinds)))
    return run([*kind.split(), *kinds[kind]()])


def fuzz_words(draw: Draw) -> Outcome:
    """Words in any order, of which no command is made."""
    known = ["smple", "--help", "-h", "--version", "models", "train", "lm", "-n", "--control", "--no-such", "-x=3"]
    return run(draw(st.lists(st.one_of(st.sampled_from(known), TEXTS), max_size=4)))


def _joined(options: dict[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in options.items()]


def run(words: list[str]) -> Outcome:
    folder = strange_places()
    outcome = judge(" ".join(map(ascii, words)), lambda: command(words, folder), folder)
    if outcome.word == "accepted":  # what it wrote goes, so that the next one finds what was there
        shutil.rmtree(folder)
        strange_places.cache_clear()
    return outcome


# Files and folders


def fuzz_readers(draw: Draw) -> Outcome:
    """Files of prompts and of labelled texts: rows of anything, cut and with bytes of anything."""
    suffix = draw(st.sampled_from([".txt", ".csv", ".tsv", ".jsonl"]))
    rows = draw(st.lists(st.lists(st.text(max_size=12), max_size=4), max_size=6))
    headers = ["prompt,label\n", "text\tlabel\n", "", "ref\n", '{"prompt": "a"}\n', "\ufeffprompt\n"]
    header = draw(st.sampled_from(headers))
    whole = (header + "\n".join(",".join(row) for row in rows)).encode(errors="surrogatepass")
    path = strange_places() / f"read{suffix}"
    path.write_bytes(_damaged(draw, whole))
    reader = draw(st.sampled_from(["prompts", "labelled", "corpus"]))
    read: dict[str, Callable[[], object]] = {
        "prompts": lambda: read_prompts(path),
        "labelled": lambda: labelled_texts(str(path), "text", "label"),
        "corpus": lambda: load_corpus(str(path)),
    }
    return judge(f"{reader} of {path.read_bytes()!r}", read[reader])


def _damaged(draw: Draw, whole: bytes) -> bytes:
    """Bytes with a few changed, or cut, or something put into them."""
    how = draw(st.sampled_from(["flip", "flip", "cut", "insert", "empty"]))
    place = draw(st.integers(0, max(0, len(whole) - 1)))
    if how == "flip" and whole:
        return whole[:place] + bytes([whole[place] ^ (1 << draw(st.integers(0, 7)))]) + whole[place + 1 :]
    if how == "cut":
        return whole[:place]
    return whole[:place] + draw(st.binary(max_size=20)) + whole[place:] if how == "insert" else b""


def _damage_folder(draw: Draw, original: Path, name: str) -> tuple[Path, str]:
    """A copy of a folder in which one file is damaged, gone or a folder, or one number of a config is another."""
    copy = strange_places() / name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(original, copy)
    path = draw(st.sampled_from(sorted(file for file in copy.iterdir() if file.is_file())))
    how = draw(st.sampled_from(["bytes", "bytes", "beginning", "gone", "folder", "value", "value", "value"]))
    if how == "gone" or how == "folder":
        path.unlink()
        if how == "folder":
            path.mkdir()
    elif how == "value" and path.suffix == ".json":
        values = json.loads(path.read_text(encoding="utf-8"))
        key = draw(st.sampled_from(sorted(values)))
        values[key] = draw(st.sampled_from([-1, 0, 5000, 10**10, 1.5, "x", None, [], {}, True, [[1]], -(10**9)]))
        path.write_text(json.dumps(values))
        how = f"{key} = {values[key]}"
    else:
        whole = path.read_bytes()
        size = 200 if how == "beginning" else len(whole)
        path.write_bytes(_damaged(draw, whole[:size]) + whole[size:])
    return copy, f"{name}/{path.name}: {how}"


def fuzz_model_folder(draw: Draw) -> Outcome:
    folder, case = _damage_folder(draw, BUNDLED, "model")

    def use() -> None:
        target = sv.load(str(folder)).target("Near the", max_tokens=2)
        sv.sample(target, sv.Ancestral(), chains=1, draws=1, progress=False)

    return judge(case, use)


SIZES = {
    "tensors": (8, "<Q"),
    "fields": (16, "<Q"),
    "the first name": (24, "<Q"),
    "context": (b"gpt2.context_length", "<I"),
    "width": (b"gpt2.embedding_length", "<I"),
    "layers": (b"gpt2.block_count", "<I"),
    "heads": (b"gpt2.attention.head_count", "<I"),
    "epsilon": (b"gpt2.attention.layer_norm_epsilon", "<I"),
    "first token": (b"tokenizer.ggml.bos_token_id", "<I"),
    "last token": (b"tokenizer.ggml.eos_token_id", "<I"),
    "kind of tokens": (b"tokenizer.ggml.tokens", "<I"),
    "kind of merges": (b"tokenizer.ggml.merges", "<I"),
    "rows of embeddings": (b"token_embd.weight", "<Q"),
    "rows of positions": (b"position_embd.weight", "<Q"),
}
"""Where a GGUF file says how large something is: a place, or the name after which, and the type, it stands."""


def fuzz_gguf(draw: Draw) -> Outcome:
    """GGUF files that are cut off, have a bit flipped in their header or weights, or sizes that no model has."""
    whole, path = _gguf(), strange_places() / "damaged.gguf"
    how = draw(st.sampled_from(["size", "size", "header", "header", "bytes"]))
    if how == "size":
        what = draw(st.sampled_from(sorted(SIZES)))
        place, form = SIZES[what]
        place = place if isinstance(place, int) else whole.index(place) + len(place) + 4
        value = draw(st.sampled_from([0, 1, 7, 9, 5000, 2**31 - 1, 2**32 - 1, 2**40, 2**63, 2**64 - 1]))
        size = struct.calcsize(form)
        damaged, how = (
            whole[:place] + struct.pack(form, value % 2 ** (8 * size)) + whole[place + size :],
            f"{what} {value}",
        )
    else:
        end = len(whole) if how == "bytes" else GGUF_HEADER
        damaged = _damaged(draw, whole[:end]) + whole[end:] if how == "header" else _damaged(draw, whole)
    path.write_bytes(damaged)

    def use() -> None:
        with _memory(MOST_MEMORY):
            target = sv.load(str(path)).target("Near the", max_tokens=2)
            sv.sample(target, sv.Ancestral(), chains=1, draws=1, progress=False)

    return judge(f"GGUF: {how}", use)


@lru_cache
def _gguf() -> bytes:
    path = strange_places() / "whole.gguf"
    write_gguf(path, *load_model("bundled"))
    return path.read_bytes()


@contextlib.contextmanager
def _memory(most: int) -> Iterator[None]:
    """So many bytes more than now; what asks for others meets a MemoryError, and does not take the machine along."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fuzz_classifier_folder(draw: Draw) -> Outcome:
    folder, case = _damage_folder(draw, BUNDLED_CONTROLS / "food", "food")

    def use() -> None:
        target = _model().under([parse_control(f"{folder}=Italian")])
        target.log_prob(torch.ones(1, 2, dtype=torch.int64))

    return judge(case, use)


def fuzz_lookahead_folder(draw: Draw) -> Outcome:
    target = _controlled()
    original = strange_places() / "lookahead-original"
    if not original.exists():
        untrained(bind(target), {"keyword=a": "token"}, seed=0).save(original)
    folder, case = _damage_folder(draw, original, "lookahead")
    return judge(case, lambda: sv.Lookahead.load(folder, target))


def fuzz_training_checkpoint(draw: Draw) -> Outcome:
    """A training that was stopped, whose checkpoint is damaged."""
    texts = [one.text for one in descriptions(24, seed=0)]
    recipe, original = (
        TrainingSettings(vocabulary=280, width=8, layers=1, heads=1, context=16, batch_size=12),
        _stopped_training(),
    )
    folder, case = _damage_folder(draw, original / CHECKPOINT_FOLDER, "training")
    place = folder.parent / "training-out"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    shutil.copytree(folder, place / CHECKPOINT_FOLDER)
    return judge(case, lambda: train_language_model(Corpus(texts, texts[:2]), place, recipe, lambda note, steps: None))


@lru_cache
def _stopped_training() -> Path:
    texts = [one.text for one in descriptions(24, seed=0)]
    recipe = TrainingSettings(vocabulary=280, width=8, layers=1, heads=1, context=16, batch_size=12)
    place = strange_places() / "training-original"

    def stop(note: str, steps: int) -> None:
        if any((place / CHECKPOINT_FOLDER).glob("state-*.safetensors")):
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        train_language_model(Corpus(texts, texts[:2]), place, recipe, stop, checkpoint=TrainingCheckpoint(steps=1))
    return place


# Python objects


@lru_cache
def _model() -> sv.TextTarget:
    return sv.TextTarget(sv.load("bundled"), max_tokens=2)


@lru_cache
def _controlled() -> sv.ControlledTarget:
    return _model().under([sv.keyword("a")])


ANSWERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a list": lambda tokens: [0.0] * len(tokens),
    "nothing": lambda tokens: None,
    "a number": lambda tokens: 0.0,
    "too few": lambda tokens: torch.zeros(1)[1:],
    "too many": lambda tokens: torch.zeros(len(tokens), 2),
    "graph": lambda tokens: torch.zeros(len(tokens), requires_grad=True) * 2,
    "NaN": lambda tokens: torch.full((len(tokens),), math.nan),
    "-inf": lambda tokens: torch.full((len(tokens),), -math.inf),
    "inf": lambda tokens: torch.full((len(tokens),), math.inf),
    "huge": lambda tokens: torch.full((len(tokens),), 1e300, dtype=torch.float64),
    "complex": lambda tokens: torch.zeros(len(tokens), dtype=torch.complex64),
    "bool": lambda tokens: torch.ones(len(tokens), dtype=torch.bool),
    "meta": lambda tokens: torch.zeros(len(tokens), device="meta"),
    "text": lambda tokens: "x",
    "good": lambda tokens: torch.zeros(len(tokens)),
}
RAISED: list[BaseException] = [ValueError("no\nidea"), SystemExit(0), RecursionError(), MemoryError(), StopIteration()]


@dataclass(eq=False)
class Hostile:
    """A control of which one thing is wrong."""

    name: Any = "hostile"
    answer: str = "good"
    raised: BaseException | None = None
    bound: Any = 0.0
    weight: Any = 1.0

    def log_prob(self, tokens: torch.Tensor, texts: list[str]) -> Any:
        if self.raised is not None:
            raise self.raised
        return ANSWERS[self.answer](tokens)


def fuzz_control(draw: Draw) -> Outcome:
    """Controls of a user's own, under samplers that ask them in different ways."""
    wrong = draw(st.sampled_from(["name", "answer", "answer", "answer", "raised", "bound", "weight"]))
    values: dict[str, st.SearchStrategy[Any]] = {
        "name": st.sampled_from([None, "", 3, "text", "energy", "[/]", "x" * 9999, "a\nb", "\udcff", b"x", []]),
        "answer": st.sampled_from(sorted(ANSWERS)),
        "raised": st.sampled_from(RAISED),
        "bound": st.sampled_from([math.nan, math.inf, -5.0, "x", None, 1e308, [1]]),
        "weight": st.sampled_from([math.nan, math.inf, -1.0, "x", None, True, 1e308, 0.0]),
    }
    value = draw(values[wrong])
    control = Hostile() if wrong == "weight" else Hostile(**{wrong: value})
    samplers = ["rejection"] if value in ("NaN", "-inf", "inf") else ["rejection", "svs", "refresh", "pncg"]
    sampler = draw(st.sampled_from(samplers))  # without a text that fits, only rejection gives up soon
    if wrong == "weight":
        control.weight = value
    settings = {
        "max_tokens": 2,
        "finish": "length",
        "sampler": sampler,
        "warmup": 1,
        "time_limit": 5.0,
        "progress": False,
    }

    def use() -> None:
        found = sv.generate(_model().model, controls=[control], n=1, **settings)
        json.dumps([text.line() for text in found.draws], allow_nan=False)

    return judge(f"a control whose {wrong} is {value!r}, by {sampler}", use)


def fuzz_predicate(draw: Draw) -> Outcome:
    """Regular expressions of every kind, and texts on which others would take for ever."""
    parts = ["a", "b", ".", "(a|b)*", "(a+)+", "(.*)*", "a{0,900}", "(?:a|ab)(?:c|bcd)*", r"\w+", "^", "$", r"\b", "["]
    pieces = draw(st.lists(st.one_of(st.sampled_from(parts), st.text(max_size=3)), min_size=1, max_size=8))
    repeats = draw(st.sampled_from([1, 1, 1, 30, 3000]))
    pattern = "".join(pieces) * repeats if draw(st.booleans()) else "(" * repeats + "".join(pieces) + ")" * repeats

    def use() -> None:
        control = sv.regex(pattern)
        control.log_prob(torch.zeros(2, 1), ["a" * 200 + "!", "ab" * 100])

    return judge(f"regex {pattern[:80]!r} × {repeats}", use)


ANYTHING = [
    None,
    -1,
    0,
    1.5,
    "x",
    "\udcff",
    [],
    {},
    math.nan,
    math.inf,
    10**30,
    True,
    b"x",
    object(),
    [None],
    "a" * 999,
]


def _anything(draw: Draw, names: str) -> dict[str, Any]:
    """One or two settings of any type."""
    chosen = draw(st.lists(st.sampled_from(names.split()), min_size=1, max_size=2, unique=True))
    return {name: draw(st.sampled_from(ANYTHING)) for name in chosen}


def fuzz_settings(draw: Draw) -> Outcome:
    """Settings of the Python interface of any type."""
    wrong = _anything(draw, "chains draws warmup thin seed start")
    target = sv.TabularTarget(torch.eye(3), torch.zeros(3, 3))
    given = {"chains": 1, "draws": 1, "warmup": 0, "progress": False} | wrong
    return judge(f"sample with {wrong}", lambda: sv.sample(target, sv.PNCG(step_size=1.0), **given))


def fuzz_generate(draw: Draw) -> Outcome:
    """Settings of `generate` of any type."""
    names = "prompt controls n max_tokens finish stop sampler scale warmup thin start seed chat system suffix"
    wrong = _anything(draw, f"{names} control_timeout tolerance time_limit weighted")
    tiny = {"n": 1, "max_tokens": 2, "finish": "length", "sampler": "ancestral", "warmup": 0, "progress": False}
    return judge(f"generate with {wrong}", lambda: sv.generate(_model().model, **(tiny | wrong)))


GROUPS: dict[str, tuple[Callable[[Draw], Outcome], float]] = {
    "svs sample": (fuzz_sample, 0.24),
    "other commands": (fuzz_other_commands, 0.1),
    "words": (fuzz_words, 0.05),
    "readers": (fuzz_readers, 0.15),
    "model folders": (fuzz_model_folder, 0.06),
    "GGUF files": (fuzz_gguf, 0.06),
    "classifier folders": (fuzz_classifier_folder, 0.06),
    "lookahead folders": (fuzz_lookahead_folder, 0.04),
    "training checkpoints": (fuzz_training_checkpoint, 0.04),
    "controls": (fuzz_control, 0.08),
    "regular expressions": (fuzz_predicate, 0.04),
    "sample()": (fuzz_settings, 0.04),
    "generate()": (fuzz_generate, 0.04),
}
"""What is tried, and its share of all inputs."""


def tries(group: str, count: int, number: int = 0) -> list[Outcome]:
    """So many inputs of a group."""
    outcomes: list[Outcome] = []

    @seed(number)
    @settings(max_examples=count, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=CHECKS)
    @given(st.data())
    def collect(data: st.DataObject) -> None:
        outcomes.append(GROUPS[group][0](data.draw))

    collect()
    return outcomes


def main(count: int) -> int:
    """Try so many inputs in all and print what became of them; 1 if one of them was neither accepted nor refused."""
    bad = 0
    in_all: Counter[str] = Counter()
    for group, (_, share) in GROUPS.items():
        began = time.process_time()
        outcomes = tries(group, max(1, math.ceil(share * count)), number=12)
        counts = Counter(outcome.word for outcome in outcomes)
        in_all += counts
        print(f"{group:<22} {dict(counts)} in {time.process_time() - began:.0f} s of computing", flush=True)
        for outcome in outcomes:
            if not outcome.is_good:
                bad += 1
                print(f"    {outcome.word}: {outcome.case[:200]}\n        {outcome.said[:300]}", flush=True)
    print(f"tried {in_all.total()}: {dict(in_all)}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 2500))
