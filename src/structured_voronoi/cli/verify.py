"""`svs verify`: checks of all samplers on targets whose exact probabilities are known."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from structured_voronoi.cli import WHOLE
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.validation import check_memory, check_seed

if TYPE_CHECKING:
    from structured_voronoi.verify.checks import Case


def verify(
    *,
    chains: Annotated[int, WHOLE, Parameter(help="Number of chains; more chains detect a smaller bias.")] = 20_000,
    seed: Annotated[int, WHOLE, Parameter(help="Seed of all random streams.")] = 0,
) -> int:
    """Check every sampler on targets whose exact probabilities are known.

    Chains start from the exact distribution, take a few steps, and are compared with it. The exit status is 1 if an
    exact sampler fails. Samplers that are not exact are listed with their bias.
    """
    if chains < 1000:
        raise SamplingError(f"{chains} is too few to detect a bias", argument="chains", remedy="use 1000 or more")
    check_memory(10_000 * chains, f"{chains:,} chains")  # bytes per chain, roughly
    check_seed(seed)

    from structured_voronoi.verify.checks import cases

    return check_cases(cases(), chains, seed)


def check_cases(cases: list[Case], chains: int, seed: int) -> int:
    """Print a table of results and return the exit status."""
    from rich.console import Console
    from rich.table import Table

    from structured_voronoi.core.progress import progress_bar
    from structured_voronoi.verify.checks import Verdict, verdicts

    names, done = [f"{case.sampler}, {case.target}" for case in cases], list[Verdict]()
    with contextlib.suppress(KeyboardInterrupt), progress_bar(len(cases), show=True, stage="verifying") as tick:
        tick(names[0], 0)
        for verdict in verdicts(chains, seed, cases):
            done.append(verdict)
            tick(names[len(done)] if len(done) < len(names) else "")
    table = Table("sampler", "target", "TV", "floor", "TV/floor", "p", "moved", "result")
    for verdict in done:
        case, found = verdict
        numbers = (f"{found.tv:.4f}", f"{found.floor:.4f}", f"{found.ratio:.2f}", f"{found.p_value:.2g}")
        row = (case.sampler, case.target, *numbers, f"{found.moved:.0%}", verdict.status)
        table.add_row(*row, style="bold red" if verdict.failed else None)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    failed, exact = sum(verdict.failed for verdict in done), sum(verdict.case.exact for verdict in done)
    print(f"{failed} of {exact} exact samplers failed ({chains:,} chains).")
    if len(done) < len(cases):
        print(f"svs: interrupted after {len(done)} of {len(cases)} checks", file=sys.stderr)
        return 130
    return int(failed > 0)
