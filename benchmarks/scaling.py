"""How the speed of a run grows with the number of workers: a simulation of 1000 workers, a measurement of two.

* `python benchmarks/scaling.py simulate` writes docs/pictures/scaling.png, and the table into docs/scaling.md;
* `python benchmarks/scaling.py measure` times commands with one worker and with two, in turn, on an idle machine;
  further arguments go to `svs sample`, for example `--model smollm2 --sampler refresh --warmup 4`;
* `python benchmarks/scaling.py driver` times how long the main process (the driver) takes to save a part.

The simulation follows workers/pool.py and engine/worker_checkpoint.py event by event. A worker takes a task, sends
parts of its result at intervals, and finishes the task. It fails after an exponentially distributed time; a new worker
replaces it, which takes time to load the model, and the task is resumed from the last part. The driver handles one
message at a time.
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- table of benchmarks/scaling.py -->\n", "<!-- end of the table -->"
TASK_SECONDS = (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)
PART_SECONDS = 30.0
WITH, WITHOUT = "with parts", "without parts"
DEFAULT_WORDS = [
    "--model",
    "smollm2",
    "--sampler",
    "refresh",
    "--max-tokens",
    "20",
    "--finish",
    "length",
    "--warmup",
    "2",
]
FEW_TEXTS = 16
"""A command with so few texts measures the time of its start."""
FAILURES = {"never": float("inf"), "every day": 86_400.0, "every hour": 3600.0, "every 10 minutes": 600.0}


@dataclass(frozen=True)
class Cluster:
    """Settings of the simulation; times are in seconds."""

    workers: int = 1000
    work: float = 3600.0
    """Time of each worker without failures."""
    length: float = 300.0
    """Time of a task."""
    between_parts: float = PART_SECONDS
    """Infinite if lost tasks start again from the beginning."""
    between_failures: float = 86_400.0
    """Mean time between failures of one worker."""
    starting: float = 30.0
    """Time until a new worker has loaded its model."""
    handling: float = 0.02
    """Time of the driver for a message."""
    seed: int = 0


class Outcome(NamedTuple):
    """Shares of the workers' time, from the first task to the last."""

    throughput: float
    """Time spent on results that were used."""
    lost: float
    """Time spent on work that was repeated."""
    failures: int


def simulate(cluster: Cluster) -> Outcome:
    """Simulate all tasks, event by event: a worker becomes free, or it fails and leaves the rest of its task."""
    source = random.Random(cluster.seed)
    count = max(1, round(cluster.workers * cluster.work / cluster.length))
    waiting = [cluster.workers * cluster.work / count] * count  # remaining seconds of each task
    events: list[tuple[float, int, float]] = [(cluster.starting, worker, 0.0) for worker in range(cluster.workers)]
    idle: list[int] = []
    handling = cluster.handling / (1 - _load_of_parts(cluster))
    driver, last, lost, failures = 0.0, 0.0, 0.0, 0
    while events:
        now, worker, rest = heapq.heappop(events)
        if rest:
            waiting.append(rest)
            heapq.heappush(events, (now + cluster.starting, worker, 0.0))
            if idle:
                heapq.heappush(events, (now, idle.pop(), 0.0))
            continue
        if not waiting:
            idle.append(worker)
            continue
        driver = max(driver, now) + handling  # the last result and the next task
        left = waiting.pop()
        life = source.expovariate(1.0) * cluster.between_failures  # memoryless
        if left <= life:
            last = max(last, driver + left)
            heapq.heappush(events, (driver + left, worker, 0.0))
            continue
        saved = life // cluster.between_parts * cluster.between_parts if life >= cluster.between_parts else 0.0
        lost, failures = lost + life - saved, failures + 1
        heapq.heappush(events, (driver + life, worker, left - saved))
    whole = cluster.workers * last
    return Outcome(cluster.workers * cluster.work / whole, lost / whole, failures)


def _load_of_parts(cluster: Cluster) -> float:
    """The share of the driver's time that is spent on parts; the rest is left for tasks."""
    if cluster.length <= cluster.between_parts:
        return 0.0
    return min(0.99, cluster.workers * cluster.handling / cluster.between_parts)


def report_simulation(seed: int) -> None:
    """Draw the figure and write the table into the page."""
    found = {
        (parts, name, length): simulate(
            Cluster(length=length, between_parts=seconds, between_failures=FAILURES[name], seed=seed)
        )
        for parts, seconds in ((WITH, PART_SECONDS), (WITHOUT, float("inf")))
        for name in FAILURES
        for length in TASK_SECONDS
        if parts == WITH or PART_SECONDS < length <= 3 * FAILURES[name]  # longer tasks hardly ever end
    }
    lines = ["| a task takes | " + " | ".join(f"a worker fails {name}" for name in FAILURES) + " |", "| --- |"]
    lines[1] += " --- |" * len(FAILURES)
    for length in TASK_SECONDS:
        cells = [_cell(found, name, length) for name in FAILURES]
        lines.append(f"| {_format_seconds(length)} | " + " | ".join(cells) + " |")
    page = DOCS / "scaling.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text("".join((before, BEGIN, "\n".join(lines), "\n", END, after)), encoding="utf-8")
    print("\n".join(lines))
    _draw(found)


