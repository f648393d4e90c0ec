"""The commands: lists, mistakes, verification, and one that is started as a user does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helpers import SVS
from structured_voronoi import cli
from system.commands import svs

IMPORTED = """
import sys
from structured_voronoi import cli
code = cli.run(sys.argv[1:])
ours = [name for name in sys.modules if name.startswith("structured_voronoi.")]
files = [name for name in ours if not sys.modules[name].__file__.endswith("__init__.py")]
heavy = {"torch", "matplotlib", "xarray", "scipy"} & set(sys.modules)
print(code, len(files), sorted(heavy), file=sys.stderr)
"""


def imported(*words: str) -> str:
    """Exit code, files of ours and heavy libraries that a command in a fresh process imports."""
    done = subprocess.run([sys.executable, "-c", IMPORTED, *words], capture_output=True, text=True, timeout=300)
    return done.stderr.strip().splitlines()[-1]


def test_help_teaches_and_imports_nothing_heavy() -> None:
    overview = " ".join(svs("--help").stdout.split())
    assert "svs verify" in overview
    assert "Draw texts from a language model" in overview
    assert "results" in svs("reproduce", "--help").stdout
    assert "Example: svs sample -n 4" in svs("sample", "--help").stdout
    assert "Example: svs train lm" in svs("train", "lm", "--help").stdout
    assert re.fullmatch(r"0 \d+ \[\]", imported("ls"))


def test_texts_under_control_cross_few_files() -> None:
    words = ("--sampler", "svs+refresh", "--warmup", "1", "--control", "food=Italian")
    code, files, *_ = imported("sample", "-n", "1", *words).split()
    assert code == "0"
    assert int(files) <= 90


def test_ls_lists_what_exists() -> None:
    import structured_voronoi as sv
    from structured_voronoi.samplers.registry import SAMPLERS

    listed = svs("ls").stdout
    public = [*vars(sv)["__all__"], *sv.baselines.__all__]
    for name in public:
        if name.endswith("Target") or hasattr(getattr(sv, name, None) or getattr(sv.baselines, name), "step"):
            assert name in ("Target", "Sampler") or name in listed
    for entry in SAMPLERS:
        assert hasattr(entry.load(), "step") or entry.name in ("adaptive", "smc")
    assert re.search(r"food +Chinese, English, Fast food, .*Italian", listed)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["reproduce", "toyy"], "did you mean 'toy'?"),
        (["reproduce"], "requires an argument"),
        (["verifi"], "verify"),
        (["reproduce", "toy", "--runs", "1"], "--runs 1"),
        (["reproduce", "toy", "--runs", "many"], "many"),
        (["reproduce", "toy", "--data", "builtin"], "--data does not go with toy"),
        (["reproduce", "topic"], "topic needs texts with labels; give --data FOLDER with trainset.csv"),
        (["reproduce", "topic", "--data", "nowhere"], "nowhere does not exist"),
        (["reproduce", "toy", "--model", "bundled"], "--model does not go with toy; it is for topic, sentiment"),
        (["verify", "--chains", "3"], "--chains 3"),
        (["verify", "--seed", "-1"], "seed -1"),
        (["reproduce", "toy", "--seed", "-1"], "--seed -1"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(words: list[str], said: str) -> None:
    error = svs(*words, code=2).stderr
    assert said in error
    assert len(error.strip().splitlines()) == 1


def test_a_mistake_in_a_process_of_its_own() -> None:
    done = subprocess.run([SVS, "reproduce", "toyy"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("svs: unknown experiment 'toyy'; did you mean 'toy'?")
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "notes", "said"),
    [
        (["ls"], [], "interrupted"),
        (["probability", "--control", "keyword=a"], [], "interrupted; a run with --checkpoint DIR can be resumed"),
        (["train", "lm"], [], "interrupted"),
        (["train", "lm", "--out", "a b"], ["3 steps"], "interrupted; 3 steps; resume with: svs train lm --out 'a b'"),
        (["sample", "--checkpoint=run"], [], "interrupted; resume with: svs sample --checkpoint=run --resume"),
        (
            ["sample", "--resume", "--checkpoint", "r"],
            [],
            "interrupted; resume with: svs sample --resume --checkpoint r",
        ),
        (
            ["sample", "--checkpoint", "r", "--prompt", "a\nb"],
            [],
            "interrupted; resume with the same command and --resume",
        ),
    ],
)
def test_whoever_stops_a_command_is_told_how_to_go_on(
    words: list[str], notes: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> int:
        interrupt = KeyboardInterrupt()
        for note in notes:
            interrupt.add_note(note)
        raise interrupt

    monkeypatch.setattr(cli, "app", stop)
    assert svs(*words, code=130).stderr == f"svs: {said}\n"


def test_unwritable_folders_are_refused_before_the_work(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    assert str(file) in svs("reproduce", "crossings", "--out", str(file), code=2).stderr
    assert file.read_text() == "in the way"
    (tmp_path / "crossings.json").mkdir()
    assert "crossings.json" in svs("reproduce", "crossings", "--out", str(tmp_path), code=2).stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["crossings.json", "file"]


def test_reproduce_writes_its_report(tmp_path: Path) -> None:
    done = svs("reproduce", "crossings", "--runs", "5", "--out", str(tmp_path / "new" / "folder"))
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == ["crossings.json", "crossings.md", "crossings.png"]
    assert len(done.stdout.splitlines()) == 3


def test_verify_passes_and_fails_for_a_false_claim(capsys: pytest.CaptureFixture[str]) -> None:
    """In the command some cases stand for all; test_stationarity runs every one of them."""
    import structured_voronoi as sv
    from structured_voronoi.cli.verify import check_cases

    by_name = {case.sampler: case for case in sv.verify.cases()}
    assert check_cases([by_name["gwg"], by_name["langevin"]], chains=2000, seed=3) == 0
    assert "0 of 1 exact samplers failed" in capsys.readouterr().out
    assert check_cases([by_name["langevin"]._replace(exact_on_target=True)], chains=2000, seed=3) == 1
    assert "1 of 1 exact samplers failed" in capsys.readouterr().out


def test_interrupt_ends_at_once_and_leaves_no_half_report(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [SVS, "reproduce", "hypercube", "--out", str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text():  # it has begun to work
        time.sleep(0.2)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.strip() == "svs: interrupted; a run with --checkpoint DIR can be resumed"
    assert list(tmp_path.iterdir()) == []
