"""Tasks on several processes: dead workers are replaced, errors are passed on, and no process remains."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from structured_voronoi.core.errors import NoStartError, SamplingError
from structured_voronoi.workers.messages import Report, Work
from structured_voronoi.workers.parallel import map_tasks
from structured_voronoi.workers.pool import MAX_ATTEMPTS, WorkerPool
from structured_voronoi.workers.processes import ProcessWorkers


def without_report(work: Callable[[int], int]) -> Work:
    return lambda task, report: work(task)


def on_two(work: Callable[[int], int], tasks: Sequence[int], label: str) -> list[int]:
    """The results of two workers, in the order of the tasks."""
    with WorkerPool(ProcessWorkers(2), partial(without_report, work)) as pool:
        for task in tasks:
            pool.submit(task, partial(int, task), f"{label} {task}")
        return [result for _, result in sorted(pool.results())]


def square(task: int) -> int:
    return task * task


def die_at_three(task: int, scratch: Path, times: int) -> int:
    """Kill the worker during task 3, a number of times."""
    if task == 3:
        (scratch / f"{os.getpid()}").touch()
        if len(list(scratch.iterdir())) <= times:
            os.kill(os.getpid(), signal.SIGKILL)
    return task * task


def fail(task: int) -> int:
    if task == 1:
        raise NoStartError("none was found", argument="start", remedy="choose another", cause="bad luck")
    return task


def stumble(task: int) -> int:
    return 1 // task


def exit_by_itself(task: int) -> int:
    sys.exit(7)


def is_alive(process: int) -> bool:
    """True if there is such a process and it has not ended."""
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Wait until a condition holds, or the time is over."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


def report_three_times(task: int, report: Report) -> int:
    for step in range(3):
        report(10 * task + step)
    return task


def prepare_to_report() -> Work:
    return report_three_times


def test_reports_arrive_in_order_before_the_result() -> None:
    reports: list[tuple[int, int]] = []

    def record(number: int, message: int) -> None:
        reports.append((number, message))

    with WorkerPool(ProcessWorkers(1), prepare_to_report, record) as pool:
        pool.submit(4, lambda: 4, "reporting")
        for number, result in pool.results():
            assert (number, result) == (4, 4)
            assert reports == [(4, 40), (4, 41), (4, 42)]


def test_results_are_in_the_order_of_the_tasks() -> None:
    assert map_tasks(square, range(5), "squares", progress=False, workers=2) == [0, 1, 4, 9, 16]


def test_killed_worker_is_replaced_and_its_task_computed_again(tmp_path: Path) -> None:
    work = partial(die_at_three, scratch=tmp_path, times=MAX_ATTEMPTS - 1)
    assert on_two(work, range(5), "squares") == [0, 1, 4, 9, 16]
    assert len(list(tmp_path.iterdir())) == MAX_ATTEMPTS  # each time in a new process


def test_task_that_kills_every_worker_is_named_with_the_signal(tmp_path: Path) -> None:
    work = partial(die_at_three, scratch=tmp_path, times=MAX_ATTEMPTS)
    with pytest.raises(SamplingError) as caught:
        on_two(work, range(3, 5), "squares")
    assert caught.value.message == f"squares 3: its worker died {MAX_ATTEMPTS} times"
    assert caught.value.cause == "signal 9 (SIGKILL)"


def test_errors_of_tasks_keep_their_class_and_fields() -> None:
    with pytest.raises(NoStartError) as caught:
        on_two(fail, range(3), "failures")
    error = caught.value
    assert (error.argument, error.predicate, error.cause) == ("start", "none was found", "bad luck")
    assert error.remedy == "choose another"
    with pytest.raises(SamplingError, match=r"^ZeroDivisionError: integer division") as other:
        on_two(stumble, range(3), "failures")
    assert "in stumble" in str(other.value.__cause__)  # the traceback, for --debug
    with pytest.raises(SamplingError) as ended:
        on_two(exit_by_itself, range(1), "exits")
    assert ended.value.cause == "exit code 7"


class Pair(NamedTuple):
    one: int
    other: int


def answer_by_number(task: int) -> object:
    """Data, and objects that are none."""
    good = {"tensor": torch.arange(3), "nan": [math.nan, None], "bytes": b"\x00\xff", "tuple": (1, "a")}
    return [good, Pair(1, 2), {1: 2.0}, range(3)][task]


def test_results_that_are_not_data_are_refused_with_and_without_workers() -> None:
    for workers in (1, 2):
        [good] = map_tasks(answer_by_number, [0], "answers", progress=False, workers=workers)
        assert torch.equal(good["tensor"], torch.arange(3))
        assert (good["bytes"], good["tuple"]) == (b"\x00\xff", (1, "a"))
        assert math.isnan(good["nan"][0])
        for task in (1, 2, 3):
            with pytest.raises(SamplingError, match=r"^a worker's result cannot be sent \(the answer"):
                map_tasks(answer_by_number, [task], "answers", progress=False, workers=workers)


class NoBoundError(ValueError):
    """A user's error with the name of one of ours."""


def fail_otherwise(task: int) -> int:
    raise NoBoundError("none")


def test_error_of_the_user_with_the_name_of_ours_is_a_sampling_error() -> None:
    with pytest.raises(SamplingError, match=r"^NoBoundError: none$") as caught:
        on_two(fail_otherwise, range(1), "failures")
    assert type(caught.value) is SamplingError


def test_function_that_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(SamplingError) as caught:
        on_two(lambda task: task, range(3), "lambdas")
    assert "at the top of a module" in caught.value.remedy


SCRIPT = """
import os, time
from functools import partial
from pathlib import Path
from structured_voronoi.workers.processes import ProcessWorkers
from structured_voronoi.workers.pool import WorkerPool

def sleep(task, report):
    Path(f"{task}.pid").write_text(str(os.getpid()))
    time.sleep(600)

def prepare():
    return sleep

if __name__ == "__main__":
    with WorkerPool(ProcessWorkers(2), prepare) as pool:
        for task in range(2):
            pool.submit(task, partial(int, task), "sleeping")
        list(pool.results())
"""


@pytest.mark.parametrize("killer", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_their_parent(killer: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    parent = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: len([file for file in tmp_path.glob("*.pid") if file.read_text()]) == 2)
        workers = [int(file.read_text(encoding="utf-8")) for file in tmp_path.glob("*.pid")]
        assert all(is_alive(worker) for worker in workers)
        parent.send_signal(killer)
        assert wait_until(lambda: not any(is_alive(worker) for worker in workers))
    finally:
        parent.kill()
        parent.wait()


def test_script_without_main_guard_gets_an_error_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace('if __name__ == "__main__":', "if True:"), encoding="utf-8")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "SamplingError" in done.stderr.splitlines()[-1]
    assert "if __name__ == '__main__':" in done.stderr.splitlines()[-1]


def has_safe_path(task: int) -> int:
    return int("PYTHONSAFEPATH" in os.environ)


@pytest.mark.parametrize("own", [None, "1"])
def test_workers_import_nothing_from_the_current_folder(
    own: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("multiprocessing", "pickle", "torch"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    if own is not None:
        monkeypatch.setenv("PYTHONSAFEPATH", own)
    assert on_two(has_safe_path, range(2), "paths") == [own is not None] * 2
    assert os.environ.get("PYTHONSAFEPATH") == own
    assert not (tmp_path / "executed").exists()
