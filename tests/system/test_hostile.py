"""Bad input is refused with one line that names value, cause and remedy; nothing hangs, and nothing is half written.

Cases that were seen are in the tables; tests/fuzz.py makes up others, of which some are tried here.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import torch

import fuzz
import structured_voronoi as sv
from helpers import SVS
from structured_voronoi import cli
from structured_voronoi.cli import WHOLE
from structured_voronoi.controls.predicate import Predicate
from structured_voronoi.core.user_code import user_code
from structured_voronoi.engine.settings import EngineSettings
from structured_voronoi.models.classifiers import Light, save_classifier
from structured_voronoi.problem import starts
from system.commands import svs

TINY = ("sample", "-n", "1", "--max-tokens", "2", "--finish", "length")
CONTROLLED = (*TINY, "--sampler", "rejection", "--control")
RULES = """
import sys, time
from dataclasses import dataclass

import torch


def never(text):
    return False


def raises(text):
    words = {}
    return words[text]


def leaves(text):
    sys.exit(0)


def hangs(text):
    while True:
        time.sleep(0.01)


def prints(text):
    print("a word of the control")
    return True


def text(text):
    return text


@dataclass
class Unhashable:
    name: str = "unhashable"

    def log_prob(self, tokens, texts):
        return torch.zeros(len(texts))


class Huge:
    name, bound = "huge", 2000.0

    def log_prob(self, tokens, texts):
        return torch.full((len(texts),), 2000.0, requires_grad=True)


class Misnamed:
    name = "text"

    def log_prob(self, tokens, texts):
        return torch.zeros(len(texts))


unhashable, huge, misnamed = Unhashable(), Huge(), Misnamed()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rules.py").write_text(RULES)
    return tmp_path


def test_every_whole_number_of_every_command_is_read_in_digits() -> None:
    found = 0
    for *_, home, _ in cli.COMMANDS:
        module, name = home.split(":")
        function = getattr(import_module(f"structured_voronoi.cli.{module}"), name)
        hints = get_type_hints(function, include_extras=True)
        for option in inspect.signature(function).parameters:
            parts = get_args(hints[option]) if get_origin(hints[option]) is Annotated else (hints[option],)
            if parts[0] is int or int in get_args(parts[0]):
                assert WHOLE in parts, f"{name}: {option}"
                found += 1
    assert found == 17


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sample", "-n", "1.5"], "-n '1.5' is not a whole number of at most 30 digits; write one, for example -n 10"),
        (["sample", "--max-tokens", "0x10"], "--max-tokens '0x10' is not a whole number"),
        (["sample", "--warmup", "1e3"], "--warmup '1e3' is not a whole number"),
        (["sample", "--seed", str(2**70)], "has more than 63 bits; use a number below 2**63"),
        (["sample", "-n", str(10**12)], "-n 1000000000000 is more than 1,000,000,000; choose a smaller number"),
        (["sample", "-n", str(10**9)], "1000000000 texts would take about"),
        (["sample", "--warmup", str(10**9)], "the record of 1000000001 steps would take about"),
        (["sample", "--max-tokens", str(10**9)], "8 texts would take about"),
        (["sample", "--max-tokens", "5000"], "exceed the model's context of 128"),
        (["sample", "--scale", "1e300"], "--scale 1e+300 is out of range"),
        (["sample", "--tolerance", "nan"], "--tolerance nan is not a distance"),
        (["sample", "--tolerance", "0.5"], "--tolerance 0.5 is not a distance"),
        (["sample", "--time-limit", "0"], "--time-limit 0"),
        (["sample", "--control-timeout", "-1"], "--control-timeout -1.0 is not a positive number"),
        (["probability", "--control", "keyword=a", "--texts", str(10**12)], "--texts 1000000000000 is more than"),
        (["verify", "--chains", str(10**12)], "1,000,000,000,000 chains would take about"),
        (["reproduce", "toy", "--runs", str(10**12)], "--runs 1000000000000 is more than"),
        (["sample", "--device", "meta"], "device 'meta' cannot be used here"),
        (["sample", "--dtype", "int8"], "--dtype 'int8' is unknown; known: bfloat16, "),
        (["sample", "--control", f"{'x' * 5000}=y"], "is unknown"),
        (["sample", "--model", "x" * 5000], "is not a file or a folder"),
        (["sample", "--out", "x" * 5000], "cannot be written (File name too long)"),
        (["sample", "--out", "folder"], "cannot be written (Is a directory)"),
        (["sample", "--out", "pipe"], "cannot be written (No such device or address)"),
        (["sample", "--prompts", "/dev/zero"], "is a pipe or a device, which may never end; write it to a file first"),
        (["sample", "--prompts", "pipe"], "is a pipe or a device"),
        (["sample", "--prompts", "huge.csv"], "huge.csv has 5,120 MiB, and at most 100 are read; give a part of it"),
        (["sample", "--checkpoint", "a\0b"], "--checkpoint 'a\\x00b' is not a folder name (embedded null byte)"),
        (["sample", "--checkpoint", "pipe"], "/pipe cannot be written (it is a file); choose another folder"),
        (["runs", "show", "x" * 300], "is not a folder; give the folder of a checkpoint"),
        (["train", "lm", "--data", "/dev/zero", "--out", "new"], "is a pipe or a device"),
        (["train", "lm", "--data", "socket", "--out", "new"], "is a pipe or a device"),
        (["train", "classifier", "--data", "x" * 300 + ".csv", "--label", "a", "--out", "new"], "File name too long"),
        (["sample", "--prompt", "caf\udce9"], "is not UTF-8 at character 3; write it in UTF-8"),
        (["sample", "--suffix", "\udcff"], "is not UTF-8 at character 0"),
        (["sample", "--stop", "\udcff"], "is not UTF-8 at character 0"),
        (["sample", "--control", "rules:missing"], "rules has no function or control 'missing'"),
        (["sample", "--control", "damaged:f"], "damaged cannot be imported (SyntaxError"),
    ],
)
def test_bad_input_ends_in_one_line(words: list[str], said: str) -> None:
    """In a folder of pipes, sockets and damaged files, which stays as it was."""
    outcome = fuzz.run(words)
    assert (outcome.word, said in outcome.said) == ("refused", True), outcome


