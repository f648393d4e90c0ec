"""What a run wrote, read back to be judged: draws in a NetCDF file, texts in a JSONL file, a checkpoint folder."""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from structured_voronoi.core.errors import SamplingError, one_line
from structured_voronoi.diagnostics.diagnosis import Diagnosis, diagnose_records
from structured_voronoi.diagnostics.records import Record, record_of_draws
from structured_voronoi.engine.texts import Text

if TYPE_CHECKING:
    from xarray import DataTree

NETCDF = b"\x89HDF"
"""How a NetCDF file of `draws.to_netcdf` begins."""
LINE: dict[str, Any] = {"chain": int, "draw": int, "prompt": str, "text": str, "ended": str, "energy": float | int}
"""What every line of a JSONL file must have."""
REMEDY = "give a file of `svs sample --out` or of draws.to_netcdf, or a folder of --checkpoint"


def diagnose(run: DataTree | str | Path) -> Diagnosis:
    """Whether to trust a run: the draws of `sample`, a file that they or texts were written to, a checkpoint folder."""
    return diagnose_records(read_run(Path(run)) if isinstance(run, str | Path) else {"": record_of_draws(run)})


def read_run(path: Path) -> dict[str, Record]:
    """The run in a file or a folder, by prompt if need be; an error says what is wrong with one that holds none."""
    try:
        if not path.exists():
            raise SamplingError(f"{path} does not exist", remedy=f"{REMEDY}")
        if path.is_dir():
            from structured_voronoi.engine.stored_checkpoints import read_checkpoint

            return read_checkpoint(path)
        if not path.is_file():
            raise SamplingError(f"{path} is not a file", remedy=f"{REMEDY}")
        with path.open("rb") as file:
            beginning = file.read(len(NETCDF))
        if not beginning:
            raise SamplingError(f"{path} is empty", remedy=f"{REMEDY}")
        return {"": _read_draws(path) if beginning == NETCDF else _read_texts(path)}
    except OSError as error:
        raise SamplingError(
            f"{path} cannot be read ({error.strerror or one_line(error)})", remedy=f"{REMEDY}"
        ) from error


def _read_draws(path: Path) -> Record:
    import xarray

    try:
        with xarray.open_datatree(path, engine="h5netcdf") as tree:
            draws = tree.load()
    except Exception as error:  # the libraries raise many kinds for a file that is cut off or changed
        raise SamplingError(f"{path} is damaged ({one_line(error, 100)})", remedy=f"{REMEDY}") from error
    for group, name, dimensions in (
        ("sample_stats", "energy", ("chain", "draw")),
        ("posterior", "tokens", ("chain", "draw", "position")),
    ):
        column = draws[group].to_dataset().get(name) if group in draws.children else None
        if column is None or column.dims != dimensions or not column.size or column.dtype.kind not in "iuf":
            raise SamplingError(f"{path} holds no {group}/{name} by {', '.join(dimensions)}", remedy=f"{REMEDY}")
    try:
        return record_of_draws(draws)
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # attributes or statistics of another program
        raise SamplingError(f"{path} is not of `sv.sample` ({one_line(error, 100)})", remedy=f"{REMEDY}") from error


def _read_texts(path: Path) -> Record:
    lines: dict[tuple[int, int], dict[str, Any]] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                row = _read_line(line, f"{path}, line {number}")
                place = row["chain"], row["draw"]
                if place in lines:
                    raise SamplingError(
                        f"{path}, line {number}: chain {place[0]} has draw {place[1]} twice",
                        remedy="give the file of one run",
                    )
                lines[place] = row
    except UnicodeDecodeError as error:
        raise SamplingError(f"{path} is neither UTF-8 nor NetCDF (byte {error.start})", remedy=f"{REMEDY}") from error
    if not lines:
        raise SamplingError(f"{path} holds no text", remedy=f"{REMEDY}")
    grouped = groupby(sorted(lines.items()), key=lambda line: line[0][0])
    chains = {chain: [row for _, row in rows] for chain, rows in grouped}
    prompts = {row["prompt"] for row in lines.values()}
    if len(prompts) > 1 and len(lines) > len(chains):
        raise SamplingError(
            f"{path} holds several draws a chain of {len(prompts)} prompts, which cannot be compared",
            remedy="write a file for every prompt",
        )
    return _record_of_chains(chains, len(prompts))


def _read_line(line: str, where: str) -> dict[str, Any]:
    """The text in a line, with its controls; an error says what it lacks."""
    try:
        row = json.loads(line, parse_int=_read_whole)
    except (ValueError, RecursionError) as error:
        raise SamplingError(f"{where} is no JSON ({one_line(error, 100)})", remedy=f"{REMEDY}") from error
    for name, kind in LINE.items():
        value = row.get(name) if isinstance(row, dict) else None
        if not isinstance(value, kind) or isinstance(value, bool):
            raise SamplingError(f"{where} has no `{name}` as `svs sample` writes it", remedy=f"{REMEDY}")
    return dict(row)


def _read_whole(digits: str) -> int | float:
    """A whole number; one that no file of ours has is no longer whole, and may be infinite."""
    return int(digits) if len(digits) < 18 else float(digits)


def _record_of_chains(chains: dict[int, list[dict[str, Any]]], prompts: int) -> Record:
    """Texts by chain; a chain that was interrupted later than others is cut to their length."""
    shortest = min(map(len, chains.values()))
    table = [rows[:shortest] for rows in chains.values()]
    every = [row for rows in table for row in rows]

    def column(name: str) -> np.ndarray:
        return np.array([[row[name] for row in rows] for rows in table], dtype=float)

    def is_score(name: str) -> bool:
        return name not in Text._fields and all(isinstance(row.get(name), float | int) for row in every)

    texts = [(row["prompt"], row["text"]) for row in every]
    again = sum(count for count in Counter(texts).values() if count > 1)
    ended = [row["ended"] != "no" for row in every]
    return Record(
        sampler="svs sample",
        energy=column("energy"),
        chains=list(chains),
        scores={name: column(name) for name in every[0] if is_score(name)},
        texts=texts if shortest == 1 else (),
        extra={"prompts": prompts, "texts that occur again": again, "share of texts that ended": float(np.mean(ended))},
    )
