"""`svs verify`: every sampler against targets whose truth is known."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from structured_voronoi.cli import WHOLE
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.validation import check_memory, check_seed

if TYPE_CHECKING:
    from structured_voronoi.verify.claims import Case


CHAIN_BYTES = 10_000
"""What a chain takes at the most, roughly: its place among the cells of a few tokens."""


def verify(
    *,
    chains: Annotated[int, WHOLE, Parameter(help="Chains started at the truth; more see a smaller bias.")] = 20_000,
    seed: Annotated[int, WHOLE, Parameter(help="Seed of all random streams.")] = 0,
) -> int:
    """Check every sampler against targets whose truth is known.

    Many chains start at the truth, take a few steps, and are compared with the truth. Exits 1 if a sampler that claims
    to be exact is not; samplers that are biased by design are shown with their bias.
    """
    if chains < 1000:
        raise SamplingError(f"--chains {chains} would see no bias", remedy="use 1000 or more")
    check_memory(CHAIN_BYTES * chains, f"--chains {chains}")
    check_seed(seed)

    from structured_voronoi.verify.claims import cases

    return check_cases(cases(), chains, seed)


def check_cases(cases: list[Case], chains: int, seed: int) -> int:
    """Print a table of verdicts and how many claims failed; returns the exit code."""
    from rich.console import Console
    from rich.table import Table

    from structured_voronoi.core.progress import progress_bar
    from structured_voronoi.verify.claims import verdicts

    grid = Table("sampler", "target", "TV", "floor", "TV/floor", "p", "moved", "verdict")
    failed = done = 0
    with contextlib.suppress(KeyboardInterrupt), progress_bar(len(cases), show=True, label="verify") as tick:
        for verdict in verdicts(chains, seed, cases):
            result = verdict.found
            failed, done = failed + verdict.failed, done + 1
            numbers = (f"{result.tv:.4f}", f"{result.floor:.4f}", f"{result.ratio:.2f}", f"{result.p_value:.2g}")
            row = (verdict.case.sampler, verdict.case.target, *numbers, f"{result.moved:.0%}", verdict.word)
            grid.add_row(*row, style="bold red" if verdict.failed else None)
            tick()
    Console(width=None if sys.stdout.isatty() else 120).print(grid)
    print(f"{failed} of {sum(case.claims_exact for case in cases)} claims of exactness failed ({chains:,} chains).")
    if done < len(cases):
        print(f"svs: interrupted after {done} of {len(cases)} checks", file=sys.stderr)
        return 130
    return int(failed > 0)
