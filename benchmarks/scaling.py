"""How runs spread over workers: a simulation of a thousand that fail, and a measurement of two.

* `python benchmarks/scaling.py simulate` writes docs/pictures/scaling.png, and the table into docs/scaling.md;
* `python benchmarks/scaling.py measure` times whole commands with one worker and with two, in turn, on a machine that
  does nothing else; what follows goes to `svs sample`, such as `--model smollm2 --sampler refresh --warmup 4`;
* `python benchmarks/scaling.py driver` times what the driver does for each part that a worker sends.

The simulation follows run/workers.py and run/spread.py event by event. A worker takes a task, sends a part of it every
so often, and hands the task in; it fails after a time that has an exponential distribution, wherever it is then, and a
new one takes its place, which takes a while to load the model. Its task is begun again at the last part that has come.
The driver deals with one message after the other.
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
LENGTHS = (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)
"""Seconds of a task."""
WITH, WITHOUT, PART = "with parts", "without parts", 30.0
MEASURED = ["--model", "smollm2", "--sampler", "refresh", "--length", "20", "--ends", "never", "--warmup", "2"]
FEW = 16
"""Texts of a command that does little but start: a batch."""
FAILURES = {"never": float("inf"), "every day": 86_400.0, "every hour": 3600.0, "every 10 minutes": 600.0}


@dataclass(frozen=True)
class Cluster:
    """What is simulated; times are in seconds."""

    workers: int = 1000
    work: float = 3600.0
    """Of each worker, if all went well."""
    length: float = 300.0
    """Of a task."""
    between_parts: float = PART
    """Infinite where a task that is lost is begun all over."""
    between_failures: float = 86_400.0
    """Of one worker, on average."""
    starting: float = 30.0
    """From the start of a worker until it has loaded its model."""
    handling: float = 0.02
    """What the driver takes for a message."""
    seed: int = 0


class Outcome(NamedTuple):
    """Shares of the workers' time, from the first task to the last."""

    throughput: float
    """Of work that counted."""
    lost: float
    """Of work that had to be done again."""
    failures: int


def simulate(cluster: Cluster) -> Outcome:
    """Run all tasks to their end, event by event: a worker is free, or it has failed and leaves the rest of a task."""
    source = random.Random(cluster.seed)
    count = max(1, round(cluster.workers * cluster.work / cluster.length))
    waiting = [cluster.workers * cluster.work / count] * count  # seconds that are left of each task
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
        driver = max(driver, now) + handling  # the last result, and the next task
        left = waiting.pop()
        life = source.expovariate(1.0) * cluster.between_failures  # of how long it has lived already it knows nothing
        if left <= life:
            last = max(last, driver + left)
            heapq.heappush(events, (driver + left, worker, 0.0))
            continue
        kept = life // cluster.between_parts * cluster.between_parts if life >= cluster.between_parts else 0.0
        lost, failures = lost + life - kept, failures + 1
        heapq.heappush(events, (driver + life, worker, left - kept))
    whole = cluster.workers * last
    return Outcome(cluster.workers * cluster.work / whole, lost / whole, failures)


def _load_of_parts(cluster: Cluster) -> float:
    """The share of the driver's time that goes to parts, which come all the time; tasks are dealt with in the rest."""
    if cluster.length <= cluster.between_parts:
        return 0.0
    return min(0.99, cluster.workers * cluster.handling / cluster.between_parts)


def report_simulation(seed: int) -> None:
    """The picture, and the table in the page."""
    found = {
        (parts, name, length): simulate(
            Cluster(length=length, between_parts=seconds, between_failures=FAILURES[name], seed=seed)
        )
        for parts, seconds in ((WITH, PART), (WITHOUT, float("inf")))
        for name in FAILURES
        for length in LENGTHS
        if parts == WITH or PART < length <= 3 * FAILURES[name]  # of longer ones hardly any would end
    }
    lines = ["| a task takes | " + " | ".join(f"a worker fails {name}" for name in FAILURES) + " |", "| --- |"]
    lines[1] += " --- |" * len(FAILURES)
    for length in LENGTHS:
        cells = [_cell(found, name, length) for name in FAILURES]
        lines.append(f"| {_said(length)} | " + " | ".join(cells) + " |")
    page = DOCS / "scaling.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text("".join((before, BEGIN, "\n".join(lines), "\n", END, after)), encoding="utf-8")
    print("\n".join(lines))
    _draw(found)


