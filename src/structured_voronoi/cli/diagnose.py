"""`svs diagnose`: whether a run can be trusted, from what it wrote."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from structured_voronoi.diagnostics.diagnosis import Diagnosis
    from structured_voronoi.diagnostics.records import Record


def diagnose(
    run: Annotated[
        Path,
        Parameter(
            help="Texts of `svs sample --out`, draws of `sv.sample` (draws.to_netcdf), or a --checkpoint folder."
        ),
    ],
    /,
    *,
    out: Annotated[Path | None, Parameter(help="Folder for diagnosis.json, diagnosis.md and pictures.")] = None,
) -> int:
    """Say whether a run can be trusted: R-hat and effective samples of the energy and of each control, what moved, what
    was refused, and warnings with their remedies.

    Exits 1 if it should not be trusted.

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
    return 0 if found.trusted else 1


def _print(found: Diagnosis) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 120)
    mixing = Table("", "mean", "sd", "R-hat", "ESS", "ESS in the tails")
    for name, figures in found.mixing.items():
        mixing.add_row(Text(name), *("" if figure is None else f"{figure:,.4g}" for figure in figures))
    console.print(mixing)
    if found.figures:
        others = Table(show_header=False)
        for row in found.rows():
            others.add_row(*map(Text, row))
        console.print(others)
    print(f"{found.about}: {found.verdict}.")
    for words in found.warnings:
        print(f"warning: {words}.")


def _write(records: dict[str, Record], found: Diagnosis, out: Path) -> None:
    from structured_voronoi.diagnostics.pictures import draw_pictures
    from structured_voronoi.experiments.report import table, write_report

    pictures = {
        f"diagnosis_{f'{name}_' if name else ''}{picture}".replace(" ", "_"): figure
        for name, record in records.items()
        for picture, figure in draw_pictures(record).items()
    }
    mixing = table(
        ["", "mean", "sd", "R-hat", "ESS", "ESS in the tails"],
        [[name, *("" if figure is None else figure for figure in figures)] for name, figures in found.mixing.items()],
    )
    warnings = [f"- {words}" for words in found.warnings]
    shown = [f"![{name}]({name}.png)" for name in pictures]
    words = "\n\n".join([f"{found.about}: {found.verdict}.", *warnings, mixing, table(["", ""], found.rows()), *shown])
    for path in write_report(out, "diagnosis", found.to_dict(), words, pictures):
        print(path)
