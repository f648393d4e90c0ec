"""The command `svs`. Heavy imports happen inside the commands, so that `svs --help` answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from structured_voronoi.experiments import EXPERIMENTS

app = App(
    name="svs",
    help="""Draw samples under control, and prove that they follow the distribution they should.

    Start with `svs verify`, which checks every sampler against known truth, or `svs reproduce toy`, which draws the
    paper's toy figures into ./results.""",
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(negative=()),
)

SAMPLERS = {
    "SVS": "structured Voronoi sampling by exact motion; open walls are exact for every target",
    "SVS.paper": "the paper's algorithm: leapfrog and a grid of discontinuity steps",
    "HMC": "plain Hamiltonian Monte Carlo on the Voronoi measure",
    "Langevin": "Langevin dynamics on the Voronoi measure, uncorrected by default",
    "MuCoLa": "Langevin steps projected to embeddings, uncorrected by default",
    "PNCG": "norm-constrained gradient proposal with Metropolis; exact",
    "GibbsWithGradients": "one position at a time, proposed by the gradient; exact",
}
TARGETS = {
    "CategoricalTarget": "one token from a distribution over embedded elements, inside a box",
    "TabularTarget": "any table over [M]^N; its truth is known",
    "PottsTarget": "the Potts and Ising models on a square lattice",
}

Out = Annotated[Path, Parameter(help="Folder for NAME.json, NAME.md and pictures.")]
Seed = Annotated[int, Parameter(help="Seed of all random streams.")]


@app.command
def reproduce(
    name: Annotated[str, Parameter(help="Experiment, as listed by `svs ls`, or `all`.")],
    /,
    *,
    out: Out = Path("results"),
    runs: Annotated[
        int | None, Parameter(help="Independent runs (chains); the default is the experiment's own.")
    ] = None,
    seed: Annotated[int | None, Parameter(help="Seed; the default is the experiment's own.")] = None,
) -> int:
    """Reproduce a table or figure: writes NAME.json, NAME.md and NAME*.png.

    Example: svs reproduce toy --out results
    """
    import importlib

    from structured_voronoi.base import SamplingError, did_you_mean
    from structured_voronoi.experiments.report import writable_folder

    if name != "all" and name not in EXPERIMENTS:
        raise SamplingError(f"unknown experiment {name!r}; {did_you_mean(name, [*EXPERIMENTS, 'all'])}")
    if runs is not None and runs < 2:
        raise SamplingError(f"--runs {runs}: intervals need two or more runs; leave it out for the default")
    settings = {key: value for key, value in (("runs", runs), ("seed", seed)) if value is not None}
    folder = writable_folder(out)
    for one in EXPERIMENTS if name == "all" else [name]:
        experiment = importlib.import_module(f"structured_voronoi.experiments.{one}")
        for path in experiment.run(folder, **settings):
            print(path)
    return 0


@app.command
def verify(
    *,
    chains: Annotated[int, Parameter(help="Chains started at the truth; more see a smaller bias.")] = 20_000,
    seed: Seed = 0,
) -> int:
    """Check every sampler against targets whose truth is known.

    Many chains start at the truth, take a few steps, and are compared with the truth. Exits 1 if a sampler that claims
    to be exact is not; samplers that are biased by design are shown with their bias.
    """
    from rich.console import Console
    from rich.table import Table

    from structured_voronoi.base import SamplingError
    from structured_voronoi.experiments.verify import cases, verdicts
    from structured_voronoi.run.progress import progress_bar

    if chains < 1000:
        raise SamplingError(f"--chains {chains} would see no bias; use 1000 or more")
    grid = Table("sampler", "target", "TV", "floor", "TV/floor", "p", "moved", "verdict")
    failed = 0
    with progress_bar(len(cases()), show=True, what="verify") as tick:
        for verdict in verdicts(chains, seed):
            fit = verdict.found.fit
            failed += verdict.word == "FAILED"
            numbers = (f"{fit.tv:.4f}", f"{fit.floor:.4f}", f"{fit.ratio:.2f}", f"{fit.p_value:.2g}")
            row = (verdict.case.sampler, verdict.case.target, *numbers, f"{verdict.found.moved:.0%}", verdict.word)
            grid.add_row(*row, style="bold red" if verdict.word == "FAILED" else None)
            tick(None)
    Console(width=None if sys.stdout.isatty() else 120).print(grid)
    print(f"{failed} of {sum(case.claims_exact for case in cases())} claims of exactness failed ({chains:,} chains).")
    return int(failed > 0)


@app.command
def ls() -> int:
    """List samplers, targets and experiments."""
    for title, entries in (("samplers", SAMPLERS), ("targets", TARGETS), ("experiments", EXPERIMENTS)):
        print(title)
        for name, what in entries.items():
            print(f"  {name:<20} {what}")
    return 0


def main() -> None:
    """Run the command: exit 0 for success, 1 for a failed check, 2 for a mistake in what was asked, 130 on Ctrl-C."""
    words = [word for word in sys.argv[1:] if word != "--debug"]
    debug = len(words) < len(sys.argv) - 1
    try:
        sys.exit(app(words, exit_on_error=False, print_error=False) or 0)
    except KeyboardInterrupt:
        print("svs: interrupted", file=sys.stderr)
        sys.exit(130)
    except CycloptsError as error:
        print(f"svs: {' '.join(str(error).split())} See `svs --help`.", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        from structured_voronoi.base import SamplingError

        if debug or not isinstance(error, SamplingError):
            raise
        print(f"svs: {error}", file=sys.stderr)
        sys.exit(2)
