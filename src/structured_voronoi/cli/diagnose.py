"""`svs diagnose`: figures and warnings about a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from structured_voronoi.cli.options import warning_line

if TYPE_CHECKING:
    from structured_voronoi.diagnostics.diagnosis import Diagnosis
    from structured_voronoi.diagnostics.records import Record

MIXING_COLUMNS = ("", "mean", "sd", "R-hat", "ESS bulk", "ESS tail")


def diagnose(
    run: Annotated[
        Path,
        Parameter(help="Texts of `svs sample --out`, draws of `sv.sample` (draws.to_netcdf), or a checkpoint folder."),
    ],
    /,
    *,
    out: Annotated[Path | None, Parameter(help="Folder for diagnosis.json, diagnosis.md and plots.")] = None,
) -> int:
    """Print R-hat and effective sample sizes of log p and of each control, acceptance rates, and warnings.

    Exits 1 if a warning is serious.

    Example: svs diagnose draws.nc --out diagnosis
    """
    from structured_voronoi.diagnostics.diagnosis import diagnose_records
    from structured_voronoi.engine.stored_runs import read_run

    records = read_run(run)
    if out is not None:
        from structured_voronoi.models.folders import writable_folder

        writable_folder(out, ["diagnosis"])
    found = diagnose_records(records)
    _print(found)
    if out is not None:
        _write(records, found, out)
    return 0 if found.ok else 1


def _print(found: Diagnosis) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 120)
    mixing = Table(*MIXING_COLUMNS)
    for name, figures in found.mixing.items():
        mixing.add_row(Text(name), *("" if figure is None else f"{figure:,.4g}" for figure in figures))
    console.print(mixing)
    if found.figures:
        others = Table(show_header=False)
        for row in found.rows():
            others.add_row(*map(Text, row))
        console.print(others)
    print(found.status)
    for warning in found.warnings:
        print(f"warning ({warning.code}): {warning_line(warning)}")


def _write(records: dict[str, Record], found: Diagnosis, out: Path) -> None:
    from structured_voronoi.diagnostics.plots import make_plots
    from structured_voronoi.experiments.report import table, write_report

    plots = {
        f"diagnosis_{f'{name}_' if name else ''}{plot}".replace(" ", "_"): figure
        for name, record in records.items()
        for plot, figure in make_plots(record).items()
    }
    mixing = table(
        MIXING_COLUMNS,
        [[name, *("" if figure is None else figure for figure in figures)] for name, figures in found.mixing.items()],
    )
    warnings = [f"- {warning.code}: {warning_line(warning)}" for warning in found.warnings]
    images = [f"![{name}]({name}.png)" for name in plots]
    text = "\n\n".join([found.status, *warnings, mixing, table(["", ""], found.rows()), *images])
    for path in write_report(out, "diagnosis", found.to_dict(), text, plots):
        print(path)
