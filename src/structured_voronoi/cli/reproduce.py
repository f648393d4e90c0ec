"""`svs reproduce`: the paper's tables and figures, and ours."""

from __future__ import annotations

import contextlib
import importlib
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from structured_voronoi.cli import WHOLE
from structured_voronoi.cli.options import CHECKPOINT_HELP, RESUME_HELP, check_resume
from structured_voronoi.core.errors import SamplingError, did_you_mean
from structured_voronoi.core.validation import check_count, check_seed, is_file, is_folder
from structured_voronoi.experiments import EXPERIMENTS, Experiment

if TYPE_CHECKING:
    from structured_voronoi.storage.store import Store

WITH_DATA = ", ".join(name for name, experiment in EXPERIMENTS.items() if experiment.takes_data)
WITH_MODEL = ", ".join(name for name, experiment in EXPERIMENTS.items() if experiment.takes_model)


def reproduce(
    name: Annotated[str, Parameter(help="Experiment, as listed by `svs ls`, or `all`.")],
    /,
    *,
    out: Annotated[Path, Parameter(help="Folder for NAME.json, NAME.md and pictures.")] = Path("results"),
    runs: Annotated[
        int | None, WHOLE, Parameter(help="Independent runs (chains); the default is the experiment's own.")
    ] = None,
    seed: Annotated[int | None, WHOLE, Parameter(help="Seed; the default is the experiment's own.")] = None,
    data: Annotated[
        str | None,
        Parameter(help=f"{WITH_DATA}: train a language model on these texts first (kept in the cache)."),
    ] = None,
    model: Annotated[
        str | None, Parameter(help=f"{WITH_MODEL}: use this language model, as `svs sample` takes it, and train none.")
    ] = None,
    checkpoint: Annotated[Path | None, Parameter(help=CHECKPOINT_HELP)] = None,
    resume: Annotated[bool, Parameter(help=RESUME_HELP, negative="")] = False,
) -> int:
    """Reproduce a table or figure: writes NAME.json, NAME.md and NAME*.png.

    Examples: svs reproduce toy --out results
              svs reproduce lm --data path/to/e2e
              svs reproduce sentiment --model smollm2 --data path/to/sst2
    """
    if name != "all" and name not in EXPERIMENTS:
        raise SamplingError(f"unknown experiment {name!r}", remedy=did_you_mean(name, [*EXPERIMENTS, "all"]))
    if runs is not None and runs < 2:
        raise SamplingError(f"--runs {runs}: intervals need two or more runs", remedy="leave it out for the default")
    check_count(runs=runs or 2)
    check_seed(seed or 0)
    if data not in (None, "builtin") and not (is_file(data) or is_folder(data)):
        raise SamplingError(
            f"--data {data} does not exist",
            remedy="give a folder of E2E or SST-2 files, or a text file",
        )
    chosen = {name: EXPERIMENTS[name]} if name != "all" else _select_runnable(data)
    if name != "all":
        _check_data(name, EXPERIMENTS[name], data)
    if model is not None and (name == "all" or not EXPERIMENTS[name].takes_model):
        raise SamplingError(f"--model does not go with {name}", remedy=f"it is for {WITH_MODEL}")
    check_resume(resume, checkpoint)

    from structured_voronoi.models.folders import writable_folder

    folder = writable_folder(out, list(chosen))
    given = (("runs", runs), ("seed", seed), ("model", model))
    changes: dict[str, Any] = {key: value for key, value in given if value is not None}
    modules = {
        name: importlib.import_module(f"structured_voronoi.experiments.{experiment.module}")
        for name, experiment in chosen.items()
    }
    settings = {
        name: replace(
            module.Settings(), **changes, **({"data": data} if data and _data_fits(chosen[name], data) else {})
        )
        for name, module in modules.items()
    }
    with contextlib.ExitStack() as stack:
        store = None
        if checkpoint is not None:
            from structured_voronoi.storage.task_results import checkpoint_tasks

            store = stack.enter_context(_open_store(checkpoint, resume, settings))
        for name, module in modules.items():
            with checkpoint_tasks(store, name) if store is not None else contextlib.nullcontext():
                for path in module.run(settings[name], folder):
                    print(path)
        if store is not None:
            store.commit({}, finished=True)
    return 0


def _open_store(folder: Path, resume: bool, settings: dict[str, Any]) -> Store:
    """The folder of a run with these settings of experiments, by name."""
    from structured_voronoi.storage.packing import describe
    from structured_voronoi.storage.store import Store

    store = Store(folder, resume)
    try:
        told = {
            name: {key: value for key, value in describe(of).items() if key not in ("progress", "workers")}
            for name, of in settings.items()
        }
        store.begin("svs reproduce", told, {"structured-voronoi": version("structured-voronoi")})
    except SamplingError:
        store.close()
        raise
    return store


def _data_fits(experiment: Experiment, data: str) -> bool:
    """Can the experiment use this data?"""
    return experiment.takes_data and (not experiment.data_file or (Path(data) / experiment.data_file).exists())


def _check_data(name: str, experiment: Experiment, data: str | None) -> None:
    """Refuse data that an experiment cannot use, or none where it needs some."""
    if data is not None and not experiment.takes_data:
        raise SamplingError(f"--data does not go with {name}", remedy=f"it is for {WITH_DATA}")
    if experiment.needs_data if data is None else not _data_fits(experiment, data):
        raise SamplingError(
            f"{name} needs texts with labels",
            remedy=f"give --data FOLDER with {experiment.data_file}",
        )


def _select_runnable(data: str | None) -> dict[str, Experiment]:
    """All experiments except those whose data is missing, which are named on stderr."""
    chosen = {}
    for name, experiment in EXPERIMENTS.items():
        if experiment.needs_data and (data is None or not _data_fits(experiment, data)):
            print(f"svs: {name} is left out; it needs --data FOLDER with {experiment.data_file}", file=sys.stderr)
        else:
            chosen[name] = experiment
    return chosen
