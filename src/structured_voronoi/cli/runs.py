"""`svs runs`: the contents of checkpoint folders."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from structured_voronoi.storage.manifest import MANIFEST, DamagedError, Manifest, read_manifest

Folder = Annotated[Path, Parameter(help="Checkpoint folder.")]


def check(folder: Folder, /) -> int:
    """Compare the files of a checkpoint with their checksums. Exits 0 if all match, 1 if not, 2 without a checkpoint.

    Example: svs runs check ./my-run
    """
    with contextlib.suppress(DamagedError):  # reported below
        read_manifest(folder)
    folders = [path.parent for path in sorted(folder.rglob(MANIFEST))]
    damages = [damage for place in folders for damage in _find_damage(place)]
    for damage in damages:
        print(damage)
    if damages:
        return 1
    parts = sum(len(read_manifest(place).parts) for place in folders)
    print(f"OK: {parts} part{'' if parts == 1 else 's'}, all checksums match")
    return 0


def show(folder: Folder, /) -> int:
    """Show the settings of a run, its progress, and some of its texts.

    Example: svs runs show ./my-run
    """
    manifest = read_manifest(folder)
    size = sum(part.size for part in manifest.parts.values())
    finished = "finished" if manifest.finished else "unfinished"
    print(f"{folder}: {manifest.kind}, {finished}, {manifest.progress_text or 'no progress yet'}")
    print(f"begun {manifest.begun}, last saved {manifest.saved}; {len(manifest.parts)} parts, {size:,} bytes")
    for name, value in manifest.settings.items():
        if name != "target":  # numbers that identify it
            print(f"  {name}: {json.dumps(value, ensure_ascii=False)}")
    print("versions: " + ", ".join(f"{name} {number}" for name, number in manifest.versions.items()))
    for text in _first_texts(folder, manifest):
        print(f"text: {text}")
    return 0


def _find_damage(folder: Path) -> list[str]:
    """What is wrong with a run. A run in progress changes its files, and is checked up to three times."""
    for _ in range(3):
        try:
            manifest = read_manifest(folder)
            damages = manifest.find_damage(folder)
            if not damages or read_manifest(folder) == manifest:
                return damages
        except DamagedError as error:
            return [error.message]
    print(f"{folder} is being written to and was not checked; check it again later", file=sys.stderr)
    return []


def _first_texts(folder: Path, manifest: Manifest, count: int = 3) -> list[str]:
    batches = sorted(name for name in manifest.parts if name.startswith(("batch-", "texts-")))
    if manifest.kind != "texts" or not batches:
        return []
    from structured_voronoi.storage.packing import unpack

    texts = unpack(manifest.read(folder, batches[0]))["texts"]
    return [str(text["text"]) for text in texts[:count]]
