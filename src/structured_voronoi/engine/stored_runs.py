"""`diagnose`, and the runs it reads: draws in NetCDF files, texts in JSONL files, checkpoint folders."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from structured_voronoi.core.errors import SamplingError, one_line
from structured_voronoi.diagnostics.checks import DiagnosticSettings
from structured_voronoi.diagnostics.diagnosis import Diagnosis, diagnose_records
from structured_voronoi.diagnostics.records import LOG_PROB, Record, record_of_draws
from structured_voronoi.engine.texts import LINE_KEYS

if TYPE_CHECKING:
    from xarray import DataTree

REMEDY = "use a file of `svs sample --out` or of draws.to_netcdf, or a checkpoint folder"


def diagnose(run: DataTree | str | Path, settings: DiagnosticSettings | None = None) -> Diagnosis:
    """Diagnose a run: R-hat, effective sample sizes, further figures, and warnings.

    Parameters
    ----------
    run
        The result of `sample`; or the path of a NetCDF file with such a result, of a JSONL file with texts, or of a
        checkpoint folder.
    settings
        Thresholds of the warnings.

    Returns
    -------
    Diagnosis
        ``ok`` is False if a warning is serious; ``warnings`` have a code, a message and a remedy.

    Raises
    ------
    SamplingError
        If the path holds no run.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> draws = sv.sample(sv.PottsTarget(side=2), sv.SVS(scale=0.5), draws=100, progress=False)
    >>> sv.diagnose(draws).ok
    True
    """
    records = read_run(Path(run)) if isinstance(run, str | Path) else {"": record_of_draws(run)}
    return diagnose_records(records, settings)


def read_run(path: Path) -> dict[str, Record]:
    """The runs in a file or folder, by prompt if there are several; an error if it holds none."""
    netcdf_magic = b"\x89HDF"
    try:
        if not path.exists():
            raise SamplingError(f"{path} does not exist", remedy=REMEDY)
        if path.is_dir():
            from structured_voronoi.engine.checkpoint_records import read_checkpoint

            return read_checkpoint(path)
        if not path.is_file():
            raise SamplingError(f"{path} is not a file", remedy=REMEDY)
        with path.open("rb") as file:
            beginning = file.read(len(netcdf_magic))
        if not beginning:
            raise SamplingError(f"{path} is empty", remedy=REMEDY)
        return {"": _read_draws(path) if beginning == netcdf_magic else _read_texts(path)}
    except OSError as error:
        cause = error.strerror or one_line(error)
        raise SamplingError(f"{path} could not be read", cause=cause, remedy=REMEDY) from error


def _read_draws(path: Path) -> Record:
    import xarray

    try:
        with xarray.open_datatree(path, engine="h5netcdf") as tree:
            draws = tree.load()
    except Exception as error:  # truncated or changed files raise errors of many classes
        raise SamplingError(f"{path} is damaged", cause=one_line(error, 100), remedy=REMEDY) from error
    for group, name, dimensions in (
        ("sample_stats", LOG_PROB, ("chain", "draw")),
        ("posterior", "tokens", ("chain", "draw", "position")),
    ):
        column = draws[group].to_dataset().get(name) if group in draws.children else None
        if column is None or column.dims != dimensions or not column.size or column.dtype.kind not in "iuf":
            raise SamplingError(f"{path} has no {group}/{name} of dimensions {', '.join(dimensions)}", remedy=REMEDY)
    try:
        return record_of_draws(draws)
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # written by another program
        raise SamplingError(
            f"{path} was not written by sv.sample", cause=one_line(error, 100), remedy=REMEDY
        ) from error


def _read_texts(path: Path) -> Record:
    try:
        with path.open(encoding="utf-8") as file:
            rows = [_read_line(line, f"{path}, line {number}") for number, line in enumerate(file, 1)]
    except UnicodeDecodeError as error:
        cause = f"byte {error.start} is not UTF-8"
        raise SamplingError(f"{path} is neither JSONL nor NetCDF", cause=cause, remedy=REMEDY) from error
    texts = [(row["prompt"], row["text"]) for row in rows]
    repeated = sum(count for count in Counter(texts).values() if count > 1)

    def column(name: str) -> np.ndarray:
        return np.array([[row[name]] for row in rows], dtype=float)

    controls = [
        name
        for name in rows[0]
        if name not in LINE_KEYS and all(isinstance(row.get(name), float | int) for row in rows)
    ]
    return Record(
        sampler="svs sample",
        log_prob=column("log_target"),
        one_text=True,
        controls={name: column(name) for name in controls},
        texts=texts,
        figures={
            "prompts": len({row["prompt"] for row in rows}),
            "repeated texts": repeated,
            "share of texts that stopped": float(np.mean([row["finish_reason"] == "stop" for row in rows])),
        },
    )


def _read_line(line: str, place: str) -> dict[str, Any]:
    """The text in a line of a JSONL file; an error if a key is missing or has another type."""
    types: dict[str, Any] = {"prompt": str, "index": int, "text": str, "finish_reason": str, "log_target": float | int}
    try:
        # integers of many digits become floating-point numbers, possibly infinite
        row = json.loads(line, parse_int=lambda digits: int(digits) if len(digits) < 18 else float(digits))
    except (ValueError, RecursionError) as error:
        raise SamplingError(f"{place} is not JSON", cause=one_line(error, 100), remedy=REMEDY) from error
    for name, kind in types.items():
        value = row.get(name) if isinstance(row, dict) else None
        if not isinstance(value, kind) or isinstance(value, bool):
            raise SamplingError(f"{place} has no valid `{name}`", remedy=REMEDY)
    return dict(row)