@pytest.mark.parametrize(
    ("control", "said"),
    [
        ("rules:raises", r"the control rules:raises failed on the text .* \(rules.py, line 14: KeyError: .*\); make"),
        ("rules:leaves", r"the control rules:leaves failed on the text .* \(rules.py, line 18: SystemExit: 0\); make"),
        ("rules:text", "the control rules:text gave '.*' for the text '.*'; return True, False or a number"),
        ("rules:misnamed", "a control has the name 'text', which is another key of the output; give it another name"),
    ],
)
def test_a_control_that_fails_is_named_with_its_line(control: str, said: str, folder: Path) -> None:
    error = svs(*CONTROLLED, control, code=2, cwd=folder).stderr
    assert re.search(said, error.splitlines()[-1]), error


def test_a_control_that_hangs_is_ended(folder: Path) -> None:
    error = svs(*CONTROLLED, "rules:hangs", "--control-timeout", "0.5", code=2, cwd=folder).stderr
    assert "the control rules:hangs took more than 0.5 s (rules.py, line 23: still at work); make it faster" in error


def test_a_control_may_print_but_not_among_the_texts(folder: Path) -> None:
    done = svs(*CONTROLLED, "rules:prints", cwd=folder)
    assert "a word of the control" in done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_infinite_probabilities_are_written_as_null(folder: Path) -> None:
    svs(*CONTROLLED, "rules:huge", "--out", "texts.jsonl", cwd=folder)
    assert json.loads((folder / "texts.jsonl").read_text())["huge"] is None


def test_controls_that_no_try_satisfies_end_with_the_numbers() -> None:
    never = Predicate(lambda text: False, "never")
    request = {"n": 2, "max_tokens": 3, "finish": "length", "settings": EngineSettings(max_fruitless_tries=100)}
    with pytest.raises(sv.SamplingError) as error:
        sv.generate("bundled", controls=[never], progress=False, **request)
    assert re.search(
        r"none of \d+ tries satisfied the controls .*: their probability is below 0\.\d+ ", str(error.value)
    )
    assert "loosen a control" in str(error.value)


def test_a_search_for_starts_in_vain_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "SEARCH_LIMITS", starts.SearchLimits(min_texts=3, seconds=1e-9))
    model = sv.load("bundled").target(max_tokens=2)
    target = model.under([Predicate(lambda text: False, "never")])
    with pytest.raises(
        sv.SamplingError, match=r"none of their 6 redraws had one .never is violated by 100% of the last ones"
    ):
        sv.sample(target, sv.Refresh(), chains=2, draws=1, progress=False)


