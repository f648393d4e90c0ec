"""Load test of the page with many clients on loopback: python benchmarks/web_load.py [CLIENTS] [SECONDS]

Each client repeats random actions: it loads the page, requests trajectories, checks a control, draws texts, compares
samplers, and sometimes disconnects early. Each request must be answered completely or rejected with a message. Memory
must not grow between the end of a first round, in which all processes start, and the end of a second round of the same
length. Prints the figures of the second round as one JSON object.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic
from typing import Any

import httpx2

CLIENTS, SECONDS = 50, 60.0
SETTLING_SECONDS = 15.0
"""Seconds within which abandoned jobs must end."""
SCENE = {"points": [[-1.2, 0.9], [0.1, 1.3], [1.4, 0.4], [0.3, -0.2]], "weights": [5, 20, 30, 8]}
COMMAND = "from structured_voronoi.cli import main; main()"
FILES = (
    "",
    "style.css",
    *(f"{name}.js" for name in ("main", "dom", "stream", "plane", "chart", "race", "text", "run")),
)
TEXTS = {"n": 2, "sampler": "rejection", "max_tokens": 40, "controls": [{"kind": "keyword", "value": "restaurant"}]}
ACTIONS = {
    "page": 3,
    "trajectories": 4,
    "check": 4,
    "texts": 3,
    "texts, abandoned": 2,
    "race, abandoned": 2,
}
"""Actions of clients with their relative frequencies."""


async def main(clients: int, seconds: float) -> None:
    with serving() as (address, server):
        limits = httpx2.Limits(max_connections=clients + 4)
        headers = {"origin": address}
        async with httpx2.AsyncClient(base_url=address, headers=headers, timeout=300, limits=limits) as client:
            fresh = memory(server)
            await visit(client, clients, seconds, Counter(), {})
            before = memory(server)
            found: Counter[str] = Counter()
            longest: dict[str, float] = {}
            await visit(client, clients, seconds, found, longest)
            after = memory(server)
            after_load = await act(client, "texts", random.Random(1))
    result = {
        "clients": clients,
        "seconds": seconds,
        "answers": dict(sorted(found.items())),
        "longest_seconds": {action: round(time, 2) for action, time in sorted(longest.items())},
        "megabytes_fresh": fresh,
        "megabytes_before": before,
        "megabytes_after": after,
        "change": round(after / before - 1, 3),
        "answer_after_load": after_load,
    }
    print(json.dumps(result, indent=2))


async def visit(
    client: httpx2.AsyncClient, clients: int, seconds: float, found: Counter[str], longest: dict[str, float]
) -> None:
    """Run many clients for some time, then wait for abandoned jobs to end."""
    end = monotonic() + seconds
    await asyncio.gather(*(behave(client, number, end, found, longest) for number in range(clients)))
    await asyncio.sleep(SETTLING_SECONDS)


async def behave(
    client: httpx2.AsyncClient, number: int, end: float, found: Counter[str], longest: dict[str, float]
) -> None:
    """Run one client until the end."""
    chance = random.Random(number)
    while monotonic() < end:
        action, began = chance.choices(list(ACTIONS), list(ACTIONS.values()))[0], monotonic()
        try:
            outcome = await act(client, action, chance)
        except httpx2.HTTPError as error:
            outcome = f"LOST ({type(error).__name__})"
        found[f"{action}: {outcome}"] += 1
        longest[action] = max(longest.get(action, 0.0), monotonic() - began)
        await asyncio.sleep(chance.uniform(0, 1))


async def act(client: httpx2.AsyncClient, action: str, chance: random.Random) -> str:
    """Do one action; return whether it was answered, abandoned by the client, rejected with a message, or lost."""
    if action == "page":
        answers = [await client.get(f"/{name}") for name in FILES]
        return "answered" if all(answer.status_code == 200 for answer in answers) else "LOST (status)"
    seed = chance.randrange(2**31)
    if action == "trajectories":
        return await stream(client, action, {**SCENE, "seed": seed, "count": 5}, "trajectory", 5)
    if action == "check":
        return await stream(client, action, {"kind": "regex", "value": "(a|b)+c"}, "checked", 1)
    if action == "texts":
        return await stream(client, "text", {**TEXTS, "seed": seed}, "texts", 1)
    leave_after = chance.randrange(1, 6)
    if action == "race, abandoned":
        return await stream(client, "race", {**SCENE, "seed": seed}, "divergence", 10**6, leave_after)
    long_job = {"n": 16, "sampler": "svs+refresh", "warmup": 1000, "seed": seed}
    return await stream(client, "text", long_job, "texts", 10**6, leave_after)


async def stream(
    client: httpx2.AsyncClient, path: str, form: dict[str, Any], kind: str, wanted: int, leave_after: int | None = None
) -> str:
    """Read a stream to its end, or disconnect after some events."""
    async with client.stream("POST", f"/api/{path}", json=form) as answer:
        if answer.status_code != 200:
            message = json.loads(await answer.aread()).get("error")
            return f"rejected with a message ({answer.status_code})" if message else f"LOST ({answer.status_code})"
        seen, got = 0, 0
        async for event in events(answer):
            seen += 1
            got += event["kind"] == kind
            if event["kind"] == "error":
                return f"rejected with a message ({event['code']})"
            if seen == leave_after:
                return "answered until abandoned"
    return "answered" if got == wanted else f"LOST ({got} of {wanted})"


async def events(answer: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line[6:])


@contextlib.contextmanager
def serving() -> Any:
    """Start a server; yield its address and process id."""
    words = [sys.executable, "-c", COMMAND, "serve", "--port", "0"]
    server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        found = re.search(r"http://\S+", server.stderr.readline())
        assert found is not None
        yield found[0].rstrip("/"), server.pid
    finally:
        server.send_signal(signal.SIGINT)
        print(server.communicate(timeout=60)[1], file=sys.stderr, end="")


def memory(pid: int) -> float:
    """Megabytes of anonymous memory of a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    parts = [Path(f"/proc/{one}/smaps_rollup").read_text() for one in [str(pid), *children]]
    return round(sum(int(re.findall(r"^Anonymous: +(\d+)", part, re.MULTILINE)[0]) for part in parts) / 1024, 1)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    given = [float(word) for word in sys.argv[1:3]]
    asyncio.run(main(int(given[0]) if given else CLIENTS, given[1] if len(given) > 1 else SECONDS))