def _cell(found: dict[tuple[str, str, float], Outcome], name: str, length: float) -> str:
    """As it is done here and, where that is another matter, without parts."""
    with_parts, without = found[WITH, name, length], found.get((WITHOUT, name, length))
    said = f"{with_parts.throughput:.1%}, lost {with_parts.lost:.1%}"
    if length <= PART or FAILURES[name] == float("inf"):
        return said
    return f"{said} · " + (f"{without.throughput:.1%}, lost {without.lost:.1%}" if without else "hardly ends")


def _said(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 3600 else f"{seconds / 3600:.0f} h"


def _draw(found: dict[tuple[str, str, float], Outcome]) -> None:
    from structured_voronoi.experiments.report import new_figure

    figure, axes = new_figure(9, 3.6, ncols=2, sharex=True)
    colours = dict(zip(FAILURES, ("#555555", "#0b6e4f", "#e0a030", "#d1495b"), strict=True))
    for parts, style in ((WITH, "-"), (WITHOUT, ":")):
        for name, colour in colours.items():
            some = {length: one for (its, own, length), one in found.items() if (its, own) == (parts, name)}
            said = name if parts == WITH else None
            axes[0].plot(list(some), [one.throughput for one in some.values()], style, color=colour, label=said)
            axes[1].plot(list(some), [one.lost for one in some.values()], style, color=colour)
    axes[0].set(xscale="log", xlabel="seconds of a task", ylabel="share of time that counts", ylim=(0, 1.02))
    axes[1].set(xlabel="seconds of a task", ylabel="share of time lost")
    axes[0].legend(title="a worker fails", frameon=False, fontsize=8)
    figure.savefig(DOCS / "pictures" / "scaling.png", dpi=150)


def time_driver(parts: int = 100) -> tuple[float, float]:
    """Seconds, and those of a core, that a part of 100 kB takes to be kept in a run of a thousand workers."""
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
    """Whole commands with one worker and with two, in turn, so that what disturbs the machine disturbs both.

    A command is timed from its start to its end. So are some with FEW texts: what they take is the start of both,
    imports and models, and long runs have the ratio of the rest.
    """
    seconds: dict[tuple[int, int], list[float]] = {(workers, n): [] for n in (FEW, texts) for workers in (1, 2)}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(repeats):
            for workers, n in seconds if turn % 2 == 0 else reversed(seconds):
                out = Path(folder) / f"{workers}-{n}.jsonl"
                seconds[workers, n].append(_time_command(words, workers, n, out))
                print(f"{n} texts, {workers} worker{'s' * (workers > 1)}: {seconds[workers, n][-1]:.1f} s", flush=True)
        same = all(
            (Path(folder) / f"1-{n}.jsonl").read_bytes() == (Path(folder) / f"2-{n}.jsonl").read_bytes()
            for n in (FEW, texts)
        )
    middle = {key: statistics.median(taken) for key, taken in seconds.items()}
    whole = [one / two for one, two in zip(seconds[1, texts], seconds[2, texts], strict=True)]
    rest = {workers: middle[workers, texts] - middle[workers, FEW] for workers in (1, 2)}
    print(f"one worker / two, seconds of the whole: {statistics.median(whole):.2f} ({min(whole):.2f}–{max(whole):.2f})")
    if min(rest.values()) <= middle[1, FEW]:
        print("the long runs take hardly longer than their start, and say nothing of it: take more --texts")
    else:
        print(f"without the start: {rest[1] / rest[2]:.2f}, {60 * (texts - FEW) / rest[2]:.1f} texts a minute with two")
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
    parser.add_argument("--texts", type=int, default=160, help="of the long runs that are measured")
    parser.add_argument("--repeats", type=int, default=3)
    asked, words = parser.parse_known_args()
    if asked.what == "simulate":
        report_simulation(asked.seed)
    elif asked.what == "measure":
        measure(words or MEASURED, asked.texts, asked.repeats)
    else:
        seconds, busy = time_driver()
        print(f"{1000 * seconds:.1f} ms for a part, {1000 * busy:.1f} ms of them of a core")


if __name__ == "__main__":
    main()