def test_an_alarm_of_somebody_else_goes_on_after_a_control() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with user_code("a control", "wait", seconds=5.0):
            time.sleep(0.1)
        time.sleep(0.1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rung == [signal.SIGALRM]


def test_in_another_thread_a_control_is_waited_for() -> None:
    answered: list[bool] = []

    def ask() -> None:
        with user_code("a control", "wait", seconds=0.01):
            time.sleep(0.1)
            answered.append(True)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert answered == [True]


@dataclass(frozen=True)
class Property:
    """A control whose name cannot be had."""

    @property
    def name(self) -> str:
        raise OSError("the name is on another disk")

    def log_prob(self, tokens: torch.Tensor, texts: list[str]) -> torch.Tensor:
        return torch.zeros(len(texts))


def test_a_control_whose_name_raises_is_named() -> None:
    with pytest.raises(sv.SamplingError, match=r"the control Property failed .*line .*the name is on another disk"):
        sv.load("bundled").target(max_tokens=2).under([Property()])


def test_labels_may_look_like_markup(tmp_path: Path) -> None:
    rows = "".join(f"[/bad{i % 2}],the food was {'good' if i % 2 else 'dull'} {i}\n" for i in range(8))
    (tmp_path / "texts.csv").write_text("mood,text\n" + rows)
    words = ("--data", "texts.csv", "--label", "mood", "--epochs", "1", "--out", "[/out]")
    assert "[/bad0]" in svs("train", "classifier", *words, cwd=tmp_path).stdout


def test_a_folder_in_the_way_of_a_file_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "out" / "model.safetensors").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        save_classifier(Light(4, 4, 2), {}, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    words = ("--data", "builtin", "--label", "food", "--limit", "50", "--out", "out")
    assert "cannot be replaced" in svs("train", "classifier", *words, code=2, cwd=tmp_path).stderr


@pytest.mark.parametrize(("layers", "said"), [(5000, "5000 layers"), (-1, "-1 layers"), (0, "0 layers")])
def test_absurd_models_are_refused(layers: int, said: str, tmp_path: Path) -> None:
    from structured_voronoi.models.loading import BUNDLED

    config = json.loads((BUNDLED / "config.json").read_text()) | {"n_layer": layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(sv.SamplingError, match=f"{said} in its config are not between 1 and 1,000"):
        sv.load(str(tmp_path)).target()


def test_a_link_to_a_file_that_is_not_there_yet_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to("texts.jsonl")
    svs(*TINY, "--model", "nowhere.gguf", "--out", "link.jsonl", code=2, cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["link.jsonl"]  # what was refused has left nothing behind
    svs(*TINY, "--out", "link.jsonl", cwd=tmp_path)
    assert (tmp_path / "link.jsonl").is_symlink()
    assert len((tmp_path / "texts.jsonl").read_text().splitlines()) == 1


def test_in_processes_of_their_own(tmp_path: Path) -> None:
    """Bytes that are not UTF-8, a full disk as file and as output, a terminal without the letter →."""
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}

    def run(*words: Any, stdout: Any = subprocess.PIPE) -> tuple[int, str, str]:
        command = [SVS, *TINY, "--sampler", "ancestral", *words]
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=environment, timeout=300)
        return done.returncode, (done.stdout or b"").decode(), done.stderr.decode()

    code, _, error = run("--prompt", b"caf\xe9")
    assert (code, len(error.splitlines())) == (2, 1)
    assert "is not UTF-8 at character 3" in error
    code, _, error = run("--out", "/dev/full")
    assert code == 2
    assert "/dev/full cannot be written (No space left on device)" in error.splitlines()[-1]
    with Path("/dev/full").open("w") as full:
        code, _, error = run(stdout=full)
    assert code == 2
    assert "No space left on device" in error.splitlines()[-1]
    (tmp_path / "prompts.txt").write_text("Near →\n", encoding="utf-8")
    code, out, _ = run("--prompts", str(tmp_path / "prompts.txt"))
    assert (code, out.startswith("Near \\u2192")) == (0, True)


@pytest.mark.parametrize("group", fuzz.GROUPS)
def test_made_up_input_is_accepted_or_refused(group: str) -> None:
    outcomes = fuzz.tries(group, count=max(6, round(200 * fuzz.GROUPS[group][1])))
    assert not [outcome for outcome in outcomes if not outcome.is_good]


def test_the_fuzzer_sees_what_it_looks_for(tmp_path: Path) -> None:
    """A traceback, a hang and a file that is half written are told from a refusal."""

    def refuse() -> None:
        (tmp_path / "half").write_text("written")
        raise sv.SamplingError("no")

    assert fuzz.judge("bug", lambda: 1 / 0).word == "traceback"
    assert fuzz.judge("file", refuse, tmp_path).word == "half written"
    assert fuzz.judge("exit", lambda: sys.exit(3)).word == "traceback"
    fuzz_seconds, fuzz.MOST_WAITING = fuzz.MOST_WAITING, 0.05
    try:
        assert fuzz.judge("hang", lambda: time.sleep(60)).word == "hang"
    finally:
        fuzz.MOST_WAITING = fuzz_seconds