def _cell(found: dict[tuple[str, str, float], Outcome], name: str, length: float) -> str:
    """A cell of the table: with parts and, if it differs, without."""
    with_parts, without = found[WITH, name, length], found.get((WITHOUT, name, length))
    cell = f"{with_parts.throughput:.1%}, lost {with_parts.lost:.1%}"
    if length <= PART_SECONDS or FAILURES[name] == float("inf"):
        return cell
    return f"{cell} · " + (f"{without.throughput:.1%}, lost {without.lost:.1%}" if without else "hardly ever ends")


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 3600 else f"{seconds / 3600:.0f} h"


def _draw(found: dict[tuple[str, str, float], Outcome]) -> None:
    from structured_voronoi.experiments.report import new_figure

    figure, axes = new_figure(9, 3.6, ncols=2, sharex=True)
    colours = dict(zip(FAILURES, ("#555555", "#0b6e4f", "#e0a030", "#d1495b"), strict=True))
    for parts, style in ((WITH, "-"), (WITHOUT, ":")):
        for name, colour in colours.items():
            some = {length: one for (its, own, length), one in found.items() if (its, own) == (parts, name)}
            label = name if parts == WITH else None
            axes[0].plot(list(some), [one.throughput for one in some.values()], style, color=colour, label=label)
            axes[1].plot(list(some), [one.lost for one in some.values()], style, color=colour)
    axes[0].set(xscale="log", xlabel="seconds of a task", ylabel="share of time for results", ylim=(0, 1.02))
    axes[1].set(xlabel="seconds of a task", ylabel="share of time lost")
    axes[0].legend(title="a worker fails", frameon=False, fontsize=8)
    figure.savefig(DOCS / "pictures" / "scaling.png", dpi=150)


def time_driver(parts: int = 100) -> tuple[float, float]:
    """Seconds, and processor seconds, to save a part of 100 kB in a run with a thousand workers."""
    from structured_voronoi.storage.store import Store

    with tempfile.TemporaryDirectory() as folder, Store(folder) as store:
        store.begin("benchmark", {}, {})
        store.commit({f"before-{number:06}": b"" for number in range(1000)})
        seconds, busy = [], process_time()
        for number in range(parts):
            began = perf_counter()
            store.commit({f"part-{number:06}": bytes(100_000)}, [f"part-{number - 1:06}"] if number else [])
            seconds.append(perf_counter() - began)
    return statistics.median(seconds), (process_time() - busy) / parts


def measure(words: list[str], texts: int, repeats: int) -> None:
    """Time commands with one worker and with two, in turn, so that disturbances affect both.

    The time of commands with few texts is that of the start: imports and loading the model. It is subtracted.
    """
    seconds: dict[tuple[int, int], list[float]] = {(workers, n): [] for n in (FEW_TEXTS, texts) for workers in (1, 2)}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(repeats):
            for workers, n in seconds if turn % 2 == 0 else reversed(seconds):
                out = Path(folder) / f"{workers}-{n}.jsonl"
                seconds[workers, n].append(_time_command(words, workers, n, out))
                print(f"{n} texts, {workers} worker{'s' * (workers > 1)}: {seconds[workers, n][-1]:.1f} s", flush=True)
        same = all(
            (Path(folder) / f"1-{n}.jsonl").read_bytes() == (Path(folder) / f"2-{n}.jsonl").read_bytes()
            for n in (FEW_TEXTS, texts)
        )
    middle = {key: statistics.median(taken) for key, taken in seconds.items()}
    whole = [one / two for one, two in zip(seconds[1, texts], seconds[2, texts], strict=True)]
    rest = {workers: middle[workers, texts] - middle[workers, FEW_TEXTS] for workers in (1, 2)}
    print(f"one worker / two, seconds of the whole: {statistics.median(whole):.2f} ({min(whole):.2f}–{max(whole):.2f})")
    if min(rest.values()) <= middle[1, FEW_TEXTS]:
        print("the long runs take hardly longer than their start: use more --texts")
    else:
        print(
            f"without the start: {rest[1] / rest[2]:.2f}, "
            f"{60 * (texts - FEW_TEXTS) / rest[2]:.1f} texts a minute with two"
        )
    print(f"the same file: {'yes' if same else 'NO'}")


def _time_command(words: list[str], workers: int, texts: int, out: Path) -> float:
    command = [sys.executable, "-c", "from structured_voronoi.cli import main; main()", "sample", "-n", str(texts)]
    command += ["--workers", str(workers), "--out", str(out), *words]
    began = perf_counter()
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)
    return perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("simulate", "measure", "driver"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--texts", type=int, default=160, help="number of texts of the long runs")
    parser.add_argument("--repeats", type=int, default=3)
    asked, words = parser.parse_known_args()
    if asked.what == "simulate":
        report_simulation(asked.seed)
    elif asked.what == "measure":
        measure(words or DEFAULT_WORDS, asked.texts, asked.repeats)
    else:
        seconds, busy = time_driver()
        print(f"{1000 * seconds:.1f} ms for a part, {1000 * busy:.1f} ms of them of a core")


if __name__ == "__main__":
    main()
